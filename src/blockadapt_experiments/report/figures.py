"""Draw curves as PNG files, one for each metric: mean and 95% band over seeds, a panel for each variant.

Where there is one variant, and one way is better, the same curves over seconds stand beside: equal steps, equal time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from blockadapt_experiments.drawing.colours import Style, styles_of
from blockadapt_experiments.drawing.legend import add_legend
from blockadapt_experiments.files.png import write_png
from blockadapt_experiments.results.measurements import Metric
from blockadapt_experiments.results.summary import Band, Curve, Summary

ROW = 3
"""The most panels side by side."""

SETTLED = 0.1
"""A linear axis leaves out this share at the start of the runs, whose values would flatten all others."""


def write_figures(summary: Summary, directory: Path) -> list[Path]:
    """Draw every metric that has a curve, and return the files."""
    written = []
    for metric in summary.metrics:
        curves = {(arm, v): summary.curve(arm, metric.key, v) for arm in summary.arms for v in summary.variants}
        if any(curve.is_line for curve in curves.values()):
            path = directory / f"{summary.experiment.name}-{file_name(metric.key)}.png"
            written.append(write_png(curve_figure(summary, metric, curves), path))
    return written


def file_name(text: str) -> str:
    """Put hyphens for everything but letters, digits, dots and underscores."""
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def curve_figure(summary: Summary, metric: Metric, curves: Mapping[tuple[str, str], Curve]) -> Figure:
    """Make the figure of one metric."""
    known = any(np.isfinite(curve.seconds).any() for curve in curves.values())
    clocked = known and metric.better is not None and len(summary.variants) == 1
    views = [(variant, timed) for variant in summary.variants for timed in ((False, True) if clocked else (False,))]
    figure, panels = panel_grid(len(views), sharex=not clocked)
    log = _is_log(metric, curves)
    mean = "geometric mean" if log else "mean"
    seeds = f"{len(summary.seeds)} seeds, {mean} and 95% band" if len(summary.seeds) > 1 else "one seed"
    figure.suptitle(f"{summary.experiment.title}\n{summary.scale} scale, {seeds}", fontsize=11)
    for panel, (variant, timed) in zip(panels, views, strict=True):
        for arm, style in styles_of(summary.optimizers).items():
            diverged = summary.diverged(arm, variant)
            label = f"{summary.label(arm)} ({diverged} diverged)" if diverged else summary.label(arm)
            _draw_curve(panel, curves[arm, variant], label, style, log, timed, banded=not diverged)
        panel.set_title(variant, fontsize=10)
        panel.set_xlabel("seconds" if timed else summary.experiment.axis)
        counted = not timed and summary.experiment.axis in ("epoch", "step")
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=counted))
    _set_scale(summary, panels[0], log, curves)
    for panel in panels[::ROW]:
        panel.set_ylabel(metric.label + (" (log scale)" if log else ""))
    add_legend(figure, panels)
    return figure


def panel_grid(count: int, sharex: bool) -> tuple[Figure, list[Any]]:
    """Make a figure of `count` panels on one vertical scale, at most `ROW` abreast."""
    columns = min(count, ROW)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(7.5, 3.9 * columns), 1.5 + 3.1 * rows), dpi=150, layout="constrained")
    every = figure.subplots(rows, columns, sharex=sharex, sharey=True, squeeze=False).flatten()
    for panel in every:
        panel.grid(axis="y", color="#E0E0E0", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in every[count:]:
        panel.set_visible(False)
    return figure, list(every[:count])


def set_log_ticks(axis: Any, shown: tuple[float, float]) -> None:
    """Write 1, 2 and 5 of each power of ten where powers alone would be too few."""
    if shown[1] / shown[0] < 1e3:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def _draw_curve(panel: Any, curve: Curve, label: str, style: Style, log: bool, timed: bool, banded: bool) -> None:
    """Draw a mean and its band. An interval around a diverged seed would cover all others."""
    band = curve.band(log)
    x = curve.mean_seconds() if timed else curve.x
    width = 1.6 if curve.x.size <= 500 else 0.8  # where points are denser than pixels, noise makes a line thick
    look = {**style.line(), "linewidth": width}
    marker = "o" if np.isfinite(band.middle).sum() == 1 else ""  # one point makes no line
    panel.plot(x, band.middle, label=label, marker=marker, **look)
    if banded:
        panel.fill_between(x, band.low, band.high, color=look["color"], alpha=0.15, lw=0)


def _steady(summary: Summary, curves: Mapping[tuple[str, str], Curve]) -> list[Curve]:
    """Pick the curves that set the scale: what led up to a seed's divergence is no measure for the others."""
    return [curve for key, curve in curves.items() if curve.x.size and not summary.diverged(*key)] or [*curves.values()]


def _is_log(metric: Metric, curves: Mapping[tuple[str, str], Curve]) -> bool:
    """Tell whether the axis is logarithmic: without a positive value it cannot be."""
    return metric.log and any((curve.values > 0).any() for curve in curves.values())


def _set_scale(summary: Summary, panel: Any, log: bool, curves: Mapping[tuple[str, str], Curve]) -> None:
    """Set the vertical scale that all panels share."""
    shown = y_range([(curve.x, curve.band(log)) for curve in _steady(summary, curves)], log)
    if shown:
        panel.set_ylim(*shown)
    if log:
        panel.set_yscale("log", nonpositive="clip")
        if shown:
            set_log_ticks(panel.yaxis, shown)


def y_range(curves: Iterable[tuple[np.ndarray, Band]], log: bool) -> tuple[float, float] | None:
    """Choose what an axis shows: all means that have settled, and the bands as far as they do not flatten the means."""
    low, high, far_low, far_high = math.inf, -math.inf, math.inf, -math.inf
    for x, band in curves:
        settled = x >= (x[0] + SETTLED * (x[-1] - x[0]) if x.size >= 10 and not log else -math.inf)
        for values in (band.middle, band.low, band.high):
            shown = values[settled & np.isfinite(values) & ((values > 0) | (not log))]
            shown = np.log10(shown) if log else shown
            if shown.size and values is band.middle:
                low, high = min(low, shown.min()), max(high, shown.max())
            elif shown.size:
                far_low, far_high = min(far_low, shown.min()), max(far_high, shown.max())
    if low > high:
        return None
    room = (high - low) or abs(high) or 1.0
    bottom = min(low - 0.04 * room, max(far_low, low - 0.4 * room))
    top = max(high + 0.04 * room, min(far_high, high + 0.4 * room))
    return (10.0**bottom, 10.0**top) if log else (float(bottom), float(top))
