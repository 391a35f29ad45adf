"""Draws landscapes and paths as PNG files, without pyplot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke

from blockadapt_experiments.drawing.colours import styles_of
from blockadapt_experiments.files.png import write_png
from blockadapt_experiments.results.summary import Summary

LEVELS = 14
"""Contours of a landscape."""

COLOURS = "cividis"
"""Looks the same to the colour-blind, and grows lighter evenly."""

SHOWN = 3
"""Problems in a figure."""

STARTS = 6
"""Paths in a panel."""

GRID_REACH = 2.0
"""How much further the grid of a landscape reaches than the starts of paths."""

OUTLINED = [Stroke(linewidth=2.6, foreground="#FFFFFF"), Normal()]
"""A white edge, with which every colour stands out from the map."""


def contours(panel: Any, first: np.ndarray, second: np.ndarray, loss: np.ndarray, levels: np.ndarray) -> Any:
    """Draw loss[i, j] at (first[i], second[j]) as a map with contours."""
    painted = panel.contourf(first, second, loss.T, levels=levels, cmap=COLOURS, extend="both")
    panel.contour(first, second, loss.T, levels=levels, colors="#FFFFFF", linewidths=0.4, alpha=0.6)
    return painted


def level_set(losses: Sequence[np.ndarray]) -> np.ndarray:
    """Choose levels that all these landscapes share, denser below: those of a round bowl are evenly spaced circles.

    The highest tenth of the loss, at the corners, would flatten all else.
    """
    values = np.concatenate([loss.ravel() for loss in losses])
    low, high = values.min(), np.quantile(values, 0.9)
    levels: np.ndarray = low + (high - low if high > low else 1.0) * np.linspace(0, 1, LEVELS) ** 2
    return levels


def draw_landscapes(summary: Summary, directory: Path) -> Sequence[Path]:
    """Draw landscapes of the first problems: one a row, a column for each kind of pair, one scale within a row."""
    found = {seed: [summary.arrays(arm, "", seed) for arm in summary.arms] for seed in summary.seeds}
    shown = [(seed, arrays) for seed, arrays in found.items() if all(arrays)][:SHOWN]
    if not shown:
        return []
    reach = summary.settings["reach"]
    figure = Figure(figsize=(4.2 * len(summary.arms) + 0.6, 3.3 * len(shown) + 0.6), dpi=150, layout="constrained")
    figure.suptitle("Loss over two weights, all others at their true values (×)", fontsize=11)
    panels = figure.subplots(len(shown), len(summary.arms), squeeze=False)
    for row, (seed, arrays) in zip(panels, shown, strict=True):
        levels = level_set([each["loss"] for each in arrays])
        for panel, arm, each in zip(row, summary.arms, arrays, strict=True):
            offsets = np.linspace(-reach, reach, len(each["loss"]))
            painted = contours(panel, each["centre"][0] + offsets, each["centre"][1] + offsets, each["loss"], levels)
            panel.plot(*each["centre"], marker="x", color="#FFFFFF")
            panel.set_title(f"{summary.label(arm)}, problem {seed}", fontsize=10)
            panel.set_xlabel(str(each["edges"][0]))
            panel.set_ylabel(str(each["edges"][1]))
        figure.colorbar(painted, ax=list(row), label="loss", format="%.3g")
    return [write_png(figure, directory / "toy-landscape.png")]


def draw_paths(summary: Summary, directory: Path) -> Sequence[Path]:
    """Draw the paths from all starts over the loss, where every arm has finished one."""
    runs = {variant: {arm: _paths(summary, arm, variant) for arm in summary.arms} for variant in summary.variants}
    shown = {variant: by_arm for variant, by_arm in runs.items() if all(by_arm.values())}
    return [write_png(path_figure(summary, shown), directory / "toy-trajectories.png")] if shown else []


def path_figure(summary: Summary, shown: Mapping[str, Mapping[str, Sequence[Mapping[str, np.ndarray]]]]) -> Figure:
    """Make a row for each landscape and a column for each arm, from the arrays of runs by variant and arm."""
    size = (4.2 * len(summary.arms) + 0.6, 3.5 * len(shown) + 0.6)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.suptitle("Paths from their starts (dots) to the true weights (×), over the loss", fontsize=11)
    panels = figure.subplots(len(shown), len(summary.arms), squeeze=False)
    for row, (variant, by_arm) in zip(panels, shown.items(), strict=True):
        for panel, (arm, paths) in zip(row, by_arm.items(), strict=True):
            loss, centre = paths[0]["loss"], paths[0]["centre"]
            offsets = GRID_REACH * summary.settings["reach"] * np.linspace(-1, 1, len(loss))
            painted = contours(panel, centre[0] + offsets, centre[1] + offsets, loss, level_set([loss]))
            colour = styles_of(summary.optimizers)[arm].line()["color"]
            for run in paths:
                panel.plot(*run["path"].T, linewidth=1, color=colour, path_effects=OUTLINED)
                panel.plot(*run["path"][0], marker="o", markersize=4, color=colour, path_effects=OUTLINED)
            panel.plot(*centre, marker="x", color="#FFFFFF")
            panel.set_xlim(centre[0] + offsets[0], centre[0] + offsets[-1])
            panel.set_ylim(centre[1] + offsets[0], centre[1] + offsets[-1])
            panel.set_title(f"{summary.label(arm)}, {variant}", fontsize=10)
            first, second = map(str, paths[0].get("edges", ("first weight", "second weight")))
            panel.set_xlabel(first)
            panel.set_ylabel(second)
        figure.colorbar(painted, ax=list(row), label="loss", format="%.3g")
    return figure


def _paths(summary: Summary, arm: str, variant: str) -> list[dict[str, np.ndarray]]:
    """Return the arrays of the first starts: more than a few paths hide each other."""
    found = (summary.arrays(arm, variant, seed) for seed in summary.seeds)
    return [arrays for arrays in found if arrays][:STARTS]
