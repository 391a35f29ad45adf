"""Computes means over seeds and their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Compute the mean and the half width of its 95% interval, by Student's t over seeds: t₀.₉₇₅(n−1) · s/√n.

    The half width of one value is nan. A value that is not finite makes both nan: a mean of the seeds that survived
    would flatter. Who wants it all the same leaves the others out.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        return math.nan, math.nan
    mean, half, _ = intervals(array[:, np.newaxis])
    return float(mean[0]), float(half[0])


def intervals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute mean, half width and count of each column of [seeds, points], over its finite values."""
    finite = np.isfinite(values)
    count = finite.sum(axis=0)
    # A column that overflows, or holds too few values, comes out as inf or nan, which says it.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # Counted from one of the values: equal ones then have a spread of 0, and not what rounding leaves of it.
        largest = np.where(finite, values, -np.inf).max(axis=0, initial=-np.inf)
        apart = np.where(finite, values - largest, 0.0)
        mean = apart.sum(axis=0) / count
        variance = (np.where(finite, apart - mean, 0.0) ** 2).sum(axis=0) / (count - 1)
        half = stdtrit(np.maximum(count - 1, 1), 0.975) * np.sqrt(variance / count)
    return largest + mean, half, count
