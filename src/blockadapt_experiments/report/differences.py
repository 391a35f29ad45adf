"""Draw differences paired by seed as PNG files: a point and its 95% interval for each line of a comparison.

Points right of zero are higher than the reference, points left of it lower. A title says which of the two is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from blockadapt_experiments.drawing.bars import PLAIN
from blockadapt_experiments.drawing.colours import bar_colours
from blockadapt_experiments.files.png import write_png
from blockadapt_experiments.report.pairs import Comparison, Moment, Pairing
from blockadapt_experiments.results.formats import NONE
from blockadapt_experiments.results.summary import Summary

FEWEST = 2
"""Of one line a picture says no more than the table."""

MOST_TICKS = 6
"""On an axis: with a sign and three digits each, more run into each other."""


def write_differences(summary: Summary, compared: Sequence[Comparison], directory: Path) -> list[Path]:
    """Draw each comparison that has enough lines with an interval, and return the files."""
    colours = bar_colours(summary.optimizers, summary.label)
    written = []
    for number, comparison in enumerate(compared):
        if sum(any(math.isfinite(estimate.half) for estimate in line.estimates) for line in comparison.lines) >= FEWEST:
            name = f"{summary.experiment.name}-differences{f'-{number + 1}' if number else ''}.png"
            written.append(write_png(differences_figure(summary, comparison, colours), directory / name))
    return written


def differences_figure(summary: Summary, comparison: Comparison, colours: Mapping[str, str]) -> Figure:
    """Make the figure of a comparison: a panel for each moment, a row for each line."""
    sweep = summary.variants != [""]
    names = [f"{line.label}, {line.variant}" if sweep else line.label for line in comparison.lines]
    size = (2.5 + 4.0 * len(comparison.moments), 1.3 + 0.3 * len(names))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    of = f"{summary.scale} scale, minus {comparison.reference}, paired by seed, 95% intervals"
    figure.suptitle(f"{summary.experiment.title}\n{of}", fontsize=11)
    panels = figure.subplots(1, len(comparison.moments), sharey=True, squeeze=False)[0]
    for place, (panel, moment) in enumerate(zip(panels, comparison.moments, strict=True)):
        _draw_lines(panel, comparison.lines, place, colours)
        panel.set_title(_heading(moment), fontsize=9, loc="left")
        panel.set_yticks(range(len(names)), names, fontsize=9)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.locator_params(axis="x", nbins=MOST_TICKS)
        panel.grid(axis="x", color="#E0E0E0", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure


def _draw_lines(panel: Any, lines: Sequence[Pairing], place: int, colours: Mapping[str, str]) -> None:
    """Draw one estimate of each line. A hollow point has an interval that holds zero, or none."""
    panel.axvline(0.0, color=PLAIN, linewidth=1.0)
    for row, line in enumerate(lines):
        estimate, clear = line.marked[place]
        if not math.isfinite(estimate.mean):
            panel.annotate(NONE, (0.0, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
            continue
        colour = colours.get(line.label, PLAIN)
        look = {"color": colour, "markerfacecolor": colour if clear else "white", "capsize": 2.5, "elinewidth": 1.4}
        half = estimate.half if math.isfinite(estimate.half) else None
        panel.errorbar(estimate.mean, row, xerr=half, fmt="o", markersize=5, **look)


def _heading(moment: Moment) -> str:
    better = {"low": " (left is better)", "high": " (right is better)"}.get(moment.metric.better or "", "")
    return moment.heading + better
