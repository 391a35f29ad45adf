"""Runs `cifar10-cnn`: a small convolutional network on CIFAR-10, with the optimizers that people use; not in the paper.

The network is small so that a run takes minutes of one core, and seeds, tuning and ablations can be afforded. Images
are changed as for DenseNet, see `cifar.py`; the learning rate falls to a tenth after half and three quarters of the
steps.

Every setting can be varied: `variants` lists changes, and each is run and tuned by itself. So one command runs an
ablation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from blockadapt.validation import require_integer
from blockadapt_experiments.claims.contests import finals
from blockadapt_experiments.claims.verdicts import difference, mean_words
from blockadapt_experiments.core.config import varied
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import SweepSettings
from blockadapt_experiments.drawing.bars import Panel, draw_bars
from blockadapt_experiments.drawing.colours import bar_colours
from blockadapt_experiments.experiments.cifar import (
    DATA,
    METRICS,
    OUR_CLAIMS,
    Cifar,
    ImageSettings,
    make_run,
)
from blockadapt_experiments.models.cnn import small_cnn
from blockadapt_experiments.names import NOT_IN_PAPER
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.summary import Summary

CIFAR_10 = DATA["cifar10-densenet"]


@dataclass(frozen=True, kw_only=True)
class CnnSettings(ImageSettings, SweepSettings):
    """Holds the settings of the experiment.

    Attributes:
        width: Channels of the first convolution; the others have twice as many.
    """

    width: int = 32

    def __post_init__(self) -> None:
        ImageSettings.__post_init__(self)
        SweepSettings.__post_init__(self)
        require_integer("settings", "width", self.width, least=1)


def make_model(settings: CnnSettings) -> nn.Sequential:
    """Build the network."""
    return small_cnn(settings.width, CIFAR_10.classes)


def make_task(settings: CnnSettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool) -> Cifar:
    """Make the run of a variant."""
    settings = varied(settings, key.variant)
    return make_run(CIFAR_10, partial(make_model, settings), settings, key, lr, data_dir, tuning)


# Ablations ------------------------------------------------------------------------------------------------------------


def variant_panels(summary: Summary) -> list[Panel]:
    """List for each optimizer what every variant ends with, and its paired difference from the first."""
    panels, colours = [], bar_colours(summary.optimizers, summary.label)
    for arm in summary.arms:
        ends = {variant: finals(summary, arm, "test_error", variant) for variant in summary.variants}
        bars = {}
        for variant, values in ends.items():
            if values:
                apart = difference(values, ends[summary.variants[0]])
                beside = "" if variant == summary.variants[0] or not apart.size else f" ({mean_words(apart)})"
                bars[f"{variant or 'as set'}{beside}"] = interval(list(values.values()))
        if bars:
            label = summary.label(arm)
            heading = f"{label}, {len(summary.seeds)} seed{'s' * (len(summary.seeds) > 1)}"
            panels.append(Panel(heading, bars, dict.fromkeys(bars, colours[label])))
    return panels


def draw(summary: Summary, directory: Path) -> Sequence[Path]:
    """Draw the variants side by side, where there are several."""
    panels = variant_panels(summary) if len(summary.variants) > 1 else []
    title = f"Test error by variant, {summary.scale} scale; in brackets, paired over seeds, minus the first"
    path = directory / f"{summary.experiment.name}-variants.png"
    return [draw_bars(title, "test error (%)", panels, path)] if panels else []


EXPERIMENTS = (
    Experiment(
        name="cifar10-cnn",
        title="A small convolutional network on CIFAR-10: what people use",
        section=NOT_IN_PAPER,
        config=CnnSettings,
        axis="epoch",
        metrics=METRICS,
        variants=lambda settings: settings.variants,
        task=make_task,
        model=make_model,
        claims=OUR_CLAIMS,
        objective="validation_accuracy",
        measure="test_error",
        draw=draw,
    ),
)
