"""Compares one arm against others: values by seed, and a verdict of several parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from blockadapt_experiments.claims.claim import Verdict
from blockadapt_experiments.claims.verdicts import BySeed, difference, is_below_zero, mean_words, together
from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.results.recorded_runs import Run
from blockadapt_experiments.results.summary import Summary, oscillation


class Part(NamedTuple):
    """Is a comparison with one other arm: whether it went as claimed, and in words."""

    held: bool | None
    words: str


def rivals(summary: Summary, arm: str, others: Sequence[str] | None = None) -> list[str]:
    """List the others that have a finished run, of these or of all optimizers; none if the arm itself has none.

    An arm with settings of its own is none of them: no claim is about it.
    """
    chosen = [other for other in summary.arms if other != arm and other in (CONTENDERS if others is None else others)]
    return [other for other in chosen if _finished(summary, other)] if _finished(summary, arm) else []


def finals(summary: Summary, arm: str, metric: str, variant: str = "") -> BySeed:
    """Return the last value of each run; nan where it diverged, whatever was measured then."""
    return _by_seed(summary, arm, metric, lambda values: float(values[-1]), variant)


class Side(NamedTuple):
    """Is one side of a comparison: an arm in a variant."""

    arm: str
    variant: str = ""


class EqualTime(NamedTuple):
    """Holds two sides by seed when the faster was done: their values, and how much of the axis each had covered."""

    first: BySeed
    second: BySeed
    shares: tuple[float, float]


def at_equal_time(summary: Summary, first: Side, second: Side, metric: str) -> EqualTime:
    """Return the last value that each of two sides had measured when the faster of them, at the same seed, was done."""
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    shares: tuple[list[float], list[float]] = ([], [])
    runs = [{run.key.seed: run for run in _finished(summary, *side)} for side in (first, second)]
    for seed in runs[0].keys() & runs[1].keys():
        pair = [run[seed].series(summary.experiment.axis, metric) for run in runs]
        lost = any(run[seed].diverged(summary.experiment.metrics) for run in runs)
        if any(not series.x.size or not np.isfinite(series.seconds).all() for series in pair):
            continue
        end = min(series.seconds[-1] for series in pair)
        for values, covered, series in zip(found, shares, pair, strict=True):
            done = series.until(end)
            values[seed] = float(done.values[-1]) if done.x.size and not lost else math.nan
            covered.append(float(done.x[-1] / series.x[-1]) if done.x.size else 0.0)
    means = [float(np.mean(covered)) if covered else math.nan for covered in shares]
    return EqualTime(*found, (means[0], means[1]))


def means(summary: Summary, arm: str, metric: str, share: float = 1.0, log: bool = False) -> BySeed:
    """Return the mean of each run over the first share of its epochs, of logarithms if asked; nan where it diverged."""

    def mean(values: np.ndarray) -> float:
        first = values[: max(1, math.ceil(share * values.size))]
        return float(np.mean(np.log(first) if log else first))

    return _by_seed(summary, arm, metric, mean)


def oscillations(summary: Summary, arm: str, metric: str) -> BySeed:
    """Return how much each run swings at its end; nan where it diverged."""
    return _by_seed(summary, arm, metric, oscillation)


def verdict(parts: Sequence[Part], lead: str = "") -> Verdict:
    """Return what the parts say together, after a lead."""
    if not parts:
        return Verdict(None, "The methods that the paper compares did not run together.")
    return Verdict(together(part.held for part in parts), f"{lead}{'; '.join(part.words for part in parts)}.")


class Measure(NamedTuple):
    """Says what two arms are compared by: a metric of which less is better, its name and the unit of a difference."""

    metric: str
    name: str
    unit: str


def judge_ends(summary: Summary, ours: str, others: Sequence[str] | None, measure: Measure) -> Verdict:
    """Judge whether one arm ends lower than each of these others, or than all; by runs of the same seed."""
    parts = []
    for other in rivals(summary, ours, others):
        apart = difference(*(finals(summary, arm, measure.metric) for arm in (ours, other)))
        parts.append(Part(is_below_zero(apart), f"{mean_words(apart, measure.unit)} against {summary.label(other)}"))
    return verdict(parts, f"{measure.name} of {summary.label(ours)} at the end: ")


def judge_equal_time(summary: Summary, ours: str, measure: Measure) -> Verdict:
    """Judge whether one arm is lower than each of the others when the faster of the two is done."""
    parts = []
    for other in rivals(summary, ours):
        then = at_equal_time(summary, Side(ours), Side(other), measure.metric)
        apart = difference(then.first, then.second)
        done = f"{' and '.join(f'{share:.0%}' for share in then.shares)} of the {summary.experiment.axis}s done"
        words = f"{mean_words(apart, measure.unit)} against {summary.label(other)} ({done})"
        parts.append(Part(is_below_zero(apart), words))
    return verdict(parts, f"{measure.name} of {summary.label(ours)}: ")


def _finished(summary: Summary, arm: str, variant: str = "") -> list[Run]:
    return [run for run in summary.of(arm, variant) if run.finished]


def _by_seed(
    summary: Summary, arm: str, metric: str, statistic: Callable[[np.ndarray], float], variant: str = ""
) -> BySeed:
    found = {}
    for run in _finished(summary, arm, variant):
        values = run.series(summary.experiment.axis, metric).values
        lost = not values.size or run.diverged(summary.experiment.metrics)
        found[run.key.seed] = math.nan if lost else statistic(values)
    return found
