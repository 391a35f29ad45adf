"""Draws panels of bars side by side, each with a scale of its own, as a PNG file, without pyplot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from blockadapt_experiments.files.png import write_png
from blockadapt_experiments.results.formats import estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN = "#8A8F98"
"""Grey, for bars that are of no optimizer."""

ROW = 3
"""The most panels side by side."""


@dataclass(frozen=True)
class Panel:
    """Holds bars, one a row.

    Attributes:
        heading: What they are of, over one or more lines.
        bars: Mean and half width of its interval by label; a mean of nan where a run diverged, a half width of nan
            where none is known.
        colours: Colour by label; grey for any other.
    """

    heading: str
    bars: Mapping[str, tuple[float, float]]
    colours: Mapping[str, str] = field(default_factory=dict)


def draw_bars(title: str, unit: str, panels: Sequence[Panel], path: Path) -> Path:
    """Draw the panels, at most three abreast, a bar for each label of any; a panel that lacks one has a dash there."""
    return write_png(bar_figure(title, unit, panels), path)


def bar_figure(title: str, unit: str, panels: Sequence[Panel]) -> Figure:
    """Make the figure that `draw_bars` writes."""
    from matplotlib.figure import Figure  # here, because a run does without it

    labels = list(dict.fromkeys(label for panel in reversed(panels) for label in panel.bars))
    columns = min(len(panels), ROW)
    rows = math.ceil(len(panels) / columns)
    beside = 0.5 + 0.09 * max(map(len, labels), default=0)
    size = (beside + 5.0 * columns, 0.6 + rows * (1.1 + 0.36 * len(labels)))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.suptitle(fill(title, int(11 * size[0])), fontsize=11)
    every = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes, panel in zip(every, panels, strict=False):
        _draw_panel(axes, panel, labels)
        axes.set_xlabel(unit)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    return figure


def _draw_panel(axes: Any, panel: Panel, labels: Sequence[str]) -> None:
    known = {label: bar for label, bar in panel.bars.items() if math.isfinite(bar[0])}
    for row, label in enumerate(labels):
        text = estimate(*known[label]) if label in known else "diverged" if label in panel.bars else "–"
        end = 0.0
        if label in known:
            mean, half = known[label]
            error = half if math.isfinite(half) else None
            axes.barh(row, mean, xerr=error, capsize=3, color=panel.colours.get(label, PLAIN), height=0.7)
            end = mean + (error or 0.0)
        axes.annotate(text, (end, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.margins(x=0.25)  # room for the numbers
    axes.set_title(panel.heading, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
