"""One arm against others: values by seed, and a verdict of several parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from blockadapt_experiments.claims.claim import Verdict
from blockadapt_experiments.claims.verdicts import BySeed, together
from blockadapt_experiments.results.recorded_runs import Run
from blockadapt_experiments.results.summary import Summary, oscillation


class Part(NamedTuple):
    """A comparison with one other arm: whether it went as claimed, and in words."""

    held: bool | None
    words: str


def rivals(summary: Summary, arm: str, others: Sequence[str] | None = None) -> list[str]:
    """The other arms that have a finished run, of these or of all; none if the arm itself has not."""
    chosen = [other for other in summary.arms if other != arm and (others is None or other in others)]
    return [other for other in chosen if _finished(summary, other)] if _finished(summary, arm) else []


def finals(summary: Summary, arm: str, metric: str) -> BySeed:
    """The last value of each run; nan where it diverged, whatever was measured then."""
    return _by_seed(summary, arm, metric, lambda values: float(values[-1]))


def means(summary: Summary, arm: str, metric: str, share: float = 1.0, log: bool = False) -> BySeed:
    """The mean of each run over the first share of its epochs, of logarithms if asked; nan where it diverged."""

    def mean(values: np.ndarray) -> float:
        first = values[: max(1, math.ceil(share * values.size))]
        return float(np.mean(np.log(first) if log else first))

    return _by_seed(summary, arm, metric, mean)


def oscillations(summary: Summary, arm: str, metric: str) -> BySeed:
    """How much each run swings at its end; nan where it diverged."""
    return _by_seed(summary, arm, metric, oscillation)


def verdict(parts: Sequence[Part], lead: str = "") -> Verdict:
    """What the parts say together, after a lead."""
    if not parts:
        return Verdict(None, "The methods that the paper compares did not run together.")
    return Verdict(together(part.held for part in parts), f"{lead}{'; '.join(part.words for part in parts)}.")


def _finished(summary: Summary, arm: str) -> list[Run]:
    return [run for run in summary.of(arm) if run.finished]


def _by_seed(summary: Summary, arm: str, metric: str, statistic: Callable[[np.ndarray], float]) -> BySeed:
    found = {}
    for run in _finished(summary, arm):
        values = run.series(summary.experiment.axis, metric).values
        lost = not values.size or run.diverged(summary.experiment.metrics)
        found[run.key.seed] = math.nan if lost else statistic(values)
    return found
