"""Runs CIFAR: `cifar10-densenet` and `cifar100-densenet`, spectrum clipping against SGD, Adam, AdaBound, GGT and SOAP.

The paper trains DenseNet-BC-100-12 for 300 epochs with minibatches of 64 and a learning rate that falls to a tenth
after half and three quarters of them. Images are normalised, then flipped at random, padded with zeros by 4 on each
side and cropped at random, as in DenseNet's own code. Nesterov's momentum and the weight decay are that code's too; the
paper names neither, and the decay is applied with every optimizer. Smaller scales take the first images only, which
CIFAR has in random order.

α*, where clipped spectra, AdaBound and AMSBound end, is `optimizer.final_lr`. The paper takes the best learning rate of
SGD, 0.1, or ten times that, which is what SGD with momentum 0.9 has as a step size on averaged gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from blockadapt.validation import require_integer
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.contests import (
    Measure,
    Part,
    finals,
    judge_ends,
    judge_equal_time,
    means,
    rivals,
    verdict,
)
from blockadapt_experiments.claims.verdicts import difference, is_below_zero, log_ratio, mean_words, ratio_words
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.core.training import Classification, TrainingSettings, best_device, hold_out
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.data.images import load_images
from blockadapt_experiments.drawing.bars import Panel, draw_bars
from blockadapt_experiments.drawing.colours import bar_colours
from blockadapt_experiments.models.densenet import DenseNet, require_depth
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import Metric, Row, RunKey
from blockadapt_experiments.results.summary import Summary

MARGIN = 4
"""Zeros on each side of an image before it is cropped."""

EVALUATION_BATCH = 100
"""Images measured at once: maps of more do not stay in a cache, and of 1,000 each takes 1.7 times as long."""


class Data(NamedTuple):
    """Is a data set: its name, its classes, and mean and deviation of its channels on the scale 0 to 255."""

    name: str
    classes: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


DATA = {
    "cifar10-densenet": Data("cifar10", 10, (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "cifar100-densenet": Data("cifar100", 100, (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
}

TABLE_1 = {
    "cifar10-densenet": {
        "sgd": 4.51, "paper-adam": 6.07, "adabound": 4.78, "amsbound": 4.77, "ggt": 6.33, "block-adam-clip": 4.34,
    },
    "cifar100-densenet": {
        "sgd": 22.27, "paper-adam": 26.51, "adabound": 22.5, "amsbound": 22.52, "ggt": 22.17, "block-adam-clip": 21.7,
    },
}  # fmt: skip
"""The paper's test errors in percent, single numbers without seeds. Its Block-Adam is the one with clipping, and its
Adam has the same ε."""

TABLE_1_SCALE = "DenseNet-BC-100-12, 300 epochs, 50,000 images"


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Settings, TrainingSettings):
    """Holds the settings of all experiments with CIFAR.

    Attributes:
        train_examples: The number of training images, from the first on.
        test_examples: The number of test images, from the first on.
        autocast: Whether to compute in bfloat16 where torch finds that safe. Made for GPUs; slower on a processor that
            has no such numbers.
    """

    train_examples: int
    test_examples: int
    autocast: bool = False

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        TrainingSettings.__post_init__(self)
        for name in ("train_examples", "test_examples"):
            require_integer("settings", name, getattr(self, name), least=1)


@dataclass(frozen=True, kw_only=True)
class CifarSettings(ImageSettings):
    """Holds the settings of both experiments with DenseNet-BC.

    Attributes:
        depth: Of the DenseNet-BC, 6n + 4.
        growth: Of the same.
        checkpointing: Whether to save memory at the cost of another forward pass; nothing else changes.
    """

    depth: int
    growth: int = 12
    checkpointing: bool = False

    def __post_init__(self) -> None:
        ImageSettings.__post_init__(self)
        require_depth("settings", self.depth)
        require_integer("settings", "growth", self.growth, least=1)


# Images ---------------------------------------------------------------------------------------------------------------


def normalised(examples: Examples, count: int, data: Data) -> Examples:
    """Take the first `count` examples, float32, each channel with mean 0 and deviation 1."""
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.deviation))
    images = examples.images[:count].to(torch.float32).sub_(mean).div_(deviation)
    return Examples(images, examples.labels[:count])


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip every other image on average, pad with zeros, and crop to the former size at a random place."""
    count, channels, height, width = images.shape
    flipped = torch.rand(count, generator=generator) < 0.5
    down, right = torch.randint(0, 2 * MARGIN + 1, (2, count, 1), generator=generator)
    rows = down + torch.arange(height)
    columns = right + torch.arange(width)
    columns = torch.where(flipped[:, None], width + 2 * MARGIN - 1 - columns, columns)  # the margins are alike
    each, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(-1, 1, 1)
    return pad(images, [MARGIN] * 4)[each, channel, rows[:, None, :, None], columns[:, None, None, :]]


# Runs -----------------------------------------------------------------------------------------------------------------


class Cifar(Classification):
    """Is a run; its rows hold the test error in percent too."""

    def advance(self) -> Sequence[Row]:
        """Train for an epoch and measure."""
        rows = super().advance()
        return [
            {**row, "test_error": 100 * (1 - row["test_accuracy"])} if "test_accuracy" in row else row for row in rows
        ]


def make_run(
    data: Data,
    model: Callable[[], nn.Module],
    settings: ImageSettings,
    key: RunKey,
    lr: float,
    data_dir: Path | None,
    tuning: bool,
) -> Cifar:
    """Make the run of this model on these images."""
    train, test = load_images(data.name, data_dir)
    return Cifar(
        model=model,
        sets=hold_out(
            normalised(train, settings.train_examples, data),
            normalised(test, settings.test_examples, data),
            settings,
            tuning=tuning,
        ),
        settings=settings,
        optimizer=partial(settings.make_optimizer, key.arm, lr=lr),
        seed=key.seed,
        prepare=lambda images: images,
        augment=augment,
        device=best_device(),
        autocast=settings.autocast,
        evaluation_batch=EVALUATION_BATCH,
    )


def _make_task(
    data: Data, model: Callable[[CifarSettings], DenseNet]
) -> Callable[[CifarSettings, RunKey, float, Path | None, bool], Cifar]:

    def make(settings: CifarSettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool) -> Cifar:
        return make_run(data, partial(model, settings), settings, key, lr, data_dir, tuning)

    return make


def _make_model(classes: int) -> Callable[[CifarSettings], DenseNet]:
    def make(settings: CifarSettings) -> DenseNet:
        return DenseNet(settings.depth, settings.growth, classes, checkpointing=settings.checkpointing)

    return make


# The paper's claims -------------------------------------------------------------------------------------------------

OURS = "block-adam-clip"

EARLY = 0.2
"""The share of the epochs that counts as early."""

SLIGHTLY = 1.5
"""A training loss of no more than this times another's counts as similar or slightly slower."""

TWICE = 2.0


def judge_lowest(summary: Summary) -> Verdict:
    """Judge whether the clipped method ends with a lower test error than every other of the paper's table."""
    table = TABLE_1[summary.experiment.name]
    parts = []
    for other in rivals(summary, OURS, tuple(table)):
        points = difference(finals(summary, OURS, "test_error"), finals(summary, other, "test_error"))
        paper = f"{table[OURS] - table[other]:+.2f} in the paper".replace("-", "−")
        words = f"{mean_words(points, 'points')} against {summary.label(other)} ({paper})"
        parts.append(Part(is_below_zero(points), words))
    return verdict(parts, f"{_scale(summary)}. Test error of {summary.label(OURS)}: ")


def judge_clipping(summary: Summary) -> Verdict:
    """Judge whether the test error is lower with clipping than without."""
    parts = []
    for other in rivals(summary, OURS, ("block-adam",)):
        points = difference(finals(summary, OURS, "test_error"), finals(summary, other, "test_error"))
        parts.append(Part(is_below_zero(points), f"test error differs by {mean_words(points, 'points')}"))
    return verdict(parts)


def judge_early(summary: Summary) -> Verdict:
    """Judge whether the clipped method is at most slightly behind the fastest of the others early on."""
    early = {arm: means(summary, arm, "train_loss", EARLY) for arm in rivals(summary, OURS)}
    centres = {arm: interval(list(losses.values()))[0] for arm, losses in early.items()}
    steady = [arm for arm in centres if math.isfinite(centres[arm])]
    if not steady:
        return verdict([])
    fastest = min(steady, key=lambda arm: centres[arm])
    ratios = log_ratio(means(summary, OURS, "train_loss", EARLY), early[fastest])
    words = f"early training loss {ratio_words(ratios)} of that of {summary.label(fastest)}, the lowest of the others"
    return verdict([Part(is_below_zero(ratios - math.log(SLIGHTLY)), f"{words}; slightly slower is up to ×{SLIGHTLY}")])


def judge_time(summary: Summary) -> Verdict:
    """Judge whether blocks take at most about twice the time of the diagonal method."""
    parts = []
    for other in rivals(summary, "block-adam", ("adam",)):
        ours, theirs = (np.log(summary.seconds(arm)) for arm in ("block-adam", other))
        ratio = math.exp(ours.mean() - theirs.mean())
        parts.append(Part(ratio <= TWICE, f"{summary.label('block-adam')} took ×{ratio:.3g} the time of Adam"))
    return verdict(parts)


CLAIMS = (
    Claim("Table 1: Block-Adam with spectrum clipping has the lowest test error of all.", judge_lowest),
    Claim("Section 5: spectrum clipping consistently brings a better performance.", judge_clipping),
    Claim("Section 5: early in training it is as fast as the others or slightly slower.", judge_early),
    Claim("Appendix: on CIFAR, Block-Adam takes about twice the wall clock time of Adam; here: at most.", judge_time),
)


# Claims, ours ---------------------------------------------------------------------------------------------------------

BLOCK, MEASURED = "block-adam", "block-adam-auto-clip"

ERROR = Measure("test_error", "Test error", "points")

judge_blocks = partial(judge_ends, ours=BLOCK, others=("adam", "adamw", "paper-adam"), measure=ERROR)
judge_others = partial(judge_ends, ours=BLOCK, others=("sgd", "adabound", "soap", "muon"), measure=ERROR)
judge_clipped = partial(judge_ends, ours=OURS, others=("sgd", BLOCK), measure=ERROR)
judge_measured = partial(judge_ends, ours=MEASURED, others=("sgd", BLOCK, OURS), measure=ERROR)
judge_seconds = partial(judge_equal_time, ours=BLOCK, measure=ERROR)

OUR_CLAIMS = (
    Claim("Ours: Block-Adam ends with a lower test error than Adam and AdamW.", judge_blocks),
    Claim("Ours: and with a lower one than SGD, AdaBound, SOAP and Muon.", judge_others),
    Claim("Ours: clipped, it ends lower than SGD and than without clipping.", judge_clipped),
    Claim("Ours: with α* measured, it ends lower than SGD, than unclipped, and than with a given α*.", judge_measured),
    Claim("Ours: Block-Adam has the lower test error when the faster of two is done.", judge_seconds),
)
"""What is judged beyond the paper, here and in `cnn.py`."""


def _scale(summary: Summary) -> str:
    """Say in words what was trained."""
    settings = summary.settings
    model = f"DenseNet-BC-{settings['depth']}-{settings['growth']}"
    return f"{model}, {settings['epochs']} epochs, {settings['train_examples']:,} images"


def table_1_panels(summary: Summary) -> list[Panel]:
    """Return the paper's Table 1 and the test errors measured here, each under its scale; nothing before a run."""
    errors = {arm: list(finals(summary, arm, "test_error").values()) for arm in summary.arms}
    here = {summary.label(arm): interval(values) for arm, values in errors.items() if values}
    if not here:
        return []
    paper = {summary.label(arm): (error, math.nan) for arm, error in TABLE_1[summary.experiment.name].items()}
    seeds = f"{len(summary.seeds)} seeds, mean and 95% interval" if len(summary.seeds) > 1 else "one seed"
    theirs = {arm: arm for arm in TABLE_1[summary.experiment.name]}
    colours = {**bar_colours(theirs, summary.label), **bar_colours(summary.optimizers, summary.label)}
    return [
        Panel(f"The paper, Table 1: {TABLE_1_SCALE},\nsingle numbers", paper, colours),
        Panel(f"Here, {summary.scale} scale: {_scale(summary)},\n{seeds}", here, colours),
    ]


def draw(summary: Summary, directory: Path) -> Sequence[Path]:
    """Draw the paper's Table 1 beside ours."""
    panels = table_1_panels(summary)
    title = f"Test error after training on {DATA[summary.experiment.name].name}: two scales, not to be mixed up"
    path = directory / f"{summary.experiment.name}-table-1.png"
    return [draw_bars(title, "test error (%)", panels, path)] if panels else []


METRICS = (
    Metric("train_loss", "training loss", log=True),
    Metric("test_accuracy", "test accuracy", better="high"),
    Metric("test_error", "test error (%)"),
    Metric("test_loss", "test loss", log=True),
    Metric("train_accuracy", "training accuracy", better="high"),
    Metric("validation_loss", "validation loss", log=True),
    Metric("validation_accuracy", "validation accuracy", better="high"),
)


def _experiment(name: str, title: str, section: str) -> Experiment[Any]:
    model = _make_model(DATA[name].classes)
    return Experiment(
        name=name,
        title=title,
        section=section,
        config=CifarSettings,
        axis="epoch",
        metrics=METRICS,
        task=_make_task(DATA[name], model),
        model=model,
        claims=(*CLAIMS, *OUR_CLAIMS),
        objective="validation_accuracy",
        measure="test_error",
        draw=draw,
    )


EXPERIMENTS = (
    _experiment(
        "cifar10-densenet", "DenseNet-BC on CIFAR-10: spectrum clipping", "Section 5, table 1; appendix, figure 8"
    ),
    _experiment("cifar100-densenet", "DenseNet-BC on CIFAR-100: spectrum clipping", "Section 5, table 1, figure 5"),
)
