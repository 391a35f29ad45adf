"""Statistics over seeds, against plain NumPy on the numbers that were written."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the `experiments` extra")

from blockadapt_experiments.report.reading import read
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import Metric
from blockadapt_experiments.results.summary import Curve
from support.run_records import experiment, rows_of, write_experiment, write_run, write_tuned

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
    np.testing.assert_array_equal(band.middle, [4, 3, 2])
    np.testing.assert_array_equal(band.n, [1, 1, 1])
    assert np.isnan([band.low, band.high]).all()
    np.testing.assert_array_equal(curve.mean_seconds(), [0.5, np.nan, 1.0])


def test_equal_values_have_no_spread() -> None:
    values = np.array([[0.1, 1e-9, np.nan], [0.1, 1e-9, 0.7], [0.1, 1e-9, 0.7], [np.inf, 1e-9, 0.7]])
    curve = Curve(np.arange(3.0), values, [1, 2, 3, 4], values)
    band = curve.band()
    for line in (band.middle, band.low, band.high):
        np.testing.assert_array_equal(line, [0.1, 1e-9, 0.7])
    np.testing.assert_array_equal(band.n, [3, 4, 3])
    assert interval([0.1, 0.1, 0.1]) == (0.1, 0.0)


def test_the_band_is_the_interval_of_every_point(out: Path) -> None:
    curve = read(out, experiment()).curve("adam", "loss")
    band = curve.band()
    mean, half = np.transpose([interval(column) for column in LOSSES.T])
    np.testing.assert_array_equal(np.stack([band.middle, band.low, band.high]), [mean, mean - half, mean + half])
    np.testing.assert_array_equal(band.n, [3] * 5)


def test_on_a_log_axis_the_band_is_the_interval_of_the_logarithms() -> None:
    values = np.array([[1e-4, 1.0, 0.0], [1e-4, 2.0, 4.0], [1e-2, 4.0, 9.0]])
    curve = Curve(np.arange(3.0), values, [1, 2, 3], values)
    assert curve.band().low[0] < 0  # for which a log axis has no place
    band = curve.band(log=True)
    mean, half = interval(np.log([1.0, 2.0, 4.0]))
    assert [band.low[1], band.middle[1], band.high[1]] == pytest.approx(np.exp([mean - half, mean, mean + half]))
    assert band.middle[1] == pytest.approx(2)
    assert (band.low > 0).all()
    assert (band.middle[2], band.n[2]) == (pytest.approx(6), 2)  # of those that the axis can show


def test_equal_time_is_when_the_fastest_arm_had_finished(tmp_path: Path) -> None:
    write_experiment(tmp_path, seeds=[0, 1])
    for seed in (0, 1):
        write_run(tmp_path, "adam", "", seed, rows_of(loss=[4.0, 3.0, 2.0]), leg=1.0 + seed)  # until 3 and 6 s
        write_run(tmp_path, "block-adam", "", seed, rows_of(loss=[1.0, 0.5, 0.25]), leg=5.0 + 2 * seed)
    summary = read(tmp_path, experiment())
    assert summary.equal_time() == 6
    np.testing.assert_array_equal(summary.at_equal_time("adam", "loss"), [2, 2])
    np.testing.assert_array_equal(summary.at_equal_time("block-adam", "loss"), [1, np.nan])  # 7 s for its first epoch


def test_an_arm_that_diverged_does_not_say_when_the_others_are_cut_off(tmp_path: Path) -> None:
    """GGT ended first because it failed: once by its own word, once by what it measured."""
    write_experiment(tmp_path, optimizers=["adam", "block-adam", "ggt"], seeds=[0, 1])
    for seed in (0, 1):
        write_run(tmp_path, "adam", "", seed, rows_of(loss=[4.0, 3.0, 2.0]), leg=1.0)
        write_run(tmp_path, "block-adam", "", seed, rows_of(loss=[1.0, 0.5, 0.25]), leg=2.0)
    write_run(tmp_path, "ggt", "", 0, rows_of(loss=[7.0]), leg=0.5, numbers={"diverged": 1})
    write_run(tmp_path, "ggt", "", 1, rows_of(loss=[math.nan], accuracy=[10.0]), leg=0.5)
    summary = read(tmp_path, experiment())
    assert summary.equal_time() == 3
    np.testing.assert_array_equal(summary.at_equal_time("block-adam", "loss"), [1, 1])
    for values in (
        summary.final("ggt", "loss"),
        summary.final("ggt", "accuracy"),
        summary.at_equal_time("ggt", "loss"),
    ):
        np.testing.assert_array_equal(values, [math.nan, math.nan])


def test_a_run_that_diverged_has_no_oscillation(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0, 1])
    for seed in (0, 1):
        write_run(tmp_path, "adam", "", seed, rows_of(loss=[1.0, 2.0] * 5), numbers={"diverged": seed})
    found = read(tmp_path, experiment()).oscillation("adam", "loss")
    np.testing.assert_allclose(found, [math.sqrt(0.5), math.nan])


def test_one_arm_has_no_equal_time(out: Path) -> None:
    assert math.isnan(read(out, experiment()).equal_time())


def test_an_arm_without_runs_is_empty_and_not_an_error(out: Path) -> None:
    summary = read(out, experiment())
    assert summary.arms == ["adam", "block-adam"]
    curve = summary.curve("block-adam", "loss")
    assert (curve.x.size, curve.values.shape, curve.seeds) == (0, (0, 0), [])
    assert curve.band().middle.size == 0
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
    write_tuned(tmp_path, {"adam": {"": {"lr": 0.1}}})
    summary = read(tmp_path, experiment())
    assert [summary.lr_source(arm) for arm in summary.arms] == ["tuned", "set", "default"]


def test_a_contender_has_a_label_and_any_other_arm_its_name(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    summary = read(tmp_path, experiment())
    assert (summary.label("block-adam"), summary.label("same-layer")) == ("Block-Adam", "same-layer")
