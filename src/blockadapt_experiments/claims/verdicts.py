"""Judges claims by differences between two arms on the same seeds, and finds the words that carry the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from blockadapt_experiments.results.formats import number
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.summary import Summary

BySeed = Mapping[int, float]
"""One value for each seed."""


def numbers(summary: Summary, arm: str, name: str, variant: str = "") -> BySeed:
    """Return a number that the finished runs of an arm left, by seed."""
    seeds = [run.key.seed for run in summary.of(arm, variant) if run.finished]
    return dict(zip(seeds, summary.number(arm, name, variant).tolist(), strict=True))


def difference(first: BySeed, second: BySeed) -> np.ndarray:
    """Subtract the second from the first, over the seeds that both have."""
    return np.array([first[seed] - second[seed] for seed in first if seed in second])


def log_ratio(first: BySeed, second: BySeed) -> np.ndarray:
    """Compute log(first / second), over the seeds that both have."""
    return np.array([np.log(first[seed] / second[seed]) for seed in first if seed in second])


def is_below_zero(values: np.ndarray) -> bool | None:
    """Tell whether the 95% interval of the mean lies below zero; False if above, None if it does not tell."""
    mean, half = interval(values)
    if mean + half < 0:
        return True
    return False if mean - half > 0 else None


def together(parts: Iterable[bool | None]) -> bool | None:
    """Return True if all parts are, False if one is; None where these runs cannot tell, or there is no part."""
    found = list(parts)
    if False in found:
        return False
    return True if found and None not in found else None


def mean_words(values: Iterable[float] | np.ndarray, unit: str = "") -> str:
    """Write mean and 95% half width, as in `0.123 ± 0.045 points`."""
    mean, half = interval(np.fromiter(values, dtype=np.float64))
    if np.isnan(mean):
        return "an unknown amount"
    unit = f" {unit}" if unit else ""
    return (
        f"{number(mean, 3)} ± {number(half, 2)}{unit}" if np.isfinite(half) else f"{number(mean, 3)}{unit} (one seed)"
    )


def ratio_words(log_ratios: np.ndarray) -> str:
    """Write the geometric mean and its 95% interval, as in `×0.50 (0.40 to 0.63)`."""
    mean, half = interval(log_ratios)
    if np.isnan(mean):
        return "×? (not known)"
    if not np.isfinite(half):
        return f"×{number(np.exp(mean), 3)} (one seed)"
    low, high = number(np.exp(mean - half), 3), number(np.exp(mean + half), 3)
    return f"×{number(np.exp(mean), 3)} ({low} to {high})"
