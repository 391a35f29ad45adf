"""The optimizers on a point follow the paper's equations."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from blockadapt_experiments.contenders.catalogue import OptimizerSettings, make_optimizer
from blockadapt_experiments.experiments.toy.adagrad import (
    draw_batches,
)
from blockadapt_experiments.experiments.toy.descent import Descent
from blockadapt_experiments.experiments.toy.trajectories import (
    draw_landscape,
)
from support.toy import problem, trajectory_settings

Array = NDArray[np.float64]


def inverse_root(V: Array, δ: float) -> Array:
    λ, U = np.linalg.eigh(V)
    return (U / (np.sqrt(np.maximum(λ, 0)) + δ)) @ U.T


@pytest.mark.parametrize("arm", ["adagrad", "full-adagrad"])
def test_adagrad_is_the_papers_sum_of_outer_products(arm: str) -> None:
    """G ← G + g gᵀ; x ← x − α (G^{1/2} + δI)^{-1} g, with only the diagonal of G for the diagonal version."""
    drawn, α, δ = problem(3), 0.1, 1e-2  # a large δ, so that δ√t in its place would show
    x = np.random.default_rng(0).standard_normal(10)
    descent = Descent(x, partial(make_optimizer, arm, lr=α, settings=OptimizerSettings(eps=δ)), steps=300)
    batches = draw_batches(np.random.default_rng(1), 300, 10, 5)
    G = np.zeros((10, 10))
    for batch in batches:
        g = drawn.gradient(x, batch)
        np.testing.assert_allclose(descent.x, x, rtol=1e-8, atol=1e-10)
        descent.step(drawn.gradient(descent.x, batch))
        G += np.outer(g, g)
        x = x - α * inverse_root(G if arm == "full-adagrad" else np.diag(np.diag(G)), δ) @ g
    assert descent.taken == 300


@pytest.mark.parametrize("arm", ["rmsprop", "block-rmsprop"])
def test_rmsprop_has_one_block_over_both_weights(arm: str) -> None:
    settings = trajectory_settings()
    landscape = draw_landscape(0, settings)
    x, V = landscape.centre + np.array([0.7, -0.4]), np.zeros((2, 2))
    descent = Descent(x, partial(settings.make_optimizer, arm, lr=1e-2), steps=100)
    for _ in range(100):
        g = landscape.gradient(x)
        descent.step(landscape.gradient(descent.x))
        V = 0.99 * V + 0.01 * np.outer(g, g)
        x = x - 1e-2 * inverse_root(V if arm == "block-rmsprop" else np.diag(np.diag(V)), 1e-4) @ g
        np.testing.assert_allclose(descent.x, x, rtol=1e-9)
