"""Draw the demo's curves as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from blockadapt_experiments.commands.demo import DemoRun, Epoch
from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.drawing.colours import STYLES
from blockadapt_experiments.files.png import write_png

STYLE_BY_LABEL = {CONTENDERS[name].label: style.line() for name, style in STYLES.items()}


def write_plots(runs: Sequence[DemoRun], subtitle: str, directory: Path) -> list[Path]:
    """Draw training loss and test accuracy, and return the files written: none after one epoch, which is no curve."""
    if max(len(run.epochs) for run in runs) < 2:
        return []
    loss = _figure(runs, "Training loss", "training loss (log scale)", subtitle, lambda epoch: epoch.train_loss)
    loss.axes[0].set_yscale("log")
    accuracy = _figure(runs, "Test accuracy", "test accuracy (%)", subtitle, lambda epoch: 100 * epoch.test_accuracy)
    accuracy.axes[0].set_ylim(*_accuracy_range(runs))
    files = {directory / "training_loss.png": loss, directory / "test_accuracy.png": accuracy}
    return [write_png(figure, path) for path, figure in files.items()]


def _figure(runs: Sequence[DemoRun], title: str, axis: str, subtitle: str, value: Callable[[Epoch], float]) -> Any:
    """Draw a panel for each model and a curve for each optimizer, all on one scale."""
    models = list(dict.fromkeys(run.model for run in runs))
    figure = Figure(figsize=(9, 4.4), dpi=150, layout="constrained")
    figure.suptitle(f"{title} on scikit-learn's digits\n{subtitle}", fontsize=11)
    panels = figure.subplots(1, len(models), sharex=True, sharey=True, squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        for run in [run for run in runs if run.model == model]:
            values = [value(epoch) for epoch in run.epochs]
            style = STYLE_BY_LABEL[run.optimizer]
            panel.plot(range(1, len(values) + 1), values, label=run.optimizer, **style)
        panel.set_title(model, fontsize=10)
        panel.set_xlabel("epoch")
        panel.set_xlim(0, 1.03 * max(len(run.epochs) for run in runs))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(axis="y", color="#E0E0E0", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[1:]:
        panel.tick_params(axis="y", which="both", left=False)  # the scale is the first panel's
    panels[0].set_ylabel(axis)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _accuracy_range(runs: Sequence[DemoRun]) -> tuple[float, float]:
    """Begin below the lowest accuracy once a tenth of the run is over: the first epochs would flatten all others."""
    settled = [100 * e.test_accuracy for run in runs for e in run.epochs[len(run.epochs) // 10 :]]
    return min(settled) // 5 * 5, 100.0
