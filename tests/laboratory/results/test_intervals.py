"""Means and intervals over seeds, against a printed table."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the `experiments` extra")

from blockadapt_experiments.results.intervals import interval

# Student's t at 0.975, from a printed table: for 1, 2, 3, 4, 9 and 19 degrees of freedom.
T = {2: 12.7062, 3: 4.3027, 4: 3.1824, 5: 2.7764, 10: 2.2622, 20: 2.0930}


@pytest.mark.parametrize("count", T)
def test_interval_is_students(count: int) -> None:
    values = np.random.default_rng(count).normal(3, 2, count)
    mean, half = interval(values)
    spread = math.sqrt(sum((value - sum(values) / count) ** 2 for value in values) / (count - 1))
    assert mean == pytest.approx(sum(values) / count, rel=1e-14)
    assert half == pytest.approx(T[count] * spread / math.sqrt(count), rel=2e-5)


def test_interval_covers_the_truth_in_95_of_100_cases() -> None:
    samples = np.random.default_rng(0).normal(7, 3, (4000, 4))
    hits = sum(abs(mean - 7) <= half for mean, half in map(interval, samples))
    assert abs(hits / 4000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_values_that_are_all_alike_have_no_width() -> None:
    assert interval([0.680712] * 3) == (0.680712, 0.0)


def test_one_seed_has_no_interval_and_a_diverged_one_no_mean() -> None:
    mean, half = interval([2.5])
    assert mean == 2.5
    assert math.isnan(half)
    for values in ([], [1.0, math.nan], [1.0, math.inf]):
        assert all(map(math.isnan, interval(values)))
