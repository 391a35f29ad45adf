"""Records read back from disk and the statistics over seeds, against plain NumPy on the numbers that were written."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the `experiments` extra")

from blockadapt_experiments.core.config import load, plain
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import Metric
from blockadapt_experiments.results.summary import Curve
from support.run_records import experiment, rows_of, write_experiment, write_json, write_lines, write_run

# Student's t at 0.975, from a printed table: for 1, 2, 3, 4, 9 and 19 degrees of freedom.
T = {2: 12.7062, 3: 4.3027, 4: 3.1824, 5: 2.7764, 10: 2.2622, 20: 2.0930}

LOSSES = np.array([[0.9, 0.5, 0.30, 0.25, 0.31], [1.1, 0.4, 0.28, 0.20, 0.26], [1.0, 0.6, 0.32, 0.27, 0.22]])
ACCURACIES = np.array([[90, 95, 97.5, 97, 98.0], [91, 96, 96.9, 97.2, 97.1], [89, 94, 96.0, 96.5, 96.9]])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Three finished seeds of one arm, nothing of the other."""
    write_experiment(tmp_path)
    for seed, (loss, accuracy) in enumerate(zip(LOSSES, ACCURACIES, strict=True)):
        rows = rows_of(loss=loss.tolist(), accuracy=accuracy.tolist())
        write_run(tmp_path, "adam", "", seed, rows, leg=0.5 + seed, numbers={"state_bytes": 100.0 + seed})
    return tmp_path


@pytest.mark.parametrize("count", T)
def test_interval_is_students(count: int) -> None:
    values = np.random.default_rng(count).normal(3, 2, count)
    mean, half = interval(values)
    spread = math.sqrt(sum((value - sum(values) / count) ** 2 for value in values) / (count - 1))
    assert mean == pytest.approx(sum(values) / count, rel=1e-14)
    assert half == pytest.approx(T[count] * spread / math.sqrt(count), rel=2e-5)


def test_interval_covers_the_truth_in_95_of_100_cases() -> None:
    samples = np.random.default_rng(0).normal(7, 3, (4000, 4))
    hits = sum(abs(mean - 7) <= half for mean, half in map(interval, samples))
    assert abs(hits / 4000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_values_that_are_all_alike_have_no_width() -> None:
    assert interval([0.680712] * 3) == (0.680712, 0.0)


def test_one_seed_has_no_interval_and_a_diverged_one_no_mean() -> None:
    mean, half = interval([2.5])
    assert mean == 2.5
    assert math.isnan(half)
    for values in ([], [1.0, math.nan], [1.0, math.inf]):
        assert all(map(math.isnan, interval(values)))


def test_statistics_are_those_of_the_rows(out: Path) -> None:
    summary = read(out, experiment())
    np.testing.assert_array_equal(summary.final("adam", "loss"), LOSSES[:, -1])
    np.testing.assert_array_equal(summary.best("adam", "loss"), LOSSES.min(axis=1))
    np.testing.assert_array_equal(summary.best("adam", "accuracy"), ACCURACIES.max(axis=1))
    np.testing.assert_array_equal(summary.number("adam", "state_bytes"), [100, 101, 102])
    np.testing.assert_allclose(summary.seconds("adam"), [2.5, 7.5, 12.5])
    assert summary.lr("adam") == 1e-3
    assert summary.number_names() == ["state_bytes"]


def test_a_metric_without_a_better_way_has_no_best(out: Path) -> None:
    summary = read(out, experiment(metrics=(Metric("loss", "loss", better=None),)))
    assert np.isnan(summary.best("adam", "loss")).all()


@pytest.mark.parametrize(("points", "tail"), [(5, 1), (6, 2), (10, 2), (11, 3), (20, 4), (100, 20)])
def test_oscillation_is_the_deviation_of_the_last_fifth(tmp_path: Path, points: int, tail: int) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    values = np.random.default_rng(points).normal(size=points)
    write_run(tmp_path, "adam", "", 0, rows_of(loss=values.tolist()))
    (found,) = read(tmp_path, experiment()).oscillation("adam", "loss")
    last = values[points - tail :]
    expected = math.sqrt(((last - last.mean()) ** 2).sum() / (tail - 1)) if tail > 1 else math.nan
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_target_is_where_it_is_first_reached(out: Path) -> None:
    # Seed 0 reaches 97 in epoch 3, seed 1 in epoch 4, seed 2 never; their epochs take 0.5, 1.5 and 2.5 seconds.
    reached = read(out, experiment()).to_target("adam")
    assert reached[:2] == [(3.0, 1.5), (4.0, 6.0)]
    assert all(map(math.isnan, reached[2]))
    assert read(out, experiment(target=("loss", 0.25))).to_target("adam") == [(4.0, 2.0), (4.0, 6.0), (5.0, 12.5)]
    assert np.isnan(read(out, experiment(target=None)).to_target("adam")).all()


def test_curves_line_up_seeds_that_measured_at_different_points(tmp_path: Path) -> None:
    write_experiment(tmp_path, seeds=[5, 3])
    write_run(
        tmp_path, "adam", "", 5, [{"epoch": 1, "loss": 4.0}, {"epoch": 3, "loss": 2.0}, {"epoch": 4, "accuracy": 1}]
    )
    write_run(
        tmp_path, "adam", "", 3, [{"epoch": 2, "loss": 3.0}, {"epoch": 3, "loss": None}], leg=None, finished=False
    )
    curve = read(tmp_path, experiment()).curve("adam", "loss")
    assert curve.seeds == [5, 3]
    np.testing.assert_array_equal(curve.x, [1, 2, 3])
    np.testing.assert_array_equal(curve.values, [[4, np.nan, 2], [np.nan, 3, np.nan]])
    np.testing.assert_array_equal(curve.seconds, [[0.5, np.nan, 1.0], [np.nan] * 3])
    band = curve.band()
    np.testing.assert_array_equal(band.mean, [4, 3, 2])
    np.testing.assert_array_equal(band.n, [1, 1, 1])
    assert np.isnan(band.half).all()


def test_equal_values_have_no_spread() -> None:
    values = np.array([[0.1, 1e-9, np.nan], [0.1, 1e-9, 0.7], [0.1, 1e-9, 0.7], [np.inf, 1e-9, 0.7]])
    curve = Curve(np.arange(3.0), values, [1, 2, 3, 4], values)
    mean, half, n = curve.band()
    np.testing.assert_array_equal(mean, [0.1, 1e-9, 0.7])
    np.testing.assert_array_equal(half, [0, 0, 0])
    np.testing.assert_array_equal(n, [3, 4, 3])
    assert interval([0.1, 0.1, 0.1]) == (0.1, 0.0)


def test_the_band_is_the_interval_of_every_point(out: Path) -> None:
    curve = read(out, experiment()).curve("adam", "loss")
    band = curve.band()
    pairs = [interval(column) for column in LOSSES.T]
    np.testing.assert_array_equal(np.stack([band.mean, band.half]), np.transpose(pairs))
    np.testing.assert_array_equal(band.n, [3] * 5)


def test_an_arm_without_runs_is_empty_and_not_an_error(out: Path) -> None:
    summary = read(out, experiment())
    assert summary.arms == ["adam", "block-adam"]
    curve = summary.curve("block-adam", "loss")
    assert (curve.x.size, curve.values.shape, curve.seeds) == (0, (0, 0), [])
    assert curve.band().mean.size == 0
    for values in (
        summary.final("block-adam", "loss"),
        summary.best("block-adam", "loss"),
        summary.seconds("block-adam"),
    ):
        assert values.size == 0
    assert summary.to_target("block-adam") == []
    assert math.isnan(summary.lr("block-adam"))
    assert (summary.planned, summary.finished, summary.complete) == (6, 3, False)


def test_an_unfinished_run_is_in_curves_and_not_in_statistics(out: Path) -> None:
    write_run(out, "block-adam", "", 0, rows_of(loss=[3.0, 2.0]), finished=False)
    write_run(out, "block-adam", "", 1, rows_of(loss=[4.0, 1.0]))
    summary = read(out, experiment())
    np.testing.assert_array_equal(summary.curve("block-adam", "loss").values, [[3, 2], [4, 1]])
    np.testing.assert_array_equal(summary.final("block-adam", "loss"), [1])
    assert summary.finished == 4


def test_rows_end_before_a_line_that_is_half_written(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    rows = rows_of(loss=[1.25, 1e-7, math.nan], accuracy=[3, 4, 5])
    run = write_run(tmp_path, "adam", "", 0, rows, finished=False)
    whole = (run / "metrics.jsonl").read_bytes()
    for size in range(len(whole) + 1):
        (run / "metrics.jsonl").write_bytes(whole[:size])
        found = read(tmp_path, experiment()).runs[0].rows
        assert len(found) == whole[:size].count(b"\n")
        assert repr(list(found)) == repr(rows[: len(found)])


def test_a_run_that_left_nothing_but_its_description_is_read(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    run = write_run(tmp_path, "adam", "", 0, [], leg=None, finished=False)
    (run / "metrics.jsonl").unlink()
    (tmp_path / "runs" / "adam" / "-" / "seed-1").mkdir()  # killed before it wrote anything
    summary = read(tmp_path, experiment())
    assert [run.key.seed for run in summary.runs] == [0]
    assert summary.metrics == []


@pytest.mark.parametrize(
    ("timing", "expected"),
    [
        ([], [math.nan] * 4),
        ([(1, 2.0, 4)], [0.5, 1.0, 1.5, 2.0]),
        ([(1, 2.0, 1), (2, 3.0, 3)], [2.0, 3.5, 5.0, math.nan]),
        ([(1, 2.0, 1), (2, 9.0, 1), (3, 1.0, 3), (4, 1.0, 4)], [2.0, 11.5, 12.0, 13.0]),  # a leg without a row
        ([(1, 2.0, 2), (2, 9.0, 4), (2, 4.0, 4)], [1.0, 2.0, 4.0, 6.0]),  # a leg that was done again
        ([(1, 2.0, 2), (2, 3.0, 8)], [1.0, 2.0, 2.5, 3.0]),  # rows that are not yet there
    ],
)
def test_seconds_run_up_to_every_row(
    tmp_path: Path, timing: list[tuple[int, float, int]], expected: list[float]
) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    run = write_run(tmp_path, "adam", "", 0, rows_of(loss=[4, 3, 2, 1]), leg=None)
    write_lines(run / "timing.jsonl", [{"leg": u, "seconds": s, "last_row": r} for u, s, r in timing])
    np.testing.assert_allclose(read(tmp_path, experiment()).runs[0].seconds, expected)


def test_a_seed_has_diverged_if_it_says_so_or_shows_it(tmp_path: Path) -> None:
    write_experiment(tmp_path, seeds=[0, 1, 2])
    write_run(tmp_path, "adam", "", 0, rows_of(loss=[1, 2]), numbers={"diverged": 0})
    write_run(tmp_path, "adam", "", 1, rows_of(loss=[1, 2]), numbers={"diverged": 1})
    write_run(tmp_path, "adam", "", 2, rows_of(loss=[1, math.nan]))
    write_run(tmp_path, "block-adam", "", 0, rows_of(loss=[1, math.inf]), finished=False)
    write_run(tmp_path, "block-adam", "", 1, rows_of(loss=[1, 2], other=[math.nan, 1]))  # not a metric
    summary = read(tmp_path, experiment())
    assert (summary.diverged("adam"), summary.diverged("block-adam")) == (2, 1)
    np.testing.assert_array_equal(summary.final("adam", "loss"), [2, 2, math.nan])
    np.testing.assert_array_equal(summary.best("adam", "loss"), [1, 1, 1])


def test_arrays_are_those_that_were_left(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    left = np.arange(6.0).reshape(2, 3)
    write_run(tmp_path, "adam", "", 0, [], arrays={"grid": left})
    write_run(tmp_path, "adam", "", 1, [], arrays={"grid": left}, finished=False)
    write_run(tmp_path, "adam", "", 2, [])
    summary = read(tmp_path, experiment())
    np.testing.assert_array_equal(summary.arrays("adam", "", 0)["grid"], left)
    assert [summary.arrays("adam", "", seed) for seed in (1, 2, 3)] == [{}, {}, {}]


def test_a_learning_rate_is_tuned_set_or_the_default(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam", "sgd", "ggt"], lr={"sgd": 0.5})
    write_json(tmp_path / "tuned.json", {"adam": {"": {"lr": 0.1}}})
    summary = read(tmp_path, experiment())
    assert [summary.lr_source(arm) for arm in summary.arms] == ["tuned", "set", "default"]


def test_a_contender_has_a_label_and_any_other_arm_its_name(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    summary = read(tmp_path, experiment())
    assert (summary.label("block-adam"), summary.label("same-layer")) == ("Block-Adam", "same-layer")


def test_what_was_asked_for_comes_first_and_numbers_in_names_count(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["ggt", "adam"], seeds=[7, 1])
    for variant in ("M=10", "M=1", "M=2.5"):
        write_run(tmp_path, "adam", variant, 12, [])
        write_run(tmp_path, "sgd", variant, 3, [])
    summary = read(tmp_path, experiment())
    assert summary.arms == ["ggt", "adam", "sgd"]
    assert summary.seeds == [7, 1, 3, 12]
    assert summary.variants == ["M=1", "M=2.5", "M=10"]


def test_variants_that_have_not_begun_are_planned(tmp_path: Path) -> None:
    toy = get_experiment("toy-adagrad")
    settings = plain(load(toy, "smoke", ["batches=[10, 2]", "seeds=[0]"]))
    write_experiment(tmp_path, toy.name, "smoke", settings)
    write_run(tmp_path, "adagrad", "M=2", 0, [{"step": 1, "loss": 0.5}])
    summary = read(tmp_path)
    assert summary.experiment is toy
    assert summary.variants == ["M=10", "M=2"]
    assert summary.planned == 2 * len(settings["optimizers"])


@pytest.mark.parametrize("name", ["mnist-lenet300", "toy-trajectories", "toy-landscape"])
def test_the_plan_of_shipped_settings_is_the_experiments_own(tmp_path: Path, name: str) -> None:
    registered = get_experiment(name)
    settings = load(registered, "laptop")
    write_experiment(tmp_path, name, "laptop", plain(settings))
    assert read(tmp_path).variants == list(registered.variants(settings))


def refusal(out: Path) -> str:
    with pytest.raises(ValueError, match=r"\Areport: ") as refused:
        read(out, experiment())
    return str(refused.value)


def test_what_is_no_directory_of_an_experiment_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        rule = "a directory that `blockadapt run` has written to"
        assert refusal(path) == f"report: `dir` must be {rule}, got {str(path)!r}."


@pytest.mark.parametrize("name", ["experiment.json", "run.json", "result.json", "metrics.jsonl"])
def test_a_broken_file_is_named(out: Path, name: str) -> None:
    path = out / name if name == "experiment.json" else out / "runs" / "adam" / "-" / "seed-0" / name
    path.write_text('{"a": 1}\n{oops\n')
    assert refusal(out).startswith(f"report: {str(path)!r} ")


def test_an_unknown_experiment_is_refused(tmp_path: Path) -> None:
    write_experiment(tmp_path, "mnist-lenet30")
    with pytest.raises(ValueError, match="the nearest is 'mnist-lenet300'"):
        read(tmp_path)


def test_an_error_is_told_until_the_run_is_finished(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    for finished in (False, True):
        run = write_run(tmp_path, "adam", "", int(finished), [], finished=finished)
        (run / "error.txt").write_text("Traceback\n  File\nOSError: no space left\n")
    told = {run.finished: run.error for run in read(tmp_path, experiment()).runs}
    assert told == {False: "OSError: no space left", True: ""}
