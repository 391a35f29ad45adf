"""The toy network's loss and derivatives are autograd's; its problems and pairs are as documented."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from blockadapt_experiments.experiments.toy.network import (
    different_layers_pairs,
    same_layer_pairs,
    square,
    with_pair,
)
from support.toy import problem, torch_loss


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rows", [slice(None), [3], [0, 8, 4, 2, 9]])
def test_loss_and_gradient_are_those_of_autograd(biases: bool, rows: Any) -> None:
    for seed in range(8):
        drawn = problem(seed, biases=biases)
        weights = np.random.default_rng(100 + seed).standard_normal(drawn.truth.size)
        flat = torch.tensor(weights, requires_grad=True)
        value = torch_loss(drawn, biases, rows)(flat)
        value.backward()
        np.testing.assert_allclose(drawn.gradient(weights, rows), flat.grad, rtol=1e-12, atol=1e-15)
        if rows == slice(None):
            np.testing.assert_allclose(drawn.loss(weights), value.item(), rtol=1e-14)


@pytest.mark.parametrize("biases", [False, True])
def test_hessian_is_that_of_autograd(biases: bool) -> None:
    for seed in range(8):
        drawn = problem(seed, biases=biases)
        weights = np.random.default_rng(100 + seed).standard_normal(drawn.truth.size)
        expected = torch.autograd.functional.hessian(torch_loss(drawn, biases), torch.from_numpy(weights))
        np.testing.assert_allclose(drawn.hessian(weights), expected, rtol=1e-11, atol=1e-15)


def test_a_grid_of_weights_gives_what_each_gives_alone() -> None:
    drawn = problem()
    grid = with_pair(drawn.truth, [1, 7], square(drawn.truth[[1, 7]], 2.0, 5))
    assert grid.shape == (5, 5, 10)
    np.testing.assert_array_equal(grid[2, 2], drawn.truth)
    assert grid[4, 0, 1] == drawn.truth[1] + 2.0
    assert grid[4, 0, 7] == drawn.truth[7] - 2.0
    for function in (drawn.loss, drawn.gradient, drawn.hessian):
        alone = np.array([[function(point) for point in row] for row in grid])
        np.testing.assert_allclose(function(grid), alone, rtol=1e-13, atol=1e-16)


def test_a_problem_has_live_units_and_both_labels() -> None:
    for seed in range(50):
        drawn = problem(seed)
        W1, W2 = drawn.truth[:4].reshape(2, 2), drawn.truth[4:8].reshape(2, 2)
        h1 = np.maximum(drawn.inputs @ W1.T, 0)
        assert (h1.max(axis=0) > 0).all()
        assert ((h1 @ W2.T).max(axis=0) > 0).all()
        assert set(drawn.labels) == {0.0, 1.0}
        np.testing.assert_array_equal(drawn.truth, problem(seed).truth)


def test_with_p_itself_for_labels_the_truth_is_stationary() -> None:
    drawn = problem(labels="probability", biases=True)
    np.testing.assert_allclose(drawn.gradient(drawn.truth), 0, atol=1e-17)
    assert np.linalg.eigvalsh(drawn.hessian(drawn.truth))[0] > -1e-15


@pytest.mark.parametrize(("biases", "same", "different"), [(False, 4, 32), (True, 6, 72)])
def test_pairs_are_all_of_their_kind(biases: bool, same: int, different: int) -> None:
    drawn = problem(biases=biases)
    width = 3 if biases else 2
    layer = [0] * 2 * width + [1] * 2 * width + [2] * width
    pairs = {"same": same_layer_pairs(drawn), "different": different_layers_pairs(drawn)}
    assert pairs["different"] == [[i, j] for i, j in combinations(range(len(layer)), 2) if layer[i] != layer[j]]
    assert pairs["same"] == [[i, i + width] for i in [*range(width), *range(2 * width, 3 * width)]]
    assert (len(pairs["same"]), len(pairs["different"])) == (same, different)
    assert [str(drawn.edges[i]) for i in pairs["same"][1]] == ["W1[0,1]", "W1[1,1]"]
