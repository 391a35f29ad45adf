"""Runs MNIST: `mnist-lenet300` and `mnist-lenet5`, block against diagonal against GGT.

The paper trains for 100 epochs with minibatches of 128 and a constant learning rate, without clipping; pixels are
divided by 256, as Caffe's own example does, and nothing is augmented. Smaller scales take the first images only,
which MNIST has in random order.

Learning rates are tuned by validation accuracy. Validation loss would be finer, but once a net has learnt its training
images it grows with the net's confidence, so it would prefer learning rates that do not get there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from blockadapt.validation import require, require_integer
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.contests import Part, means, oscillations, rivals, verdict
from blockadapt_experiments.claims.verdicts import difference, is_below_zero, log_ratio, mean_words, ratio_words
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.core.training import Classification, TrainingSettings, hold_out
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.data.images import load_images, require_images
from blockadapt_experiments.experiments.classifier import METRICS
from blockadapt_experiments.models.lenets import lenet_5_caffe, lenet_300_100
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.summary import Summary

SIDE = 28


@dataclass(frozen=True, kw_only=True)
class MnistSettings(Settings, TrainingSettings):
    """Holds the settings of both experiments.

    Attributes:
        data: "mnist"; or "digits", scikit-learn's embedded 8 × 8 images enlarged, to try things out without a download;
            or one of your own, grey and square, with labels from 0 to 9.
        train_examples: The number of training images, from the first on.
        test_examples: The number of test images, from the first on.
    """

    data: str = "mnist"
    train_examples: int
    test_examples: int

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        TrainingSettings.__post_init__(self)
        require_images("settings", self.data, ("mnist", "digits"))
        require_integer("settings", "train_examples", self.train_examples, least=1)
        require_integer("settings", "test_examples", self.test_examples, least=1)


def _make_task(
    model: Callable[[], nn.Module],
) -> Callable[[MnistSettings, RunKey, float, Path | None, bool], Classification]:
    def make(settings: MnistSettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool) -> Classification:
        train, test = load_images(settings.data, data_dir)
        sets = hold_out(
            _first(train, settings.train_examples), _first(test, settings.test_examples), settings, tuning=tuning
        )
        return Classification(
            model=model,
            sets=sets,
            settings=settings,
            optimizer=partial(settings.make_optimizer, key.arm, lr=lr),
            seed=key.seed,
            prepare=_scaled,
        )

    return make


def _first(examples: Examples, count: int) -> Examples:
    return Examples(_enlarged(examples.images[:count]), examples.labels[:count])


def _enlarged(images: Tensor) -> Tensor:
    """Enlarge images of 8 × 8 to 24 × 24 with a margin; leave MNIST's as they are."""
    channels, height, width = images.shape[1:]
    factor, rest = divmod(SIDE, width)
    ok = channels == 1 and height == width <= SIDE and rest % 2 == 0
    require(ok, "settings", "data", f"grey squares that {SIDE} pixels hold with equal margins", tuple(images.shape[1:]))
    if width == SIDE:
        return images
    margin = rest // 2
    return pad(interpolate(images, scale_factor=factor), [margin] * 4)


def _scaled(images: Tensor) -> Tensor:
    return images.to(torch.float32).div_(256)


# The paper's claims -------------------------------------------------------------------------------------------------

EARLY = 0.2
"""The share of the epochs that counts as early; as much as counts as late in `Summary.oscillation`."""

SIMILAR = 1.5
"""Training losses within this factor of each other look alike on a plot that spans decades."""


class Pair(NamedTuple):
    """Is a block method and what it is compared with: by the paper, or by us where that is Adam as people use it."""

    block: str
    other: str


PAIRS = (Pair("block-adam", "paper-adam"), Pair("block-adam", "adam"), Pair("block-rmsprop", "rmsprop"))
PAIRS_WITH_GGT = (*PAIRS, Pair("block-adam", "ggt"))


def _pairs(summary: Summary, pairs: tuple[Pair, ...]) -> Iterator[tuple[Pair, str]]:
    """Yield those of which both have run, with their names."""
    for pair in pairs:
        if rivals(summary, pair.block, (pair.other,)):
            yield pair, f"{summary.label(pair.block)} against {summary.label(pair.other)}"


def judge_early(summary: Summary) -> Verdict:
    """Judge whether training losses are within a factor of each other early on."""
    parts = []
    for pair, name in _pairs(summary, PAIRS):
        block, other = (means(summary, arm, "train_loss", EARLY, log=True) for arm in pair)
        ratios = difference(block, other)
        mean, half = interval(ratios)
        held = True if abs(mean) + half < math.log(SIMILAR) else False if abs(mean) - half > math.log(SIMILAR) else None
        parts.append(Part(held, f"{name}: early training loss {ratio_words(ratios)}, alike if within ×{SIMILAR}"))
    return verdict(parts)


def judge_late(summary: Summary) -> Verdict:
    """Judge whether the training loss of the block methods swings less late in training."""
    parts = []
    for pair, name in _pairs(summary, PAIRS):
        swings = [oscillations(summary, arm, "train_loss") for arm in pair]
        # A net that has died stands still, and there is no ratio to that.
        ratios = log_ratio(*({seed: swing or math.nan for seed, swing in by_seed.items()} for by_seed in swings))
        parts.append(
            Part(is_below_zero(ratios), f"{name}: late oscillation of the training loss {ratio_words(ratios)}")
        )
    return verdict(parts)


def judge_steady(summary: Summary) -> Verdict:
    """Judge whether the test accuracy of the block methods swings less late in training."""
    parts = []
    for pair, name in _pairs(summary, PAIRS_WITH_GGT):
        points = 100 * difference(*(oscillations(summary, arm, "test_accuracy") for arm in pair))
        words = f"{name}: late oscillation of the test accuracy differs by {mean_words(points, 'points')}"
        parts.append(Part(is_below_zero(points), words))
    return verdict(parts)


def judge_higher(summary: Summary) -> Verdict:
    """Judge whether the test accuracy of the block methods is higher, averaged over all epochs."""
    parts = []
    for pair, name in _pairs(summary, PAIRS_WITH_GGT):
        points = 100 * difference(*(means(summary, arm, "test_accuracy") for arm in pair))
        words = f"{name}: test accuracy, mean over epochs, differs by {mean_words(points, 'points')}"
        parts.append(Part(is_below_zero(-points), words))
    return verdict(parts)


CLAIMS = (
    Claim("Section 5: early in training, block and diagonal methods have similar learning curves.", judge_early),
    Claim("Section 5: late in training, block methods converge without the oscillation of diagonal ones.", judge_late),
    Claim("Section 5: block methods have a steadier test accuracy than diagonal ones and GGT.", judge_steady),
    Claim("Section 5: it is also higher over all epochs.", judge_higher),
)


def _experiment(name: str, title: str, model: Callable[[], nn.Module], target: float) -> Experiment[MnistSettings]:
    return Experiment(
        name=name,
        title=title,
        section="Section 5, figure 4; appendix, figure 7",
        config=MnistSettings,
        axis="epoch",
        metrics=METRICS,
        task=_make_task(model),
        model=lambda settings: model(),
        claims=CLAIMS,
        objective="validation_accuracy",
        measure="test_accuracy",
        target=("test_accuracy", target),
    )


EXPERIMENTS = (
    _experiment("mnist-lenet300", "LeNet-300-100 on MNIST: block against diagonal against GGT", lenet_300_100, 0.95),
    _experiment("mnist-lenet5", "LeNet-5 (Caffe's) on MNIST: block against diagonal against GGT", lenet_5_caffe, 0.98),
)
