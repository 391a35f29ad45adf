"""Learning rates: the best of the grid on validation data, the same from one process or several, whatever dies."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from optuna.trial import TrialState

from blockadapt_experiments.core.settings import TuneSettings
from blockadapt_experiments.data.images import CLASSES
from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.running import tuning
from blockadapt_experiments.running.runner import Request
from blockadapt_experiments.running.storage import without_password
from blockadapt_experiments.running.tuning import TrialJob, Tuned, grid, tune
from blockadapt_experiments.running.workers import Done, Failed, work
from support.images import write_images
from support.laboratory import ENVIRONMENT, finished, request, run_command, wait_until

SMALL = ("tune.trials=3", "tune.low=1e-3", "tune.high=1e-1", "epochs=6", "train_examples=60")


@pytest.fixture(autouse=True)
def _closed_database() -> Iterator[None]:
    yield
    if tuning._storage.cache_info().currsize:
        storage = tuning._storage(last_storage)
        storage.remove_session()
        storage.engine.dispose()
    tuning._storage.cache_clear()


last_storage = ""


def tuned(asked: Request, storage: str | None = None) -> tuple[Tuned, list[Done | Failed]]:
    """Tune in this process; also how every trial ended."""
    global last_storage
    asked.out.mkdir(exist_ok=True)
    ends: list[Done | Failed] = []
    last_storage = storage or f"sqlite:///{asked.out / 'tuning.db'}"

    def do(jobs: Sequence[TrialJob]) -> list[Done | Failed]:
        ends.extend(work(jobs, 1, 1, lambda index, event: None))
        return ends[-len(jobs) :]

    return tune(asked, last_storage, {}, do, lambda claimed: pytest.fail("nobody else is at work")), ends


def by_hand(asked: Request, arm: str, lr: float) -> float:
    """Mean validation accuracy over the last fifth of the epochs and over the seeds."""
    values = []
    for seed in asked.settings.tune.seeds:
        task = asked.task(RunKey(arm, "", seed), lr, tuning=True)
        rows = [row for _ in range(task.legs) for row in task.advance()]
        late = rows[-math.ceil(len(rows) / 5) :]
        values.append(sum(row["validation_accuracy"] for row in late) / len(late))
    return sum(values) / len(values)


def test_the_grid_is_even_on_a_log_scale() -> None:
    rates = grid(TuneSettings(trials=13))
    assert len(rates) == 13
    assert (rates[0], rates[-1]) == (1e-4, 1e2)
    np.testing.assert_allclose(np.diff(np.log10(rates)), 0.5, atol=2e-3)
    assert grid(TuneSettings(trials=2, low=0.5, high=2.0)) == [0.5, 2.0]
    narrow = grid(TuneSettings(trials=5, low=0.10004, high=0.10006))
    assert all(0.10004 <= lr <= 0.10006 for lr in narrow)


def test_the_best_learning_rate_by_hand(tmp_path: Path) -> None:
    asked = request(tmp_path, *SMALL, "tune.seeds=[7, 8]")
    found, ends = tuned(asked)
    assert len(ends) == 6
    for arm in ("sgd", "block-adam"):
        values = {lr: by_hand(asked, arm, lr) for lr in grid(asked.settings.tune)}
        best = found[arm][""]
        assert best["tried"] == [[lr, value] for lr, value in values.items()]
        assert best["value"] == max(values.values())
        assert best["lr"] == min(lr for lr in values if values[lr] == best["value"])
        assert (best["trials"], best["objective"]) == (3, "validation_accuracy")


def test_what_was_tried_is_not_tried_again(tmp_path: Path) -> None:
    first, _ = tuned(request(tmp_path, *SMALL))
    again, ends = tuned(request(tmp_path, *SMALL, "optimizers=['block-adam']", "seeds=[5]", "lr.sgd=1.0"))
    assert ends == []
    assert again["block-adam"] == first["block-adam"]
    _, ends = tuned(request(tmp_path, *SMALL, "optimizers=['block-adam']", "optimizer.block_size=5"))
    assert len(ends) == 3


def test_a_trial_that_diverges_is_the_worst_and_an_edge_is_told(tmp_path: Path) -> None:
    changes = ("optimizers=['sgd']", "tune.trials=2", "tune.low=1e-2", "tune.high=1e30", "epochs=2")
    found, _ = tuned(request(tmp_path, *SMALL, *changes))
    best = found["sgd"][""]
    assert (best["lr"], best["tried"][1]) == (1e-2, [1e30, None])
    assert best["warning"] == (
        "The best learning rate is at the lower edge of the range; move `tune.low` and tune again."
    )
    hopeless, _ = tuned(request(tmp_path, *SMALL, *changes, "tune.low=1e29"))
    assert hopeless["sgd"][""]["warning"] == "Every learning rate diverged."
    assert hopeless["sgd"][""]["value"] is None


def test_no_warning_inside_the_range(tmp_path: Path) -> None:
    changes = ("optimizers=['sgd']", "tune.low=1e-6", "tune.high=1e4", "epochs=3")  # 0.1 in the middle
    found, _ = tuned(request(tmp_path, *SMALL, *changes))
    assert found["sgd"][""]["lr"] == 0.1
    assert "warning" not in found["sgd"][""]


def test_a_trial_that_fails_leaves_the_other_arms_alone(tmp_path: Path) -> None:
    asked = request(tmp_path, *SMALL, "optimizers=['full-adagrad', 'sgd']")
    found, ends = tuned(asked)
    assert found.keys() == {"sgd"}
    failed = [end for end in ends if isinstance(end, Failed)]
    assert failed
    assert all(end.kind == "ValueError" for end in failed)
    assert "4096" in (tmp_path / "tuning" / "full-adagrad" / "-" / "error.txt").read_text().replace(",", "")


def test_a_point_that_two_have_put_up_is_tried_once(tmp_path: Path) -> None:
    asked = request(tmp_path, *SMALL, "optimizers=['sgd']")
    job = TrialJob(asked, f"sqlite:///{tmp_path / 'tuning.db'}", "{}", "sgd", "")
    study = job.study()
    for _ in range(2):
        for point, lr in enumerate(grid(asked.settings.tune)):
            study.enqueue_trial({"lr": lr}, user_attrs={tuning.POINT: point})
    tuned(asked)
    states = [trial.state for trial in study.get_trials()]
    assert states.count(TrialState.COMPLETE) == 3
    assert states.count(TrialState.PRUNED) + states.count(TrialState.WAITING) == 3


def test_test_images_have_no_part_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 28, 28), dtype=np.uint8)
    write_images(tmp_path / "mnist", "train", images)
    monkeypatch.setitem(CLASSES, "mnist", 100)
    write_images(tmp_path / "mnist", "test", images[:20], first_label=50)  # a loss on such labels raises
    changes = ("data=mnist", "optimizers=['sgd']", "epochs=1", "tune.trials=2", "test_examples=20")
    asked = request(tmp_path / "out", *SMALL, *changes, data_dir=tmp_path)
    found, _ = tuned(asked)
    assert found["sgd"][""]["trials"] == 2
    with pytest.raises(IndexError):
        asked.task(RunKey("sgd", "", 0), 0.1).advance()


# Several processes ----------------------------------------------------------------------------------------------------


def count(database: Path, state: str) -> int:
    """Trials in this state, without Optuna: it would make the tables while another process does."""
    if not database.exists():
        return 0
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM trials WHERE state = ?", (state,)).fetchone()[0])
        except sqlite3.OperationalError:  # no such table yet
            return 0


def test_two_processes_share_one_study(tmp_path: Path) -> None:
    database = tmp_path / "shared.db"
    changes = (*SMALL, "optimizers=['sgd']", "tune.trials=8")
    options = ["--tune", "--storage", f"sqlite:///{database}"]
    commands = [run_command(tmp_path / name, *changes, options=options) for name in ("first", "second")]
    processes = [
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
        for command in commands
    ]
    written = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], written
    tried = [words.count("tuning, sgd: lr") for words, _ in written]
    assert sum(tried) == 8
    assert count(database, "COMPLETE") == 8
    found = [read_json(tmp_path / name / "tuned.json") for name in ("first", "second")]
    assert found[0] == found[1]
    alone, _ = tuned(request(tmp_path / "alone", *changes))
    assert found[0] == alone


@pytest.mark.parametrize("url", ["nonsense", "sqlite:////no/such/folder/tuning.db", "oracle+none://host/x"])
def test_a_database_that_cannot_be_opened_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr(tuning, "PAUSES", (0.01,))
    job = TrialJob(request(tmp_path, *SMALL), url, "{}", "sgd", "")
    with pytest.raises(ValueError, match=r"^run: `storage` must be the URL of a database .* got ") as refusal:
        job.study()
    assert str(refusal.value).endswith(f"got {url!r}.")


@pytest.mark.skipif(importlib.util.find_spec("psycopg") is not None, reason="the driver is there")
def test_without_the_driver_of_postgresql_its_extra_is_named(tmp_path: Path) -> None:
    job = TrialJob(request(tmp_path, *SMALL), "postgresql://me:secret@host/db", "{}", "sgd", "")
    with pytest.raises(ValueError, match=r"^run: ") as refusal:
        job.study()
    sentence = 'run: `storage` needs the driver of PostgreSQL; install it with pip install "blockadapt[postgres]".'
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sqlite:////home/me/tuning.db", "sqlite:////home/me/tuning.db"),
        ("postgresql://host/db", "postgresql://host/db"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
        ("postgresql+psycopg://me:secret@host:5432/db", "postgresql+psycopg://me:***@host:5432/db"),
        ("postgresql://me:sec@ret/s@host/db", "postgresql://me:***@host/db"),
        ("postgresql://:secret@host/db", "postgresql://:***@host/db"),
        ("postgresql:///db?password=secret&host=a", "postgresql:///db?password=***&host=a"),
    ],
)
def test_a_url_is_told_without_its_password(url: str, told: str) -> None:
    assert without_password(url) == told


def test_other_data_are_another_study(tmp_path: Path) -> None:
    asked, url = request(tmp_path, *SMALL), f"sqlite:///{tmp_path / 'tuning.db'}"
    names = {TrialJob(asked, url, data, "sgd", "").study().study_name for data in ("a", "b", "a")}
    assert len(names) == 2
    global last_storage
    last_storage = url


IMPATIENT = """
from blockadapt_experiments.running import tuning
tuning.HEARTBEAT, tuning.GRACE, tuning.PATIENCE = 1, 2, 0.2
from blockadapt_experiments.__main__ import main
if __name__ == "__main__":
    main()
"""


def test_a_trial_whose_process_died_before_its_first_sign_of_life_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "GRACE", 1)
    changes = (*SMALL, "optimizers=['sgd']")
    asked = request(tmp_path / "out", *changes)
    asked.out.mkdir()
    job = TrialJob(asked, f"sqlite:///{asked.out / 'tuning.db'}", "{}", "sgd", "")
    tuning._put_up(job)
    with pytest.warns(UserWarning, match="Heartbeat"):
        job.study().ask()  # as a process does that dies here
    time.sleep(1.1)
    found, ends = tuned(asked)
    assert len(ends) == 3
    assert found == tuned(request(tmp_path / "alone", *changes))[0]


def test_tuning_goes_on_after_kill_9(tmp_path: Path) -> None:
    program = tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    out = tmp_path / "out"
    changes = (*SMALL, "optimizers=['adam']", "epochs=150")
    command = [sys.executable, str(program), *run_command(out, *changes, options=["--tune"])[3:]]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        database = out / "tuning.db"
        wait_until(lambda: (count(database, "COMPLETE"), count(database, "RUNNING")) == (1, 1), process)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    done = finished(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tuning, adam: lr") == 2
    found = read_json(out / "tuned.json")
    alone, _ = tuned(request(tmp_path / "alone", *changes))
    assert found == alone
    best = found["adam"][""]
    assert f"\nadam: lr {best['lr']:g}. {best.get('warning', '')}".rstrip() in done.stdout
    assert read_json(out / "runs" / "adam" / "-" / "seed-0" / "run.json")["lr"] == best["lr"]
