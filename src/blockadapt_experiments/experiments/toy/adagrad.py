"""Runs `toy-adagrad`: AdaGrad with a diagonal and with a full matrix on the toy network, for three minibatch sizes.

A seed draws the problem, the start and the minibatches, so that both arms do the same thing and every seed is another
problem. There are only ten samples, so nothing is held out: α is tuned on the training loss of other problems, averaged
over the run, which counts both how fast it falls and how low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockadapt.validation import require, require_integer
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.verdicts import (
    BySeed,
    difference,
    is_below_zero,
    log_ratio,
    mean_words,
    numbers,
    ratio_words,
    together,
)
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.experiments.toy.descent import Descent
from blockadapt_experiments.experiments.toy.network import Problem, ToySettings, draw_problem
from blockadapt_experiments.results.measurements import Metric, Outcome, Row, RunKey
from blockadapt_experiments.results.summary import Summary

LEG = 500
"""Steps in a leg: a fraction of a second."""

DIAGONAL, FULL = "adagrad", "full-adagrad"


@dataclass(frozen=True, kw_only=True)
class AdagradSettings(ToySettings):
    """Holds the settings of `toy-adagrad`.

    Attributes:
        steps: Of each run.
        batches: Minibatch sizes, the paper's three panels; which three it leaves open.
        every: Steps between two measurements of the loss.
    """

    steps: int
    batches: tuple[int, ...]
    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("settings", "steps", self.steps, least=1)
        require_integer("settings", "every", self.every, least=1)
        ok = 0 < len(set(self.batches)) == len(self.batches) and all(1 <= m <= self.samples for m in self.batches)
        require(ok, "settings", "batches", f"one or more different sizes in [1, {self.samples}]", list(self.batches))


class AdagradTask:
    """Is one run: the loss over all samples, before the first step and every `every` steps after."""

    def __init__(self, settings: AdagradSettings, key: RunKey, lr: float) -> None:
        self.legs = -(-settings.steps // LEG)
        self._settings = settings
        self._problem = draw_problem(np.random.default_rng([key.seed, 0]), settings)
        start = draw_start(np.random.default_rng([key.seed, 1]), self._problem)
        self._descent = Descent(start, partial(settings.make_optimizer, key.arm, lr=lr), settings.steps)
        size = int(key.variant.removeprefix("M="))
        self._batches = draw_batches(np.random.default_rng([key.seed, 2]), settings.steps, settings.samples, size)
        self._losses: list[float] = []

    def advance(self) -> Sequence[Row]:
        """Take the next steps."""
        rows = [] if self._losses else [self._measure()]
        descent, settings = self._descent, self._settings
        with np.errstate(over="ignore", invalid="ignore"):  # a learning rate may be hopeless
            for batch in self._batches[descent.taken : descent.taken + LEG]:
                descent.step(self._problem.gradient(descent.x, batch))
                if descent.taken % settings.every == 0 or descent.taken == settings.steps:
                    rows.append(self._measure())
        return rows

    def _measure(self) -> Row:
        self._losses.append(float(self._problem.loss(self._descent.x)))
        return {
            "step": self._descent.taken,
            "loss": self._losses[-1],
            "mean_loss": float(np.mean(self._losses)),
        }

    def outcome(self) -> Outcome:
        """Return the loss at the end, the least, and the mean over the run."""
        losses = self._losses
        return Outcome({"final": losses[-1], "least": min(losses), "mean": float(np.mean(losses))}, {})

    def state_dict(self) -> dict[str, Any]:
        """Return the point, its optimizer and the losses so far; the rest follows from the settings and the seed."""
        return {"descent": self._descent.state_dict(), "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._descent.load_state_dict(state["descent"])
        self._losses = list(state["losses"])


def draw_start(random: np.random.Generator, problem: Problem) -> np.ndarray:
    """Draw weights N(0, 1), and again while a hidden unit is dead."""
    while True:
        start = random.standard_normal(problem.truth.size)
        if problem.alive(start):
            return start


def draw_batches(random: np.random.Generator, steps: int, samples: int, size: int) -> np.ndarray:
    """Draw the samples of each step, [steps, size], without repetition within a step."""
    return random.random((steps, samples)).argsort(axis=1)[:, :size]


def _variants(settings: AdagradSettings) -> Sequence[str]:
    return [f"M={size}" for size in settings.batches]


def _task(settings: AdagradSettings, key: RunKey, lr: float, data: Path | None, tuning: bool) -> AdagradTask:
    return AdagradTask(settings, key, lr)


def steps_to_common_level(summary: Summary, variant: str) -> tuple[BySeed, BySeed]:
    """Count, for each seed, the steps of the full and of the diagonal version to the lowest loss that both reach."""
    curves = [summary.curve(arm, "loss", variant) for arm in (FULL, DIAGONAL)]
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for seed in [seed for seed in summary.seeds if all(seed in curve.seeds for curve in curves)]:
        losses = [curve.values[curve.seeds.index(seed)] for curve in curves]
        if all(np.isfinite(values).all() for values in losses):
            level = max(values.min() for values in losses)
            for steps, curve, values in zip(found, curves, losses, strict=True):
                first = np.flatnonzero(values <= level)[0]
                steps[seed] = max(curve.x[first], 1.0)  # a start that was never bettered counts as one step
    return found


def judge_faster(summary: Summary) -> Verdict:
    """Judge whether the full version takes fewer steps to the lowest loss that both reach."""
    ratios = {variant: log_ratio(*steps_to_common_level(summary, variant)) for variant in summary.variants}
    words = ", ".join(f"{variant} {ratio_words(ratio)}" for variant, ratio in ratios.items())
    held = together(is_below_zero(ratio) for ratio in ratios.values())
    return Verdict(held, f"Steps to the lowest loss that both reach, full over diagonal, geometric mean: {words}.")


def judge_lower(summary: Summary) -> Verdict:
    """Judge whether the full version ends with a lower loss."""
    parts, words = [], []
    for variant in summary.variants:
        full, diagonal = (numbers(summary, arm, "final", variant) for arm in (FULL, DIAGONAL))
        gap = difference(full, diagonal)
        parts.append(is_below_zero(gap))
        values = f"{mean_words(full.values())} against {mean_words(diagonal.values())}"
        words.append(f"{variant} {values}, difference {mean_words(gap)}")
    return Verdict(together(parts), f"Loss after the last step, full against diagonal: {'; '.join(words)}.")


TOY_ADAGRAD = Experiment(
    name="toy-adagrad",
    title="AdaGrad with a full matrix against a diagonal, on a network of ten weights",
    section="Section 2; appendix A, figure 6",
    dtype=torch.float64,
    config=AdagradSettings,
    axis="step",
    metrics=(
        Metric("loss", "training loss, all samples", log=True),
        Metric("mean_loss", "training loss, mean so far"),
    ),
    variants=_variants,
    task=_task,
    claims=(
        Claim("Full-matrix AdaGrad converges faster than its diagonal (section 2, appendix A).", judge_faster),
        Claim("Full-matrix AdaGrad reaches better objective values (section 2, appendix A).", judge_lower),
    ),
    objective="mean_loss",
)
