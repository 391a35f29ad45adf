"""The bounds of the effective spectrum over time."""

from __future__ import annotations

import pytest
import torch

from blockadapt import SpectrumClip
from blockadapt.spectrum import resolution_of


@pytest.mark.parametrize(("lr", "momentum"), [(0.1, 0.9), (0.02, 0.0), (1.0, 0.99)])
@pytest.mark.parametrize(("steps", "adaptive"), [(10_000, 1.0), (400, 0.25)])
def test_a_clip_like_sgd_is_within_a_factor_of_two_of_it_after_the_adaptive_share(
    lr: float, momentum: float, steps: int, adaptive: float
) -> None:
    clip = SpectrumClip.like_sgd(lr, momentum=momentum, steps=steps, adaptive=adaptive)
    target = lr / (1 - momentum)
    lower, upper = clip.bounds(round(adaptive * steps))
    assert (lower, upper) == pytest.approx((target / 2, 2 * target))
    earlier_lower, earlier_upper = clip.bounds(round(adaptive * steps) - 1)
    assert earlier_lower < lower < upper < earlier_upper


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "`lr` must be a finite number > 0, got 0"),
        ({"momentum": 1}, r"`momentum` must be in \[0, 1\), got 1"),
        ({"steps": 0}, "`steps` must be an integer >= 1, got 0"),
        ({"adaptive": 0}, r"`adaptive` must be in \(0, 1\], got 0"),
        ({"adaptive": 1.5}, r"`adaptive` must be in \(0, 1\], got 1.5"),
    ],
    ids=str,
)
def test_a_clip_like_an_impossible_sgd_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^SpectrumClip\.like_sgd: {message}\.$"):
        SpectrumClip.like_sgd(**{"lr": 0.1, "steps": 10, **options})


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 1.0])
def test_an_interval_closes_exactly_where_its_ends_are_within_a_hundredth(gamma: float) -> None:
    clip = SpectrumClip(final_lr=0.3, gamma=gamma)
    steps = range(1, round(250 / gamma) + 2, max(1, round(0.1 / gamma)))
    for step in steps:
        lower, upper = clip.bounds(step)
        if abs(upper / lower - 1.01) > 1e-9:
            assert clip.is_closed(step) == (upper / lower - 1 < 1e-2)
    assert not clip.is_closed(round(200 / gamma))
    assert clip.is_closed(round(201 / gamma))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_resolution_is_the_largest_share_that_rounding_loses(dtype: torch.dtype) -> None:
    one, share = torch.ones((), dtype=dtype), resolution_of(dtype)
    assert one + share == one
    assert one + 1.001 * share > one
