"""Runs are safe: whatever kills them, the same command goes on and ends with the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockadapt_experiments.core.config import load
from blockadapt_experiments.core.experiment import Task
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.results.measurements import Row, RunKey
from blockadapt_experiments.results.recorded_runs import read_run
from blockadapt_experiments.results.tensorboard import Board
from blockadapt_experiments.running import records, runner
from blockadapt_experiments.running.jobs import Leg, Note
from blockadapt_experiments.running.records import RunRecord
from blockadapt_experiments.running.runner import Request, RunJob, check, run_jobs, threads_for, warm_up
from support.images import write_images
from support.laboratory import ENVIRONMENT, TINY, finished, outcome, request, run_command, wait_until

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")


def ignore(event: Leg | Note) -> None:
    pass


def do_all(asked: Request) -> None:
    for job in run_jobs(asked, {}):
        assert job(ignore) is not None


@pytest.fixture
def always_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every leg, however short."""
    monkeypatch.setattr(runner, "SAVING_SHARE", math.inf)


# One process --------------------------------------------------------------------------------------------------------


def test_records_are_complete(tmp_path: Path) -> None:
    (job,) = run_jobs(request(tmp_path, "optimizers=['block-adam']", "lr.block-adam=0.005"), {})
    legs: list[Leg | Note] = []
    last = job(legs.append)
    assert [(leg.done, leg.legs) for leg in legs if isinstance(leg, Leg)] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert last == job.record.rows()[-1]
    about = read_json(job.record.folder / "run.json")
    assert (about["arm"], about["variant"], about["seed"], about["lr"]) == ("block-adam", "", 0, 0.005)
    assert about["settings"]["epochs"] == 3
    assert about["environment"]["threads"] == 1
    assert {"machine", "versions", "git", "kernel"} <= about["environment"].keys()
    result = read_json(job.record.folder / "result.json")
    assert result["numbers"] == {
        "parameters": 266_610,
        "steps": 6,
        "state_bytes": 4 * (266_610 + 26_661 * 55) + 6 * (8 + 5 * 8),
        "final_state_bytes": 4 * (266_610 + 26_661 * 55) + 6 * (8 + 5 * 8),
        "diverged": 0,
    }
    assert 0 < result["seconds"] < 60
    assert 50e6 < result["peak_memory_bytes"] < 8e9
    with np.load(job.record.folder / "arrays.npz") as archive:
        assert archive["weights"].shape == (266_610,)


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    (job,) = run_jobs(request(tmp_path, "optimizers=['sgd']"), {})
    first = job(ignore)
    before = {path: path.stat().st_mtime_ns for path in job.record.folder.iterdir() if path.name != ".lock"}
    assert job(ignore) == first
    assert {path: path.stat().st_mtime_ns for path in job.record.folder.iterdir() if path.name != ".lock"} == before


def test_runs_do_not_depend_on_what_ran_before(tmp_path: Path) -> None:
    together = request(tmp_path / "together", "optimizers=['adam', 'block-adam', 'sgd']")
    do_all(together)
    torch.rand(17)
    alone = request(tmp_path / "alone", "optimizers=['sgd']")
    do_all(alone)
    name = "runs/sgd/-/seed-0/metrics.jsonl"
    assert outcome(tmp_path / "alone")[name] == outcome(tmp_path / "together")[name]


def test_arms_come_in_turn_for_each_seed(tmp_path: Path) -> None:
    asked = request(tmp_path, "seeds=[3, 1]")
    assert asked.runs() == [
        RunKey(arm, "", seed) for seed, arm in ((3, "sgd"), (3, "block-adam"), (1, "sgd"), (1, "block-adam"))
    ]


def test_a_run_that_was_begun_keeps_its_threads(tmp_path: Path, always_save: None) -> None:
    (job,) = run_jobs(request(tmp_path, "optimizers=['sgd']", threads=2), {})
    seen: list[int] = []

    def stop(event: Leg | Note) -> None:
        assert isinstance(event, Leg)
        seen.append(torch.get_num_threads())
        if event.done == 1 and len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(stop)
    (again,) = run_jobs(request(tmp_path, "optimizers=['sgd']", threads=1), {})
    again(stop)
    assert seen == [2] * 5
    assert read_json(job.record.folder / "run.json")["environment"]["threads"] == 2
    assert torch.get_num_threads() == 1


def test_a_run_has_one_thread_unless_more_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(64)
    cores = runner.available_cores()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_for(1) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert threads_for(1) == cores
    assert threads_for(2) == max(1, cores // 2)
    assert threads_for(10 * cores) == 1
    torch.set_num_threads(1)
    assert threads_for(1) == 1


TOY = ("steps=2", "every=1", "optimizers=['full-adagrad']", "batches=[1]")


@pytest.mark.parametrize(
    ("experiment", "changes", "dtype"),
    [("toy-adagrad", TOY, torch.float64), ("mnist-lenet300", (*TINY, "optimizers=['sgd']"), torch.float32)],
)
def test_the_kernel_is_ready_before_the_clock_starts(
    tmp_path: Path, experiment: str, changes: tuple[str, ...], dtype: torch.dtype
) -> None:
    settings = load(get_experiment(experiment), "smoke", changes)
    (job,) = run_jobs(Request(experiment, "smoke", settings, tmp_path), {})
    moved: list[torch.dtype] = []
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: moved.append(optimizer.param_groups[0]["params"][0].dtype)
    )
    warm_up.cache_clear()
    try:
        job(ignore)
    finally:
        hook.remove()
    assert {*moved} == {dtype}  # the first is the step that makes ready, the others are those of the run
    assert len(moved) > 1
    before = len(moved)
    warm_up(dtype)
    assert len(moved) == before


@linux
def test_a_run_pays_for_the_threads_that_it_starts_and_for_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = []

    def work() -> None:
        start = time.thread_time()
        for _ in range(20):
            hashlib.sha256(bytes(5_000_000))
        spent.append(time.thread_time() - start)

    def advance(task: Task) -> tuple[Sequence[Row], bool]:
        theirs.submit(work).result()
        with ThreadPoolExecutor(1) as ours:
            ours.submit(work).result()
        return [{"epoch": 1}], False

    monkeypatch.setattr(runner, "advance", advance)
    (job,) = run_jobs(request(tmp_path, "optimizers=['sgd']", "epochs=1"), {})
    with ThreadPoolExecutor(1) as theirs:
        theirs.submit(int).result()
        job(ignore)
    assert spent[1] <= read_json(job.record.folder / "result.json")["seconds"] < sum(spent)


FRESH = """
import sys
from pathlib import Path
from blockadapt_experiments.running import runner
from support.laboratory import ignore, request

def advance(task):
    loaded = {*sys.modules}
    done = real(task)
    print(sorted({*sys.modules} - loaded))
    return done

real, runner.advance = runner.advance, advance
(job,) = runner.run_jobs(request(Path(sys.argv[1]), f"optimizers=['{sys.argv[2]}']", "epochs=2"), {})
job(ignore)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["sgd", "adam", "muon", "soap", "ggt", "block-adam"])
def test_the_first_run_of_a_process_is_not_charged_for_what_it_loads(tmp_path: Path, arm: str) -> None:
    """Torch's `zero_grad` loads seconds' worth of modules when it is first called."""
    here = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = finished([sys.executable, "-c", FRESH, str(tmp_path), arm], env=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n[]\n"


@pytest.mark.parametrize("arm", ["sgd", "adam", "block-adam", "rmsprop"])
def test_a_run_that_diverges_is_a_result(tmp_path: Path, arm: str) -> None:
    (job,) = run_jobs(request(tmp_path, f"optimizers=['{arm}']", f"lr.{arm}=1e30", "epochs=4"), {})
    job(ignore)
    result = read_json(job.record.folder / "result.json")
    rows = job.record.rows()
    assert result["numbers"]["diverged"] == 1
    assert len(rows) < 4
    assert not math.isfinite(rows[-1]["train_loss"]) or rows[-1]["train_loss"] > 1e10
    assert all(name in rows[-1] for name in ("epoch", "step", "train_loss", "test_accuracy"))


def test_what_cannot_work_is_refused_before_anything_begins(tmp_path: Path) -> None:
    asked = request(tmp_path / "out", "optimizers=['sgd', 'full-adagrad']")
    with pytest.raises(ValueError, match=r"4,?096"):
        check(run_jobs(asked, {}))
    assert not (tmp_path / "out").exists()


def test_numbers_too_small_for_all_their_digits_are_zero_within_a_run_only() -> None:
    tiny = torch.tensor(1e-40)

    class Halving:
        legs = 1

        def advance(self) -> list[dict[str, float]]:
            return [{"half": (tiny / 2).item()}]

    rows, _ = runner.advance(cast(Task, Halving()))
    assert rows == [{"half": 0.0}]
    assert (tiny / 2).item() > 0


def test_tensorboard_has_every_row_also_after_a_restart(tmp_path: Path, always_save: None) -> None:
    (job,) = run_jobs(request(tmp_path, "optimizers=['sgd']", tensorboard=True), {})

    def stop(event: Leg | Note) -> None:
        if isinstance(event, Leg) and event.done == 2:
            raise KeyboardInterrupt

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own
        with pytest.raises(KeyboardInterrupt):
            job(stop)
        job(ignore)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        log = EventAccumulator(str(tmp_path / "tensorboard" / "sgd" / "-" / "seed-0"))
        log.Reload()
        points = [(event.step, event.value) for event in log.Scalars("train_loss")]
    rows = job.record.rows()
    assert [step for step, _ in points] == [1, 2, 3]
    np.testing.assert_allclose([value for _, value in points], [row["train_loss"] for row in rows], rtol=1e-6)
    assert "epoch" not in log.Tags()["scalars"]


def test_tensorboard_keeps_apart_what_lies_between_whole_numbers(tmp_path: Path) -> None:
    rows = [{"distance": at / 4, "loss": at**2 / 3} for at in range(-4, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own
        board = Board(tmp_path / "log", "distance", rows[:4])
        board.add(rows[4:])
        board.close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        log = EventAccumulator(str(tmp_path / "log"))
        log.Reload()
        found = {name: [event.value for event in log.Scalars(name)] for name in ("distance", "loss")}
    for name, values in found.items():
        np.testing.assert_allclose(values, [row[name] for row in rows], rtol=1e-6)


# Records that are damaged, or continued elsewhere ---------------------------------------------------------------------


def begun(out: Path, legs: int, *changes: str, **options: object) -> RunJob:
    """A run that was stopped after so many legs."""
    (job,) = run_jobs(request(out, "optimizers=['sgd']", *changes, **options), {})

    def stop(event: Leg | Note) -> None:
        if isinstance(event, Leg) and event.done == legs:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(stop)
    return job


def notes(job: RunJob) -> tuple[list[str], list[str]]:
    """Do what is left of it; returns what it said, and what its record says."""
    events: list[Leg | Note] = []
    job(events.append)
    run = read_run(job.record.folder)
    assert run.finished
    return [event.words for event in events if isinstance(event, Note)], list(run.notes)


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ((), []),
        (("checkpoint.pt",), ["checkpoint.pt is damaged, or rows that it counts are. It goes on after leg 1."]),
        (
            ("checkpoint.pt", "metrics.jsonl"),
            [
                "checkpoint.pt is damaged, or rows that it counts are. "
                "checkpoint-before.pt is damaged, or rows that it counts are. It begins again."
            ],
        ),
    ],
)
def test_a_run_goes_on_from_what_is_whole_says_so_and_ends_the_same(
    tmp_path: Path, always_save: None, damaged: tuple[str, ...], words: list[str]
) -> None:
    do_all(request(tmp_path / "undisturbed", "optimizers=['sgd']"))
    job = begun(tmp_path / "out", 2)
    for name in damaged:
        path = job.record.folder / name
        path.write_bytes(b"?" + path.read_bytes()[1:-1])
    assert notes(job) == (words, words)
    assert outcome(tmp_path / "out") == outcome(tmp_path / "undisturbed")


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "timing.jsonl", "result.json", "arrays.npz"])
def test_a_finished_run_with_a_changed_file_does_not_count_and_is_done_again(tmp_path: Path, name: str) -> None:
    job = begun(tmp_path, 2, "lr.sgd=0.01")
    job(ignore)
    expected = outcome(tmp_path)
    path = job.record.folder / name
    kept = path.read_bytes()
    if name == "run.json":
        changed = kept.replace(b'"lr": 0.01', b'"lr": 0.02')
    elif name == "result.json":
        changed = kept.replace(b'"steps": 6', b'"steps": 9')
    else:
        changed = kept[:-30]
    assert changed != kept
    path.write_bytes(changed)
    run = read_run(job.record.folder)
    assert (run.finished, run.rows, run.numbers) == (False, [], {})
    assert run.damage.startswith(f"{name} is not what the run wrote (")
    said, _ = notes(job)
    assert said == [f"{run.damage} It begins again."]
    assert outcome(tmp_path) == expected
    assert read_run(job.record.folder).lr == 0.01


def test_a_run_that_goes_on_under_other_code_says_so(
    tmp_path: Path, always_save: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begun(tmp_path, 1)
    here = runner.environment()
    other = {**here, "versions": {**here["versions"], "torch": "9.9"}, "git": {"commit": "f00", "dirty": False}}
    monkeypatch.setattr(runner, "environment", lambda: other)
    (words,), kept = notes(job)
    assert kept == [words]
    assert words.startswith("It goes on after leg 1 with ")
    assert f"versions.torch 9.9, not {torch.__version__}" in words
    assert "git.commit f00, not " in words


def test_a_run_that_begins_again_under_other_code_is_of_that_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before its first checkpoint: nothing of it is older, so there is nothing to note."""
    monkeypatch.setattr(RunRecord, "save", lambda record, state: None)
    job = begun(tmp_path, 1)
    other = {**runner.environment(), "git": {"commit": "f00", "dirty": False}}
    monkeypatch.setattr(runner, "environment", lambda: other)
    assert notes(job) == ([], [])
    assert read_run(job.record.folder).environment["git"] == {"commit": "f00", "dirty": False}


def test_a_run_is_not_continued_on_other_data(tmp_path: Path, always_save: None) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (120, 28, 28), dtype=np.uint8)
    for name, images in (("here", pixels), ("same", pixels), ("other", 255 - pixels)):
        for split in ("train", "test"):
            write_images(tmp_path / name / "mnist", split, images, parts=1 + (name == "same"))
    job = begun(tmp_path / "out", 1, "data=mnist", data_dir=tmp_path / "here")
    before = {path: path.read_bytes() for path in job.record.folder.iterdir()}
    (other,) = run_jobs(replace(job.request, data_dir=tmp_path / "other"), {})
    with pytest.raises(
        ValueError, match=r"^run: `data_sha256.mnist` must be '\w+' as in what sgd, seed 0 was begun with"
    ):
        other(ignore)
    assert {path: path.read_bytes() for path in job.record.folder.iterdir()} == before
    (same,) = run_jobs(replace(job.request, data_dir=tmp_path / "same"), {})
    assert notes(same) == ([], [])


# Death at every moment ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mortal(moments: int) -> Iterator[None]:
    """Before and after every write, rename and removal of a record, and in the midst of every row, count; then die."""
    left = moments

    def moment() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            moment()
            value = real(*arguments, **options)
            moment()
            return value

        return call

    def append(path: Path, lines: list[Mapping[str, Any]]) -> bytes:
        moment()
        added = real_append(path, lines)
        written = path.read_bytes()
        path.write_bytes(written[:-5])
        moment()
        path.write_bytes(written)
        moment()
        return added

    real_append = records._append
    records._append = append
    for module, name in (
        (records.os, "replace"),
        (records.os, "fsync"),
        (records.Path, "unlink"),
        (records.Path, "mkdir"),
    ):
        setattr(module, name, around(getattr(module, name)))
    yield


def forked(moments: int, job: RunJob) -> bool:
    """Do the job in a process that dies after so many moments; False if it lived."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of any fork; the child does nothing that could hang
        child = os.fork()
    if child == 0:
        try:
            with mortal(moments):
                job(ignore)
            os._exit(0)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"the child ended with status {status}"
    return status != 0


@linux
def test_death_at_any_moment_changes_nothing(tmp_path: Path, always_save: None) -> None:
    changes = ("optimizers=['adam']", "epochs=2", "train_examples=48")
    warm_up()
    do_all(request(tmp_path / "undisturbed", *changes))
    expected = outcome(tmp_path / "undisturbed")
    assert len(expected) == 2
    moment = 0
    while True:
        moment += 1
        out = tmp_path / str(moment)
        (job,) = run_jobs(request(out, *changes), {})
        died = forked(moment, job)
        job(ignore)
        assert outcome(out) == expected, f"died at moment {moment}"
        assert {path.name for path in job.record.folder.iterdir()} == {
            "run.json", "metrics.jsonl", "timing.jsonl", "result.json", "arrays.npz", ".lock",
        }  # fmt: skip
        if not died:
            break
    assert moment > 40


@linux
def test_a_run_that_dies_again_and_again_gets_there(tmp_path: Path, always_save: None) -> None:
    changes = (
        "optimizers=['block-adam']",
        "epochs=4",
        "train_examples=48",
        "schedule.kind=sqrt",
        "batch.growth=linear",
    )
    warm_up()
    do_all(request(tmp_path / "undisturbed", *changes))
    (job,) = run_jobs(request(tmp_path / "out", *changes), {})
    deaths = 0
    while forked(23, job):
        deaths += 1
        assert deaths < 50
    assert deaths >= 3
    assert outcome(tmp_path / "out") == outcome(tmp_path / "undisturbed")


# The command, killed --------------------------------------------------------------------------------------------------


def sizes(out: Path) -> dict[Path, int]:
    found = {}
    for path in out.glob("runs/**/*"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat().st_size
    return found


def kill_when_files_change(process: subprocess.Popen[bytes], out: Path, changes: int) -> None:
    """Kill once the records have changed so often: at rows without their checkpoint, or half of it."""
    for _ in range(changes):
        before = sizes(out)
        wait_until(lambda before=before: sizes(out) != before or process.poll() is not None)  # type: ignore[misc]
    process.kill()
    process.wait()


def survives(tmp_path: Path, jobs: int, kills: int, chance: random.Random, epochs: int = 25) -> None:
    """Kill the command so often, each time when its files have changed for a while; then compare the bytes."""
    out, changes = tmp_path / "out", (f"epochs={epochs}",)
    command = run_command(out, *changes, options=["--jobs", str(jobs)])
    for _ in range(kills):
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": ENVIRONMENT}
        with subprocess.Popen(command, **quiet) as process:
            kill_when_files_change(process, out, chance.randrange(3, 30))
        assert process.returncode == -signal.SIGKILL
        wait_until(lambda: not _alive(out))
    done = finished(command)
    assert done.returncode == 0, done.stdout + done.stderr
    do_all(request(tmp_path / "undisturbed", *changes))
    assert outcome(out) == outcome(tmp_path / "undisturbed")
    assert len(outcome(out)) == 4


@linux
def test_the_command_goes_on_after_kill_9(tmp_path: Path) -> None:
    survives(tmp_path, 1, 1, random.Random(1))


def test_parallel_runs_equal_those_one_by_one(tmp_path: Path) -> None:
    survives(tmp_path, 2, 0, random.Random(), epochs=3)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_command_survives_many_kills(tmp_path: Path, seed: int) -> None:
    survives(tmp_path, 1 + seed % 2, 4, random.Random(seed))


def _alive(out: Path) -> list[Path]:
    """Runs that somebody still holds."""
    held = []
    for lock in out.glob("runs/*/*/*/.lock"):
        with RunRecord(out, RunKey(lock.parents[2].name, "", 0)).locked() as ours:
            if not ours:
                held.append(lock)
    return held
