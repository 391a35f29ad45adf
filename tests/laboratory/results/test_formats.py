"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from blockadapt_experiments.results import formats


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (98.2, 0.2512, "98.20 ± 0.25"),
        (-0.5, 0.1, "−0.50 ± 0.10"),
        (12345.6, 678.0, "12,346 ± 678"),
        (1.5e-6, 2.1e-7, "(1.50 ± 0.21)e-6"),
        (3.0e9, 4.0e7, "(3.000 ± 0.040)e9"),
        (5.0, 0.0, "5"),
        (0.0, math.nan, "0"),
        (math.nan, math.nan, "–"),
        (math.inf, math.nan, "∞"),
    ],
)
def test_estimates_are_written_with_the_digits_that_they_have(mean: float, half: float, text: str) -> None:
    assert formats.estimate(mean, half) == text
