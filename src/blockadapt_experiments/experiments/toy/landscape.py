"""Runs `toy-landscape`: the loss of the toy network over two weights, all others at their true values.

The arms are no optimizers but kinds of pairs: two weights of one layer from the same input neuron, or two weights of
different layers. Each run takes all pairs of its kind, on a grid around the true values, and the exact Hessian H [2, 2]
at every point. "Dynamic curvature" is not defined in the paper; here it is measured in three ways:

    coupling     |h₁₂| / (|h₁₂| + √|h₁₁ h₂₂|), which is r / (1 + r) for the ratio r = |h₁₂| / √|h₁₁ h₂₂|: 0 where the
                 weights do not interact, ½ where h₁₂ is as large as the curvature itself. r has no mean: h₁₁ may vanish
    condition    log₁₀ of |λ|max / |λ|min; a flat direction counts as 10⁶
    change       ‖H − mean H‖ over the grid, root mean square: how much the curvature moves; and as a share of ‖H‖

Where the loss is flat in both directions, because units are dead, there is neither coupling nor condition, and where it
is flat in one there is no coupling; such points are left out of the means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockadapt.validation import require, require_choice, require_integer, require_number
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.verdicts import difference, is_below_zero, mean_words, numbers, together
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.experiments.toy.drawing import draw_landscapes
from blockadapt_experiments.experiments.toy.network import (
    Array,
    Pair,
    Problem,
    ToySettings,
    different_layers_pairs,
    draw_problem,
    pair_hessian,
    same_layer_pairs,
    square,
    with_pair,
)
from blockadapt_experiments.results.measurements import Metric, Outcome, Row, RunKey
from blockadapt_experiments.results.summary import Summary

SAME, DIFFERENT = "same-layer", "different-layers"
PAIRS = {SAME: same_layer_pairs, DIFFERENT: different_layers_pairs}

FLAT = 1e-12
"""A Hessian with no larger entry is zero."""

LARGEST_CONDITION = 1e6


@dataclass(frozen=True, kw_only=True)
class LandscapeSettings(ToySettings):
    """Holds the settings of `toy-landscape`; `optimizers` are the kinds of pairs.

    Attributes:
        points: Of the grid along each weight; odd, so that the true values are one of them.
        reach: How far the grid goes to each side of the true values.
    """

    points: int
    reach: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.optimizers:
            require_choice("settings", "optimizers", name, tuple(PAIRS))
        require_integer("settings", "points", self.points, least=3)
        require(self.points % 2 == 1, "settings", "points", "odd", self.points)
        require_number("settings", "reach", self.reach, above=0)


class Surface(NamedTuple):
    """Holds the loss over one pair, and its curvature; [points, points] each."""

    loss: Array
    off_diagonal: Array
    coupling: Array
    ratio: Array
    condition: Array
    change: float
    change_share: float

    @property
    def optimum(self) -> tuple[np.intp, ...]:
        """Return the point of the least loss."""
        return np.unravel_index(np.argmin(self.loss), self.loss.shape)

    @property
    def truth(self) -> tuple[int, int]:
        """Return the point of the true values."""
        return (self.loss.shape[0] // 2, self.loss.shape[1] // 2)


def surface(problem: Problem, pair: Pair, reach: float, points: int) -> Surface:
    """Measure one landscape."""
    weights = with_pair(problem.truth, pair, square(problem.truth[pair], reach, points))
    H = pair_hessian(problem, weights, pair)
    coupling, ratio = couplings(H)
    squares = float((H**2).sum(axis=(-1, -2)).mean())
    change = float(((H - H.mean(axis=(0, 1))) ** 2).sum(axis=(-1, -2)).mean())
    share = change / squares if squares > 0 else np.nan
    return Surface(problem.loss(weights), np.abs(H[..., 0, 1]), coupling, ratio, condition(H), np.sqrt(change), share)


def couplings(H: Array) -> tuple[Array, Array]:
    """Compute coupling and ratio […] of Hessians […, 2, 2]; nan where the loss is flat in a direction."""
    interaction, curvature = np.abs(H[..., 0, 1]), np.sqrt(np.abs(H[..., 0, 0] * H[..., 1, 1]))
    flat = np.abs(H).max(axis=(-1, -2)) <= FLAT
    with np.errstate(invalid="ignore", divide="ignore"):
        coupling, ratio = interaction / (interaction + curvature), interaction / curvature
    return np.where(flat, np.nan, coupling), np.where(flat, np.nan, ratio)


def condition(H: Array) -> Array:
    """Compute log₁₀ of the condition number […]; nan where the loss is flat."""
    size = np.sort(np.abs(np.linalg.eigvalsh(H)), axis=-1)
    least = np.maximum(size[..., 0], size[..., 1] / LARGEST_CONDITION)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size[..., 1] <= FLAT, np.nan, np.log10(size[..., 1] / least))


class LandscapeTask:
    """Draws up all landscapes of one kind for one problem. A second or a few, so it is one leg and has no state."""

    legs = 1

    def __init__(self, settings: LandscapeSettings, key: RunKey) -> None:
        self._settings = settings
        self._problem = draw_problem(np.random.default_rng([key.seed, 0]), settings)
        self._pairs = PAIRS[key.arm](self._problem)

    @cached_property
    def _surfaces(self) -> list[Surface]:
        return [surface(self._problem, pair, self._settings.reach, self._settings.points) for pair in self._pairs]

    def advance(self) -> Sequence[Row]:
        """Measure means over all pairs, along squares of growing distance from the true values."""
        middle = self._settings.points // 2
        away = np.abs(np.arange(self._settings.points) - middle)
        ring = np.maximum(away[:, None], away[None, :])
        rows = []
        for distance in range(middle + 1):
            row = {"distance": self._settings.reach * distance / middle}
            for key in ("loss", "off_diagonal", "coupling", "condition"):
                value = _mean([getattr(surface, key)[ring == distance] for surface in self._surfaces])
                if np.isfinite(value):
                    row[key] = value
            rows.append(row)
        return rows

    def outcome(self) -> Outcome:
        """Return means over all pairs at the true values, at the least loss and over the grid; and one landscape."""
        surfaces = self._surfaces
        found = {"pairs": float(len(surfaces))}
        for name in ("coupling", "condition", "off_diagonal"):
            fields = [(getattr(surface, name), surface) for surface in surfaces]
            found[f"{name}_truth"] = _mean([field[surface.truth] for field, surface in fields])
            found[f"{name}_optimum"] = _mean([field[surface.optimum] for field, surface in fields])
            found[f"{name}_grid"] = _mean([_mean([field]) for field, _ in fields])
        found["ratio_truth"] = _median([surface.ratio[surface.truth] for surface in surfaces])
        found["change"] = _mean([surface.change for surface in surfaces])
        found["change_share"] = _mean([surface.change_share for surface in surfaces])
        shown = _typical([surface.coupling[surface.truth] for surface in surfaces])
        arrays = {
            "loss": surfaces[shown].loss,
            "centre": self._problem.truth[self._pairs[shown]],
            "edges": np.array([str(self._problem.edges[i]) for i in self._pairs[shown]]),
        }
        return Outcome(found, arrays)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what is left to say is computed anew."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is nothing to continue from."""


def _mean(values: Sequence[Any]) -> float:
    """Take the mean of all that are no nan; nan if there are none."""
    flat = np.concatenate([np.ravel(value) for value in values])
    known = flat[~np.isnan(flat)]
    return float(known.mean()) if known.size else np.nan


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.median(known)) if known else np.nan


def _typical(couplings: Sequence[float]) -> int:
    """Choose the pair with the median coupling: neither the tamest nor the wildest landscape is shown."""
    order = np.argsort(couplings)  # nan last
    known = max(1, int(np.count_nonzero(~np.isnan(couplings))))
    return int(order[known // 2])


def _variants(settings: LandscapeSettings) -> Sequence[str]:
    return [""]


def _task(settings: LandscapeSettings, key: RunKey, lr: float, data: Path | None, tuning: bool) -> LandscapeTask:
    return LandscapeTask(settings, key)


PLACES = {"truth": "at the true weights", "optimum": "at the least loss", "grid": "over the grid"}
"""Where a landscape is measured, by the end of a number's name."""


def _judge(summary: Summary, names: dict[str, str]) -> Verdict:
    """Judge whether each of these numbers is larger for pairs of the same layer."""
    parts, words = [], []
    for name, where in names.items():
        same, different = (numbers(summary, arm, name) for arm in (SAME, DIFFERENT))
        parts.append(is_below_zero(difference(different, same)))
        gap = mean_words(difference(same, different))
        values = f"{mean_words(same.values())} against {mean_words(different.values())}"
        words.append(f"{where} {values}, difference {gap}")
    return Verdict(together(parts), "; ".join(words))


def judge_coupling(summary: Summary) -> Verdict:
    """Judge whether two weights of the same layer interact more."""
    held, words = _judge(summary, {f"coupling_{place}": where for place, where in PLACES.items()})
    medians = " and ".join(mean_words(numbers(summary, arm, "ratio_truth").values()) for arm in (SAME, DIFFERENT))
    return Verdict(
        held,
        f"Coupling |h₁₂| / (|h₁₂| + √|h₁₁h₂₂|), same layer against different layers: {words}. "
        f"Median of |h₁₂| / √|h₁₁h₂₂| at the true weights: {medians}.",
    )


def judge_condition(summary: Summary) -> Verdict:
    """Judge whether two weights of the same layer are worse conditioned."""
    held, words = _judge(summary, {f"condition_{place}": where for place, where in PLACES.items()})
    return Verdict(held, f"log₁₀ of the condition number, same layer against different layers: {words}.")


def judge_change(summary: Summary) -> Verdict:
    """Judge whether the Hessian changes more over the landscape of two weights of the same layer."""
    held, words = _judge(summary, {"change": "root mean square", "change_share": "as a share of the curvature"})
    return Verdict(held, f"Change of the Hessian over the grid, same layer against different layers: {words}.")


_CLAIM = (
    "The loss over two weights of the same layer has a much more dynamic curvature than over two of different layers "
    "(section 2, figure 2)"
)

TOY_LANDSCAPE = Experiment(
    name="toy-landscape",
    title="The loss over two weights of the toy network: same layer against different layers",
    section="Section 2, figure 2",
    config=LandscapeSettings,
    axis="distance",
    metrics=(
        Metric("coupling", "coupling |h₁₂| / (|h₁₂| + √|h₁₁h₂₂|)", better=None),
        Metric("condition", "log₁₀ of the condition number", better=None),
        Metric("off_diagonal", "|h₁₂|", better=None),
        Metric("loss", "loss", better=None),
    ),
    variants=_variants,
    task=_task,
    claims=(
        Claim(f"{_CLAIM}, read as: they interact more.", judge_coupling),
        Claim(f"{_CLAIM}, read as: it is worse conditioned.", judge_condition),
        Claim(f"{_CLAIM}, read as: it changes more from place to place.", judge_change),
    ),
    draw=draw_landscapes,
)
