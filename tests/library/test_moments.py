"""How the statistics of a block move, and how they are stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blockadapt.moments import (
    average,
    first_moment,
    packed_length,
    running_mean,
    statistics_dtype,
    unpack,
    updated_second_moment,
)

STEPS = range(1, 8)


@pytest.mark.parametrize(("beta1", "decay"), [(0.9, 1.0), (0.9, 0.5), (0.5, 0.99), (0.0, 1.0)])
def test_the_first_moment_of_gradients_that_are_all_one_is_one_when_corrected(beta1: float, decay: float) -> None:
    m = 0.0
    for step in STEPS:
        beta, correction = first_moment(beta1, decay, step, bias_correction=True)
        m = beta * m + (1 - beta)
        assert beta == pytest.approx(beta1 * decay ** (step - 1))
        assert m / correction == pytest.approx(1)
        assert first_moment(beta1, decay, step, bias_correction=False) == (beta, 1)


def test_numbers_of_half_precision_are_computed_with_in_full() -> None:
    beta1, decay, beta2 = np.float16(0.9), np.float16(0.99), np.float16(0.999)
    full = first_moment(float(beta1), float(decay), 7, True), running_mean(float(beta2), 7, True)
    assert (first_moment(beta1, decay, 7, True), running_mean(beta2, 7, True)) == full


@pytest.mark.parametrize("beta2", [0.999, 0.5, 0.0])
def test_a_running_mean_of_squares_that_are_all_one_is_one_when_corrected(beta2: float) -> None:
    v = 0.0
    for step in STEPS:
        decay, weight, correction = running_mean(beta2, step, bias_correction=True)
        v = decay * v + weight
        assert (decay, weight) == (beta2, 1 - beta2)
        assert v / correction == pytest.approx(1)
        assert running_mean(beta2, step, bias_correction=False) == (decay, weight, 1)


def test_an_average_counts_every_square_alike() -> None:
    v, squares = 0.0, [4.0, 1.0, 0.0, 9.0, 2.0, 5.0, 7.0]
    for step in STEPS:
        decay, weight, correction = average(step)
        v = decay * v + weight * squares[step - 1]
        assert v / correction == pytest.approx(sum(squares[:step]) / step)


def test_what_a_device_counts_gives_the_numbers_that_the_host_would_give() -> None:
    steps = torch.arange(1.0, 8.0, dtype=torch.float64)
    for by_step in (
        lambda step: first_moment(0.9, 0.5, step, bias_correction=True),
        lambda step: running_mean(0.9, step, bias_correction=True),
        average,
    ):
        for position, column in enumerate(by_step(steps)):
            numbers = torch.as_tensor(column, dtype=torch.float64).expand(len(steps))
            assert numbers.tolist() == pytest.approx([by_step(step)[position] for step in STEPS])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_statistics_have_single_precision_or_double_that_of_a_double_parameter(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert statistics_dtype(torch.empty(2, dtype=dtype)) == expected


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_packed_second_moment_moves_as_the_dense_one(n: int) -> None:
    blocks = 3
    assert packed_length(n) == len(torch.ones(n, n).tril().nonzero())
    packed, dense = torch.zeros(blocks, packed_length(n)).double(), torch.zeros(blocks, n, n).double()
    for _ in STEPS:
        g, decay, weight = (
            torch.randn(blocks, n).double(),
            torch.rand(blocks, 1).double(),
            torch.rand(blocks, 1).double(),
        )
        packed = updated_second_moment(packed, g, decay, weight)
        dense = decay[..., None] * dense + weight[..., None] * g[:, :, None] * g[:, None, :]
    torch.testing.assert_close(unpack(packed, n), dense)
    rows, columns = torch.tril_indices(n, n)
    torch.testing.assert_close(packed, dense[:, rows, columns])  # the lower triangle by rows
