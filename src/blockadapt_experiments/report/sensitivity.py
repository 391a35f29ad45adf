"""Show how much the learning rate matters: draw the objective against it as a PNG file, a panel for each variant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from blockadapt_experiments.drawing.colours import Style, styles_of
from blockadapt_experiments.drawing.legend import add_legend
from blockadapt_experiments.files.png import write_png
from blockadapt_experiments.report.figures import panel_grid, set_log_ticks
from blockadapt_experiments.results.summary import Summary

SPREAD = 10
"""A loss that is spread wider than this factor gets a log axis: a rate that fails would flatten the others."""


def write_sensitivity(summary: Summary, directory: Path) -> list[Path]:
    """Draw what tuning tried, where it tried two learning rates, and return the file."""
    if not any(len(record["tried"]) > 1 for found in summary.tuned.values() for record in found.values()):
        return []
    return [write_png(sensitivity_figure(summary), directory / f"{summary.experiment.name}-learning-rates.png")]


def sensitivity_figure(summary: Summary) -> Figure:
    """Make the figure: a curve for each optimizer, a ring around the learning rate that was chosen.

    A cross at the edge of the panel stands for a learning rate with which a run diverged.
    """
    variants = [v for v in summary.variants if any(v in found for found in summary.tuned.values())]
    figure, panels = panel_grid(len(variants), sharex=True)
    figure.suptitle(f"{summary.experiment.title}\n{summary.scale} scale, trials of tuning", fontsize=11)
    for panel, variant in zip(panels, variants, strict=True):
        for arm, style in styles_of(summary.optimizers).items():
            record = summary.tuned.get(arm, {}).get(variant)
            if record:
                _draw_trials(panel, record, summary.label(arm), style, _diverged_at(summary, record["objective"]))
        panel.set_title(variant, fontsize=10)
        panel.set_xlabel("learning rate (log scale)")
    _set_scales(summary, panels[0])
    add_legend(figure, panels)
    return figure


def _draw_trials(panel: Any, record: Mapping[str, Any], label: str, style: Style, edge: float) -> None:
    tried = sorted(record["tried"], key=lambda pair: pair[0])
    rates, values = [lr for lr, _ in tried], [math.nan if value is None else value for _, value in tried]
    panel.plot(rates, values, label=label, marker="o", markersize=3.5, linewidth=1.6, **style.line())
    look = {"linestyle": "", "color": style.line()["color"]}
    if record["value"] is not None:
        panel.plot(record["lr"], record["value"], marker="o", markersize=11, markerfacecolor="none", **look)
    lost = [lr for lr, value in tried if value is None]
    if lost:
        place = {"transform": panel.get_xaxis_transform(), "clip_on": False}
        panel.plot(lost, [edge] * len(lost), marker="x", **place, **look)


def _diverged_at(summary: Summary, objective: str) -> float:
    """Return the edge of a panel, as a share of its height, where an objective is worst."""
    return 0.0 if _better(summary, objective) == "high" else 1.0


def _better(summary: Summary, objective: str) -> str | None:
    return next((metric.better for metric in summary.experiment.metrics if metric.key == objective), "low")


def _set_scales(summary: Summary, panel: Any) -> None:
    records = [record for found in summary.tuned.values() for record in found.values()]
    rates = [lr for record in records for lr, _ in record["tried"]]
    values = [value for record in records for _, value in record["tried"] if value is not None]
    objective = records[0]["objective"]
    label = next((metric.label for metric in summary.experiment.metrics if metric.key == objective), objective)
    wide = bool(values) and min(values) > 0 and max(values) > SPREAD * min(values)
    log = wide and _better(summary, objective) == "low"
    panel.set_xscale("log")
    set_log_ticks(panel.xaxis, (min(rates), max(rates)))
    if log:
        panel.set_yscale("log")
        set_log_ticks(panel.yaxis, (min(values), max(values)))
    panel.set_ylabel(label + (" (log scale)" if log else ""))
