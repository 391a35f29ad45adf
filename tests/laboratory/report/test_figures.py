"""Curves as pictures: one look for one optimizer, steps beside seconds, learning rates against the objective."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")

from blockadapt_experiments.commands.demo_plots import STYLE_BY_LABEL
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.drawing.colours import COLOURS, styles_of
from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.differences import differences_figure, write_differences
from blockadapt_experiments.report.figures import curve_figure, y_range
from blockadapt_experiments.report.pairs import compare
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.report.sensitivity import sensitivity_figure
from blockadapt_experiments.results.summary import Band
from support.run_records import (
    experiment,
    rows_of,
    write_ends,
    write_experiment,
    write_run,
    write_tuned,
)

Made = tuple[Path, Experiment[Any]]


def looks(lines: Iterable[Any]) -> dict[str, tuple[str, list[float]]]:
    """Colour and dash by label of Matplotlib's lines, dashes in widths of the line."""
    found = {}
    for line in lines:
        dashes = line._dash_pattern[1] or []  # Matplotlib has no public word for it
        found[line.get_label()] = (line.get_color(), [part / line.get_linewidth() for part in dashes])
    return found


def test_an_optimizer_has_one_colour_and_dash_in_figures_page_and_demo(tmp_path: Path) -> None:
    arms = ["ggt", "block-adam", "b25", "adam", "block-adam-clip", "sgd"]  # no order of the table
    about = experiment()
    write_experiment(tmp_path, optimizers=arms, seeds=[0])
    for arm in arms:
        write_run(tmp_path, arm, "", 0, rows_of(loss=[2.0, 1.0], accuracy=[1.0, 2.0]))
    write_tuned(
        tmp_path,
        {arm: {"": {"lr": 0.1, "value": 1.0, "objective": "loss", "tried": [[0.1, 1.0], [1.0, None]]}} for arm in arms},
    )
    summary = read(tmp_path, about)
    expected = {
        summary.label(arm): (COLOURS[style.colour], pytest.approx(style.strokes()))
        for arm, style in styles_of(summary.optimizers).items()
    }
    curves = {(arm, ""): summary.curve(arm, "loss") for arm in arms}
    for axes in curve_figure(summary, summary.metrics[0], curves).axes:
        assert looks(axes.lines) == expected
    trials = [line for line in sensitivity_figure(summary).axes[0].lines if not line.get_label().startswith("_")]
    assert looks(trials) == expected
    page = write_report(tmp_path, about)[0].read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert {arm["label"]: (COLOURS[arm["colour"]], arm["dash"]) for arm in data["arms"]} == expected
    demo = {"SGD", "Adam", "Block-Adam", "Block-Adam + clip"}
    assert {label: look["color"] for label, look in STYLE_BY_LABEL.items() if label in demo} == {
        label: expected[label][0] for label in demo
    }


def test_curves_over_seconds_stand_beside_those_over_steps(made: Made) -> None:
    summary = read(*made)
    curves = {(arm, ""): summary.curve(arm, "loss") for arm in summary.arms}
    steps, seconds = curve_figure(summary, summary.metrics[0], curves).axes
    assert (steps.get_xlabel(), seconds.get_xlabel()) == ("epoch", "seconds")
    assert steps.lines[0].get_xdata()[-1] == 20
    assert seconds.lines[0].get_xdata()[-1] == pytest.approx(20 * 1.1)
    assert steps.get_ylim() == seconds.get_ylim()


def test_every_learning_rate_is_drawn_and_the_chosen_one_ringed(tmp_path: Path) -> None:
    write_experiment(tmp_path, optimizers=["adam"], seeds=[0])
    tried = [[0.1, None], [0.01, 0.5], [0.001, 0.9]]
    record = {"lr": 0.01, "value": 0.5, "objective": "loss", "tried": tried}
    write_tuned(tmp_path, {"adam": {"": record}})
    figure = sensitivity_figure(read(tmp_path, experiment()))
    (axes,) = figure.axes
    curve, ring, lost = axes.lines
    np.testing.assert_array_equal(curve.get_xydata(), [[0.001, 0.9], [0.01, 0.5], [0.1, np.nan]])
    np.testing.assert_array_equal(ring.get_xydata(), [[0.01, 0.5]])
    np.testing.assert_array_equal(lost.get_xydata(), [[0.1, 1.0]])  # at the edge where the loss is worst
    assert (axes.get_xscale(), axes.get_ylabel()) == ("log", "training loss")


def test_a_difference_is_a_point_and_its_interval_hollow_where_that_holds_zero(tmp_path: Path) -> None:
    ends = {"adam": (33.0, 36.0, 39.0), "sgd": (34.0, 36.9, 40.1), "muon": (30.0, 40.0, 35.0), "soap": (1.0, 2.0, 3.0)}
    summary = read(write_ends(tmp_path, "cifar10-cnn", ends, [("soap", 2)]))
    (comparison,) = compare(summary)
    figure = differences_figure(summary, comparison, {"SGD": "#000000"})
    panel = figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["SGD", "Muon", "SOAP"]
    assert panel.get_title(loc="left") == "test error (%), final (left is better)"
    points = {bars.lines[0].get_ydata()[0]: bars.lines[0] for bars in panel.containers}
    ranges = {bars.lines[0].get_ydata()[0]: bars.lines[2][0].get_segments()[0] for bars in panel.containers}
    assert [text.get_text() for text in panel.texts] == ["–"]  # SOAP's, of which a run diverged
    for row, line in enumerate(comparison.lines[:2]):
        end = line.estimates[0]
        assert points[row].get_xdata()[0] == pytest.approx(end.mean)
        assert ranges[row][:, 0] == pytest.approx([end.mean - end.half, end.mean + end.half])
    assert (points[0].get_markerfacecolor(), points[1].get_markerfacecolor()) == ("#000000", "white")


def test_numbers_below_differences_do_not_run_into_each_other(tmp_path: Path) -> None:
    ends = {"adam": (5.0, 5.01, 5.02), "sgd": (5.04, 5.01, 5.06), "muon": (4.87, 4.91, 4.92)}
    summary = read(write_ends(tmp_path, "cifar10-cnn", ends))
    figure = differences_figure(summary, compare(summary)[0], {})
    figure.draw_without_rendering()
    for panel in figure.axes:
        low, high = panel.get_xlim()
        shown = [
            label
            for tick, label in zip(panel.get_xticks(), panel.get_xticklabels(), strict=True)
            if low <= tick <= high
        ]
        boxes = [label.get_window_extent() for label in shown]
        assert len(boxes) > 2
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_a_single_difference_and_those_of_one_seed_are_left_to_the_table(tmp_path: Path) -> None:
    for name, ends in (
        ("pair", {"adam": (33.0, 36.0), "sgd": (34.0, 36.9)}),
        ("seed", {"adam": (33.0,), "sgd": (34.0,), "muon": (3.0,)}),
    ):
        summary = read(write_ends(tmp_path / name, "cifar10-cnn", ends))
        assert write_differences(summary, compare(summary), tmp_path) == []


def band(*values: float, half: float = 0.0) -> tuple[np.ndarray, Band]:
    mean = np.array(values)
    return np.arange(1.0, mean.size + 1), Band(mean, mean - half, mean + half, np.full(mean.size, 3))


def test_an_axis_shows_all_means_and_as_much_of_the_bands_as_does_not_flatten_them() -> None:
    assert y_range([], False) is None
    assert y_range([band(math.nan, math.nan)], False) is None
    assert y_range([band(-1.0, 0.0)], True) is None
    low, high = y_range([band(1.0, 2.0, half=0.2), band(3.0, 2.5, half=0.2)], False) or (0, 0)
    assert (low, high) == pytest.approx((0.8, 3.2))
    low, high = y_range([band(1.0, 3.0, half=100.0)], False) or (0, 0)
    assert (low, high) == pytest.approx((1 - 0.8, 3 + 0.8))
    low, high = y_range([band(100.0, *[1.0, 2.0] * 10)], False) or (0, 0)
    assert high < 3  # the start would flatten the rest
    low, high = y_range([band(1e-4, 1.0, half=1e-5)], True) or (0, 0)
    assert low < 1e-4
    assert 1 < high < 10
