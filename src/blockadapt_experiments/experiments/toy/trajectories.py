"""Runs `toy-trajectories`: RMSprop with a diagonal and with one 2 × 2 block, on the loss over two weights of a layer.

A variant is a landscape: a problem, and the pair of its weights (same layer, same input neuron) that interacts most, as
the paper compares the two where curvature is "dynamic". A seed is a start. The labels are p itself unless settings say
otherwise: with drawn labels nearly every landscape has its least loss on a kink of a ReLU, or at infinity, where no
optimizer can make the gradient vanish. Learning rates are tuned on other starts, by the number of steps itself.

A run has arrived where ‖∇‖ < tolerance and the loss is curved in both directions: where a unit is dead the gradient
vanishes too, and a large step can end there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blockadapt.validation import require, require_integer, require_number
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.verdicts import BySeed, is_below_zero, log_ratio, numbers, ratio_words
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.experiments.toy.descent import Descent
from blockadapt_experiments.experiments.toy.drawing import GRID_REACH, draw_paths
from blockadapt_experiments.experiments.toy.landscape import couplings
from blockadapt_experiments.experiments.toy.network import (
    Array,
    Pair,
    Problem,
    ToySettings,
    draw_problem,
    pair_hessian,
    same_layer_pairs,
    square,
    with_pair,
)
from blockadapt_experiments.results.measurements import Metric, Outcome, Row, RunKey
from blockadapt_experiments.results.summary import Summary

LEG = 500
"""Steps in a leg: a fraction of a second."""

DIAGONAL, BLOCK = "rmsprop", "block-rmsprop"

LEAST_CURVATURE = 1e-3
"""Of a landscape at the true weights: where it is flatter, a small gradient does not mean a minimum nearby."""

FLAT = 1e-6
"""No more curvature than this in some direction: a unit is dead."""

GRID = 61
"""Points along each weight in drawings."""


@dataclass(frozen=True, kw_only=True)
class TrajectorySettings(ToySettings):
    """Holds the settings of `toy-trajectories`.

    Attributes:
        landscapes: Their numbers; each draws another problem.
        coupling: The least |h₁₂| / √(h₁₁h₂₂) at the true weights that makes a landscape worth comparing on.
        reach: How far starts lie from the true weights at most, along each weight.
        steps: Of each run.
        tolerance: Of ‖∇‖.
        every: Steps between two rows.
    """

    landscapes: tuple[int, ...]
    coupling: float
    reach: float
    steps: int
    tolerance: float
    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = 0 < len(set(self.landscapes)) == len(self.landscapes) and min(self.landscapes) >= 0
        require(ok, "settings", "landscapes", "one or more different numbers >= 0", list(self.landscapes))
        require_number("settings", "coupling", self.coupling, least=0, below=1)
        require_number("settings", "reach", self.reach, above=0)
        require_integer("settings", "steps", self.steps, least=1)
        require_number("settings", "tolerance", self.tolerance, above=0)
        require_integer("settings", "every", self.every, least=1)


@dataclass(frozen=True)
class Landscape:
    """Holds the loss over two weights of a problem, all others at their true values."""

    problem: Problem
    pair: Pair

    @property
    def centre(self) -> Array:
        """Return the true values [2]."""
        return self.problem.truth[self.pair]

    @property
    def edges(self) -> list[str]:
        """Name the two weights."""
        return [str(self.problem.edges[i]) for i in self.pair]

    def loss(self, point: Array) -> Array:
        """Compute the loss at points […, 2]."""
        return self.problem.loss(with_pair(self.problem.truth, self.pair, point))

    def gradient(self, point: Array) -> Array:
        """Compute the gradient at points […, 2]."""
        return self.problem.gradient(with_pair(self.problem.truth, self.pair, point))[..., self.pair]

    def curvature(self, point: Array) -> float:
        """Compute the least eigenvalue of the Hessian at a point [2]."""
        weights = with_pair(self.problem.truth, self.pair, point)
        return float(np.linalg.eigvalsh(pair_hessian(self.problem, weights, self.pair))[0])


def draw_landscape(number: int, settings: TrajectorySettings) -> Landscape:
    """Find the pair that interacts most in the first problem that has one to the settings' taste."""
    random = np.random.default_rng([number, 0])
    while True:
        problem = draw_problem(random, settings)
        pairs = same_layer_pairs(problem)
        hessians = [pair_hessian(problem, problem.truth, pair) for pair in pairs]
        curved = [float(np.linalg.eigvalsh(H)[0]) >= LEAST_CURVATURE for H in hessians]
        ratios = [float(couplings(H)[1]) if ok else -1.0 for H, ok in zip(hessians, curved, strict=True)]
        strongest = int(np.argmax(ratios))
        if ratios[strongest] >= settings.coupling:
            return Landscape(problem, pairs[strongest])


class TrajectoryTask:
    """Is one run from one start. It goes on after it has arrived, to show whether it stays."""

    def __init__(self, settings: TrajectorySettings, key: RunKey, lr: float, tuning: bool = False) -> None:
        self.legs = -(-settings.steps // LEG)
        self._tuning = tuning
        self._settings = settings
        self._landscape = draw_landscape(_number(key.variant), settings)
        start = draw_start(np.random.default_rng([key.seed, 1]), self._landscape, settings)
        self._descent = Descent(start, partial(settings.make_optimizer, key.arm, lr=lr), settings.steps)
        self._path = np.full((settings.steps + 1, 2), np.nan)
        self._path[0] = start
        self._arrived = self._stationary = settings.steps  # as if with the last step, until it has

    def advance(self) -> Sequence[Row]:
        """Take the next steps. While tuning, only the steps needed are of interest, and none after them."""
        descent, settings, rows = self._descent, self._settings, []
        end = min(descent.taken + LEG, settings.steps)
        with np.errstate(over="ignore", invalid="ignore"):  # a learning rate may be hopeless
            while descent.taken < end and not self._settled:
                gradient = self._landscape.gradient(descent.x)
                self._look(gradient)
                if descent.taken % settings.every == 0 and not self._tuning:
                    rows.append(self._measure(gradient))
                descent.step(gradient)
                self._path[descent.taken] = descent.x
            if descent.taken == settings.steps or self._settled:
                rows.append(self._measure(self._landscape.gradient(descent.x)))
        return rows

    @property
    def _settled(self) -> bool:
        return self._tuning and self._arrived < self._settings.steps

    def _look(self, gradient: Array) -> None:
        """Note the first time that the gradient vanishes, anywhere and where the loss is curved."""
        taken = self._descent.taken
        if taken < self._arrived and np.hypot(*gradient) < self._settings.tolerance:
            self._stationary = min(self._stationary, taken)
            if self._landscape.curvature(self._descent.x) > FLAT:
                self._arrived = taken

    def _measure(self, gradient: Array) -> Row:
        taken = self._descent.taken
        loss, norm = float(self._landscape.loss(self._descent.x)), float(np.hypot(*gradient))
        return {"step": taken, "loss": loss, "gradient": norm, "steps_needed": min(taken, self._arrived)}

    def outcome(self) -> Outcome:
        """Return the steps needed (all of them if it never arrived), and how straight the path there was."""
        path = self._path[: self._arrived + 1]
        length = float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())
        displacement = float(np.linalg.norm(path[-1] - path[0]))
        found = {
            "steps_needed": float(self._arrived),
            "steps_stationary": float(self._stationary),
            "arrived": float(self._arrived < self._settings.steps),
            "detour": length / displacement if displacement > 0 else 1.0,
            "final_loss": float(self._landscape.loss(self._descent.x)),
        }
        centre = self._landscape.centre
        grid = square(centre, GRID_REACH * self._settings.reach, GRID)
        arrays = {"path": path, "loss": self._landscape.loss(grid), "centre": centre}
        return Outcome(found, {**arrays, "edges": np.array(self._landscape.edges)})

    def state_dict(self) -> dict[str, Any]:
        """Return the point, its optimizer and the path so far; the rest follows from the settings, variant and seed."""
        return {
            "descent": self._descent.state_dict(),
            "path": torch.from_numpy(self._path[: self._descent.taken + 1].copy()),
            "arrived": self._arrived,
            "stationary": self._stationary,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._descent.load_state_dict(state["descent"])
        self._path[: len(state["path"])] = state["path"].numpy()
        self._arrived, self._stationary = state["arrived"], state["stationary"]


def draw_start(random: np.random.Generator, landscape: Landscape, settings: TrajectorySettings) -> Array:
    """Draw a point in a square around the true values, and again while the loss is all but flat there."""
    while True:
        start = landscape.centre + random.uniform(-settings.reach, settings.reach, 2)
        if np.hypot(*landscape.gradient(start)) > 10 * settings.tolerance:
            return start


def _number(variant: str) -> int:
    return int(variant.removeprefix("landscape-"))


def _variants(settings: TrajectorySettings) -> Sequence[str]:
    return [f"landscape-{number}" for number in settings.landscapes]


def _task(settings: TrajectorySettings, key: RunKey, lr: float, data: Path | None, tuning: bool) -> TrajectoryTask:
    return TrajectoryTask(settings, key, lr, tuning)


def _log_ratios(summary: Summary, name: str) -> dict[str, np.ndarray]:
    """Compute log(block / diagonal) of a number, by landscape, over the starts that both have finished."""
    found: dict[str, tuple[BySeed, BySeed]] = {
        variant: (numbers(summary, BLOCK, name, variant), numbers(summary, DIAGONAL, name, variant))
        for variant in summary.variants
    }
    common = set.intersection(*(set(side) for sides in found.values() for side in sides)) if found else set()
    return {
        variant: log_ratio(*({seed: max(side[seed], 1.0) for seed in sorted(common)} for side in sides))
        for variant, sides in found.items()
    }


def _judge(summary: Summary, name: str) -> tuple[bool | None, str]:
    """Judge whether the number is smaller with blocks: the mean over landscapes of log ratios, then over starts."""
    ratios = _log_ratios(summary, name)
    means = np.mean(list(ratios.values()), axis=0) if ratios else np.array([])
    each = ", ".join(f"{variant} {ratio_words(ratio)}" for variant, ratio in ratios.items())
    return is_below_zero(means), f"block over diagonal {ratio_words(means)}; {each}"


def judge_fewer_steps(summary: Summary) -> Verdict:
    """Judge whether the block takes fewer steps."""
    held, words = _judge(summary, "steps_needed")
    arrived = {
        arm: [value for variant in summary.variants for value in numbers(summary, arm, "arrived", variant).values()]
        for arm in (BLOCK, DIAGONAL)
    }
    counts = " and ".join(f"{values.count(1.0)} of {len(values)}" for values in arrived.values())
    anywhere = ratio_words(np.mean(list(_log_ratios(summary, "steps_stationary").values()), axis=0))
    return Verdict(
        held,
        f"Steps to a stationary point, geometric mean: {words}. Arrived: {counts} runs with block and diagonal; others "
        f"count with all their steps. With plateaus, where a unit is dead, as stationary points: {anywhere}.",
    )


def judge_straighter(summary: Summary) -> Verdict:
    """Judge whether the block makes a shorter detour."""
    held, words = _judge(summary, "detour")
    return Verdict(held, f"Length of the path over the distance that it covers: {words}.")


TOY_TRAJECTORIES = Experiment(
    name="toy-trajectories",
    title="RMSprop with one 2 × 2 block against a diagonal, on the loss over two weights",
    section="Section 2, figure 2",
    dtype=torch.float64,
    config=TrajectorySettings,
    axis="step",
    metrics=(
        Metric("gradient", "‖∇‖", log=True),
        Metric("loss", "loss", log=True),
        Metric("steps_needed", "steps needed so far to a stationary point"),
    ),
    variants=_variants,
    task=_task,
    claims=(
        Claim(
            "Block RMSprop reaches a stationary point in fewer steps than its diagonal (section 2).", judge_fewer_steps
        ),
        Claim("Block RMSprop takes a more stable path (section 2), read as: with less of a detour.", judge_straighter),
    ),
    objective="steps_needed",
    draw=draw_paths,
)
