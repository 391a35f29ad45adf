"""Tuning: the best of the grid on validation data, the same from one process or several, whatever dies."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from blockadapt_experiments.core.settings import TuneSettings
from blockadapt_experiments.data.images import CLASSES
from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.recorded_runs import read_tuned
from blockadapt_experiments.running import runner
from blockadapt_experiments.running.grids import Span, grid, lr_span, outward, parse_spans
from blockadapt_experiments.running.jobs import Done, Failed, Here
from blockadapt_experiments.running.runner import Choice, Request, RunJob, run_jobs
from blockadapt_experiments.running.tuning import Tuned, _spans, budget, choices_of, tune
from support.images import write_images
from support.laboratory import ENVIRONMENT, finished, request, run_command, wait_until

SMALL = ("tune.trials=3", "tune.low=1e-3", "tune.high=1e-1", "epochs=6", "train_examples=60", "tune.extensions=0")


def tuned(asked: Request, over: Sequence[Span] = ()) -> tuple[Tuned, list[RunJob], list[Done | Failed]]:
    """Tune in this process; also all trials, and how each ended."""
    trials: list[RunJob] = []
    ends: list[Done | Failed] = []

    def do(jobs: Sequence[RunJob]) -> list[Done | Failed]:
        trials.extend(jobs)
        ends.extend(Here().work(jobs, lambda index, event: None))
        return ends[-len(jobs) :]

    return tune(asked, over, do, lambda jobs: pytest.fail("nobody else is at work")), trials, ends


def by_hand(asked: Request, arm: str, choice: Choice) -> float:
    """Mean validation accuracy over the last fifth of the epochs and over the seeds."""
    values = []
    for seed in asked.settings.tune.seeds:
        task = asked.task(RunKey(arm, "", seed), choice.lr, True, choice.values)
        rows = [row for _ in range(task.legs) for row in runner.advance(task)[0]]  # small numbers count as zero there
        late = rows[-math.ceil(len(rows) / 5) :]
        values.append(sum(row["validation_accuracy"] for row in late) / len(late))
    return sum(values) / len(values)


def rates(tune: TuneSettings) -> list[float | None]:
    span = lr_span(tune)
    return [span.value(number) for number in range(span.points)]


# The grid -------------------------------------------------------------------------------------------------------------


def test_the_grid_is_even_on_a_log_scale() -> None:
    found = np.array(rates(TuneSettings(trials=13)))
    assert len(found) == 13
    assert (found[0], found[-1]) == (1e-4, 1e2)
    np.testing.assert_allclose(np.diff(np.log10(found)), 0.5, atol=2e-3)
    assert rates(TuneSettings(trials=2, low=0.5, high=2.0)) == [0.5, 2.0]
    narrow = rates(TuneSettings(trials=5, low=0.10004, high=0.10006))
    assert all(lr and 0.10004 <= lr <= 0.10006 for lr in narrow)


def test_a_decay_is_spaced_by_its_distance_from_one() -> None:
    span = Span("beta2", 0.9, 0.9999, 4)
    assert [span.value(number) for number in range(4)] == [0.9, 0.99, 0.999, 0.9999]
    assert span.value(-1) == 0.0
    assert span.value(-2) is None


def test_points_beyond_the_grid_keep_its_spacing_and_only_at_an_edge() -> None:
    spans = (Span("lr", 1e-3, 1e-1, 3), Span("weight_decay", 1e-4, 1e-2, 3))
    points = grid(spans)
    assert len(points) == 9
    assert list(outward(spans, points, (1, 1))) == []
    assert [(span.name, edge, point) for span, edge, point in outward(spans, points, (2, 0))] == [
        ("lr", "upper", (3, 0)),
        ("weight_decay", "lower", (2, -1)),
    ]
    assert spans[0].value(3) == 1.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("weight_deca=1:2", "run: `tune_over` has no setting 'weight_deca' to tune; the nearest is 'weight_decay'."),
        ("lr=1:2", "run: `tune_over` has no setting 'lr' to tune; the nearest is 'final_lr'."),
        *(
            (
                f"weight_decay{span}",
                "run: `tune_over` must be weight_decay=LOW:HIGH[:POINTS] with 0 < LOW < HIGH and POINTS >= 2, "
                f"got 'weight_decay{span}'.",
            )
            for span in ("", "=1", "=0:1", "=2:1", "=1:2:1", "=1:2:x", "=1:2:3:4", "=1:nan", "=1:inf")
        ),
        (
            "beta2=0.9:1",
            "run: `tune_over` must be beta2=LOW:HIGH[:POINTS] with 0 <= LOW < HIGH < 1 and POINTS >= 2, "
            "got 'beta2=0.9:1'.",
        ),
    ],
)
def test_an_axis_that_cannot_be_gets_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^run: ") as refusal:
        parse_spans([text])
    assert str(refusal.value) == sentence


def test_axes_are_read_as_they_are_typed() -> None:
    read = parse_spans(["weight_decay=1e-4:1e-2", "optimizer.beta2=0.9:0.999:5"])
    assert read == (Span("weight_decay", 1e-4, 1e-2, 3), Span("beta2", 0.9, 0.999, 5))
    with pytest.raises(ValueError, match="given once for each setting"):
        parse_spans(["eps=1e-8:1e-4", "optimizer.eps=1e-8:1e-2"])


# One process ----------------------------------------------------------------------------------------------------------


def test_the_best_learning_rate_by_hand(tmp_path: Path) -> None:
    asked = request(tmp_path, *SMALL, "tune.seeds=[7, 8]")
    found, trials, _ = tuned(asked)
    assert len(trials) == 12
    for arm in ("sgd", "block-adam"):
        values = {lr: by_hand(asked, arm, Choice(lr)) for lr in rates(asked.settings.tune) if lr}
        best = found[arm][""]
        assert best["tried"] == [[lr, value] for lr, value in values.items()]
        assert best["value"] == max(values.values())
        assert best["lr"] == min(lr for lr in values if values[lr] == best["value"])
        assert (best["trials"], best["objective"]) == (3, "validation_accuracy")


def test_what_else_is_tuned_reaches_trials_and_runs(tmp_path: Path) -> None:
    asked = request(tmp_path, *SMALL, "optimizers=['sgd']", "tune.trials=2", "epochs=2")
    spans = parse_spans(["weight_decay=1e-4:10:2"])
    found, trials, _ = tuned(asked, spans)
    best = found["sgd"][""]
    points = [(lr, decay) for lr in (1e-3, 1e-1) for decay in (1e-4, 10.0)]
    assert [(point["lr"], point["weight_decay"]) for point in best["points"]] == points
    values = {(lr, decay): by_hand(asked, "sgd", Choice(lr, (("weight_decay", decay),))) for lr, decay in points}
    assert [point["value"] for point in best["points"]] == list(values.values())
    assert best["tried"] == [[lr, max(values[lr, 1e-4], values[lr, 10.0])] for lr in (1e-3, 1e-1)]
    written = [read_json(job.record.folder / "run.json") for job in trials]
    assert [about["settings"]["arms"]["sgd"]["weight_decay"] for about in written] == [decay for _, decay in points]
    (choice,) = choices_of(found).values()
    assert choice == Choice(best["lr"], (("weight_decay", best["values"]["weight_decay"]),))
    (job,) = run_jobs(asked, choices_of(found))
    assert job.choice == choice


def test_an_optimizer_that_lacks_a_setting_tries_as_many_points_all_of_the_learning_rate(tmp_path: Path) -> None:
    asked = request(tmp_path, *SMALL, "optimizers=['sgd', 'adam']", "tune.trials=2", "epochs=1")
    found, _, _ = tuned(asked, parse_spans(["eps=1e-8:1e-2:2"]))
    assert {arm: best[""]["trials"] for arm, best in found.items()} == {"sgd": 4, "adam": 4}
    assert [lr for lr, _ in found["adam"][""]["tried"]] == [1e-3, 1e-1]
    assert [lr for lr, _ in found["sgd"][""]["tried"]] == [1e-3, 4.64e-3, 2.15e-2, 1e-1]
    assert found["adam"][""]["grid"] == {"lr": [1e-3, 1e-1, 2], "eps": [1e-8, 1e-2, 2]}
    assert found["sgd"][""]["grid"] == {"lr": [1e-3, 1e-1, 4]}
    assert "values" not in found["sgd"][""]
    model = torch.nn.Linear(2, 2)
    made = asked.settings_of("adam", (("eps", 1e-2),)).make_optimizer("adam", model, 0.1, 1)
    assert made.param_groups[0]["eps"] == 1e-2


@pytest.mark.parametrize(
    ("over", "grids"),
    [
        ([], {"sgd": {"lr": 4}, "adam": {"lr": 4}, "adamw": {"lr": 4}}),
        (
            ["weight_decay=1e-4:1e-2", "decoupled_weight_decay=1e-3:1e-1"],  # nobody has both
            {
                "sgd": {"lr": 4, "weight_decay": 3},
                "adam": {"lr": 4, "weight_decay": 3},
                "adamw": {"lr": 4, "decoupled_weight_decay": 3},
            },
        ),
        (
            ["beta2=0.9:0.999:3", "weight_decay=1e-4:1e-2:2"],
            {
                "sgd": {"lr": 12, "weight_decay": 2},
                "adam": {"lr": 4, "beta2": 3, "weight_decay": 2},
                "adamw": {"lr": 8, "beta2": 3},
            },
        ),
    ],
)
def test_every_optimizer_has_as_many_trials(tmp_path: Path, over: list[str], grids: dict[str, dict[str, int]]) -> None:
    asked = request(tmp_path, "optimizers=['sgd', 'adam', 'adamw']", "tune.trials=4")
    spans = parse_spans(over)
    found = {arm: _spans(asked, arm, spans) for arm, _ in asked.arms()}
    assert {arm: {span.name: span.points for span in each} for arm, each in found.items()} == grids
    assert {len(grid(each)) for each in found.values()} == {budget(asked.settings.tune, spans)}


def test_what_was_tried_is_not_tried_again(tmp_path: Path) -> None:
    first, trials, _ = tuned(request(tmp_path, *SMALL))
    written = {job.record.metrics: job.record.metrics.stat().st_mtime_ns for job in trials}
    again, _, _ = tuned(request(tmp_path, *SMALL, "optimizers=['block-adam']", "seeds=[5]", "lr.sgd=1.0"))
    assert again["block-adam"] == first["block-adam"]
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_trials_keep_no_weights(tmp_path: Path) -> None:
    _, trials, _ = tuned(request(tmp_path, *SMALL, "optimizers=['sgd']", "epochs=1"))
    names = {path.name for job in trials for path in job.record.folder.iterdir()}
    assert names == {"run.json", "metrics.jsonl", "timing.jsonl", "result.json", ".lock"}


LOW = ("optimizers=['sgd']", "tune.trials=2", "tune.low=1e-3", "tune.high=1e-2", "epochs=2", "train_examples=600")
"""Too low a grid: 0.1 is best."""


def test_the_grid_goes_on_where_an_edge_is_best(tmp_path: Path) -> None:
    best = tuned(request(tmp_path, *SMALL, *LOW, "tune.extensions=9"))[0]["sgd"][""]
    assert [lr for lr, _ in best["tried"]] == [1e-3, 1e-2, 0.1, 1.0]
    assert (best["trials"], best["extensions"], best["lr"]) == (4, 2, 0.1)
    assert best["value"] == max(value for _, value in best["tried"])
    assert "warning" not in best


def test_the_grid_ends_at_its_limit_and_says_so(tmp_path: Path) -> None:
    best = tuned(request(tmp_path, *SMALL, *LOW, "tune.extensions=1"))[0]["sgd"][""]
    assert (best["trials"], best["extensions"], best["lr"]) == (3, 1, 0.1)
    assert best["warning"] == (
        "The best learning rate is at the upper edge of the range, after 1 point beyond the grid; "
        "move `tune.high` and tune again."
    )


def test_a_trial_that_diverges_is_the_worst_and_an_edge_is_told(tmp_path: Path) -> None:
    changes = ("optimizers=['sgd']", "tune.trials=2", "tune.low=1e-2", "tune.high=1e30", "epochs=2")
    best = tuned(request(tmp_path, *SMALL, *changes))[0]["sgd"][""]
    assert (best["lr"], best["tried"][1]) == (1e-2, [1e30, None])
    assert best["warning"] == (
        "The best learning rate is at the lower edge of the range; move `tune.low` and tune again."
    )
    hopeless = tuned(request(tmp_path / "hopeless", *SMALL, *changes, "tune.low=1e29"))[0]["sgd"][""]
    assert hopeless["warning"] == "Every learning rate diverged."
    assert hopeless["value"] is None


def test_no_warning_inside_the_range(tmp_path: Path) -> None:
    changes = ("optimizers=['sgd']", "tune.low=1e-6", "tune.high=1e4", "epochs=3")  # 0.1 in the middle
    found, _, _ = tuned(request(tmp_path, *SMALL, *changes))
    assert found["sgd"][""]["lr"] == 0.1
    assert "warning" not in found["sgd"][""]


def test_a_trial_that_fails_leaves_the_other_arms_alone(tmp_path: Path) -> None:
    asked = request(tmp_path, *SMALL, "optimizers=['full-adagrad', 'sgd']")
    found, trials, ends = tuned(asked)
    assert found.keys() == {"sgd"}
    failed = [(job, end) for job, end in zip(trials, ends, strict=True) if isinstance(end, Failed)]
    assert len(failed) == 3
    for job, end in failed:
        assert end.kind == "ValueError"
        assert "4096" in job.error.read_text().replace(",", "")


def test_trials_made_with_other_code_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path, *SMALL, "optimizers=['sgd']", "epochs=1")
    _, trials, _ = tuned(asked)
    (trials[0].record.folder / "result.json").unlink()
    (trials[0].record.folder / "run.json").unlink()
    here = runner.environment()
    monkeypatch.setattr(runner, "environment", lambda: {**here, "git": {"commit": "f00", "dirty": False}})
    warning = tuned(asked)[0]["sgd"][""]["warning"]
    assert "Its trials were made with different code or threads: " in warning
    assert "commit f00, torch " in warning


def test_test_images_have_no_part_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 28, 28), dtype=np.uint8)
    write_images(tmp_path / "mnist", "train", images)
    monkeypatch.setitem(CLASSES, "mnist", 100)
    write_images(tmp_path / "mnist", "test", images[:20], first_label=50)  # a loss on such labels raises
    changes = ("data=mnist", "optimizers=['sgd']", "epochs=1", "tune.trials=2", "test_examples=20")
    asked = request(tmp_path / "out", *SMALL, *changes, data_dir=tmp_path)
    found, _, _ = tuned(asked)
    assert found["sgd"][""]["trials"] == 2
    with pytest.raises(IndexError):
        asked.task(RunKey("sgd", "", 0), 0.1).advance()


# Several processes ----------------------------------------------------------------------------------------------------


def test_two_commands_on_one_folder_share_its_trials_and_runs_and_both_end_well(tmp_path: Path) -> None:
    changes = (*SMALL, "optimizers=['sgd']", "tune.trials=6", "seeds=[0, 1, 2]")
    command = run_command(tmp_path / "out", *changes, options=["--tune"])
    processes = [
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
        for _ in range(2)
    ]
    written = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], written
    assert all("3 of 3 runs are finished" in words for words, _ in written)
    alone, trials, _ = tuned(request(tmp_path / "alone", *changes))
    assert read_tuned(tmp_path / "out", "test") == alone
    for job in trials:
        lines = (tmp_path / "out" / job.record.folder.relative_to(tmp_path / "alone") / "metrics.jsonl").read_bytes()
        assert lines == job.record.metrics.read_bytes()


def test_a_trial_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    changes = (*SMALL, "optimizers=['adam']", "tune.trials=2", "epochs=60")
    out = tmp_path / "out"
    command = run_command(out, *changes, options=["--tune"])
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        folder = out / "tuning" / "adam" / "-" / "lr=0.001" / "seed-1000"
        wait_until((folder / "checkpoint.pt").exists, process)
        process.kill()
    assert not (folder / "result.json").exists()
    begun = (folder / "timing.jsonl").read_bytes().splitlines()[0]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    assert (folder / "timing.jsonl").read_bytes().splitlines()[0] == begun  # it was not done again
    found = read_tuned(out, "test")
    assert found == tuned(request(tmp_path / "alone", *changes))[0]
    best = found["adam"][""]
    assert f"\nadam: lr {best['lr']:g}. {best.get('warning', '')}".rstrip() in done.stdout
    assert read_json(out / "runs" / "adam" / "-" / "seed-0" / "run.json")["lr"] == best["lr"]
