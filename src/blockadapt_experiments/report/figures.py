"""Curves as PNG files, one for each metric: mean and 95% band over seeds, a panel for each variant."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from blockadapt_experiments.drawing.colours import Style, styles_of
from blockadapt_experiments.files.png import write_png
from blockadapt_experiments.results.measurements import Metric
from blockadapt_experiments.results.summary import Band, Curve, Summary

ROW = 3
"""The most panels side by side."""

SETTLED = 0.1
"""A linear axis leaves out this share at the start of the runs, whose values would flatten all others."""


def write_figures(summary: Summary, directory: Path) -> list[Path]:
    """Draw every metric that has points; returns the files."""
    written = []
    for metric in summary.metrics:
        curves = {(arm, v): summary.curve(arm, metric.key, v) for arm in summary.arms for v in summary.variants}
        if any(np.isfinite(curve.values).any() for curve in curves.values()):
            path = directory / f"{summary.experiment.name}-{file_name(metric.key)}.png"
            written.append(write_png(_figure(summary, metric, curves), path))
    return written


def file_name(text: str) -> str:
    """The text with everything but letters, digits, dots and underscores as hyphens."""
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def _figure(summary: Summary, metric: Metric, curves: dict[tuple[str, str], Curve]) -> Figure:
    columns = min(len(summary.variants), ROW)
    rows = math.ceil(len(summary.variants) / columns)
    figure = Figure(figsize=(max(7.5, 3.9 * columns), 1.5 + 3.1 * rows), dpi=150, layout="constrained")
    seeds = f"{len(summary.seeds)} seeds, mean and 95% band" if len(summary.seeds) > 1 else "one seed"
    figure.suptitle(f"{summary.experiment.title}\n{summary.scale} scale, {seeds}", fontsize=11)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, variant in zip(panels, summary.variants, strict=False):
        for arm, style in styles_of(summary.arms).items():
            diverged = summary.diverged(arm, variant)
            label = f"{summary.label(arm)} ({diverged} diverged)" if diverged else summary.label(arm)
            _draw_curve(panel, curves[arm, variant], label, style, banded=not diverged)
        panel.set_title(variant, fontsize=10)
        panel.set_xlabel(summary.experiment.axis)
        panel.xaxis.set_major_locator(MaxNLocator(integer=summary.experiment.axis in ("epoch", "step")))
        panel.grid(axis="y", color="#E0E0E0", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(summary.variants) :]:
        panel.set_visible(False)
    scale = _set_scale(summary, panels[0], metric, curves)
    for panel in panels[::columns]:
        panel.set_ylabel(metric.label + (" (log scale)" if scale == "log" else ""))
    handles, labels = panels[0].get_legend_handles_labels()
    abreast = len(labels) if len(labels) <= 5 else math.ceil(len(labels) / 2)
    figure.legend(handles, labels, loc="outside lower center", ncols=abreast, frameon=False, fontsize=9)
    return figure


def _draw_curve(panel: Any, curve: Curve, label: str, style: Style, banded: bool) -> None:
    """A mean and its band; an interval around a diverged seed would cover all others."""
    band = curve.band()
    width = 1.6 if curve.x.size <= 500 else 0.8  # where points are denser than pixels, noise makes a line thick
    look = {**style.line(), "linewidth": width}
    marker = "o" if np.isfinite(band.mean).sum() == 1 else ""  # one point makes no line
    panel.plot(curve.x, band.mean, label=label, marker=marker, **look)
    if banded:
        low, high = band.mean - band.half, band.mean + band.half
        panel.fill_between(curve.x, low, high, color=look["color"], alpha=0.15, lw=0)


def _set_scale(summary: Summary, panel: Any, metric: Metric, curves: dict[tuple[str, str], Curve]) -> str:
    """Set the scale that all panels share; returns its name. Without a positive value it cannot be logarithmic."""
    # What led up to a seed's divergence is no measure for the others.
    steady = [curve for key, curve in curves.items() if curve.x.size and not summary.diverged(*key)]
    bands = [(curve.x, curve.band()) for curve in steady or curves.values()]
    log = metric.log and y_range(bands, log=True) is not None
    shown = y_range(bands, log)
    if shown:
        panel.set_ylim(*shown)
    if log:
        panel.set_yscale("log", nonpositive="clip")
        if shown and shown[1] / shown[0] < 1e3:  # powers of ten alone would be too few
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            panel.yaxis.set_minor_locator(NullLocator())
    return "log" if log else "linear"


def y_range(curves: Iterable[tuple[np.ndarray, Band]], log: bool) -> tuple[float, float] | None:
    """What an axis shows: all means that have settled, and the bands as far as they do not flatten the means."""
    low, high, far_low, far_high = math.inf, -math.inf, math.inf, -math.inf
    for x, band in curves:
        settled = x >= (x[0] + SETTLED * (x[-1] - x[0]) if x.size >= 10 and not log else -math.inf)
        for values, mean in ((band.mean, True), (band.mean - band.half, False), (band.mean + band.half, False)):
            shown = values[settled & np.isfinite(values) & ((values > 0) | (not log))]
            shown = np.log10(shown) if log else shown
            if shown.size and mean:
                low, high = min(low, shown.min()), max(high, shown.max())
            elif shown.size:
                far_low, far_high = min(far_low, shown.min()), max(far_high, shown.max())
    if low > high:
        return None
    room = (high - low) or abs(high) or 1.0
    bottom = min(low - 0.04 * room, max(far_low, low - 0.4 * room))
    top = max(high + 0.04 * room, min(far_high, high + 0.4 * room))
    return (10.0**bottom, 10.0**top) if log else (float(bottom), float(top))
