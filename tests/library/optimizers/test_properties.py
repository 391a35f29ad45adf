"""What holds for any numbers: finite stays finite, the clip bounds the operator, order is nothing, steps are short."""

from __future__ import annotations

import copy
import ctypes
import math
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from blockadapt import (
    BlockAdaFom,
    BlockAdagrad,
    BlockAdam,
    BlockRMSprop,
    NonFiniteGradientError,
    SpectrumClip,
)
from blockadapt.optimizers import BlockOptimizer
from support.cases import PER_PARAMETER_GROUPINGS, each_backend
from support.contract_cases import CLASSES, CLOSING, STEPS_TO_CLOSE, bits, run

quick = settings(derandomize=True, deadline=None, max_examples=40)

seeds = st.integers(0, 2**32 - 1)


# Finite stays finite -----------------------------------------------------------------------------------------------


@each_backend
@quick
@given(
    cls=st.sampled_from(CLASSES),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    exponents=st.lists(st.integers(-45, 17), min_size=1, max_size=6),
    spread=st.sampled_from([0, 3, 20]),
    clip=st.sampled_from([None, SpectrumClip(0.1, 1e-3), SpectrumClip(0.1, 50.0)]),
    refresh_every=st.sampled_from([1, 2]),
    eps=st.sampled_from([1e-30, 1e-8, 1e-4]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    block_size=st.sampled_from([1, 2, 5, 10, 33, 70]),
    magnitude=st.integers(-30, 30),
    rate=st.integers(-8, 1),
    seed=seeds,
)
def test_finite_input_gives_finite_parameters_and_state(
    cls: type[BlockOptimizer],
    dtype: torch.dtype,
    exponents: list[int],
    spread: int,
    clip: SpectrumClip | None,
    refresh_every: int,
    eps: float,
    weight_decay: float,
    block_size: int,
    magnitude: int,
    rate: int,
    seed: int,
    backend: str,
) -> None:
    """|x| below 1e-30 … 1e30, |g| from 1e-65 up to the limit of 2.9e17, δ ≥ 1e-30, lr from 1e-8 to 10."""
    rng = np.random.default_rng(seed)
    weight = nn.Parameter(torch.from_numpy(rng.uniform(-1, 1, 140) * 10.0**magnitude).to(dtype))
    optimizer = cls(
        [weight],
        lr=10.0**rate,
        eps=eps,
        weight_decay=weight_decay,
        clip=clip,
        refresh_every=refresh_every,
        grouping="chunk",
        block_size=block_size,
        backend=backend,
    )
    for exponent in exponents:
        scales = 2.8 * 10.0 ** np.clip(exponent + rng.integers(-spread, spread + 1, 140), -65, 17)
        weight.grad = torch.from_numpy(rng.uniform(-1, 1, 140) * scales).to(dtype)
        with suppress(NonFiniteGradientError) if weight_decay * weight.abs().max() > 1e16 else nullcontext():
            optimizer.step()
        assert weight.isfinite().all()
        for name, value in optimizer.state[weight].items():
            assert value.isfinite().all(), name


# The applied operator ----------------------------------------------------------------------------------------------


def operator(optimizer: BlockAdam, weight: Tensor, n: int) -> Tensor:
    """S in x ← x − S m at the next step, found by steps of copies whose first moment becomes each unit vector.

    m ← β₁ m + (1 − β₁) g is eᵢ for m = (eᵢ − (1 − β₁) g) / β₁, whatever the gradient g that all of them share.
    """
    columns = []
    grad = torch.linspace(-1, 1, n, dtype=torch.float64)
    for i in range(n):
        params, stepped = copy.deepcopy(([weight], optimizer))
        (x,) = params
        beta = stepped.param_groups[0]["betas"][0]
        unit = torch.zeros(n, dtype=torch.float64)
        unit[i] = 1
        stepped.state[x]["exp_avg"].copy_((unit - (1 - beta) * grad) / beta)
        x.data.zero_()
        x.grad = grad
        stepped.step()
        columns.append(-x.detach())
    return torch.stack(columns, dim=1)


@each_backend
@quick
@given(
    n=st.integers(1, 12),
    steps=st.integers(1, 12),
    clip=st.builds(SpectrumClip, st.sampled_from([1e-3, 0.1, 2.0]), st.sampled_from([0.01, 0.3, 5.0])),
    amsgrad=st.booleans(),
    bias_correction=st.booleans(),
    refresh_every=st.sampled_from([1, 3]),
    scale=st.sampled_from([1e-8, 1e-2, 1.0, 1e3]),
    schedule=st.sampled_from([1.0, 0.1, 3.0]),
    seed=seeds,
)
def test_the_operator_s_eigenvalues_lie_in_the_clip_s_interval(
    n: int,
    steps: int,
    clip: SpectrumClip,
    amsgrad: bool,
    bias_correction: bool,
    refresh_every: int,
    scale: float,
    schedule: float,
    seed: int,
    backend: str,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.zeros(n, dtype=torch.float64))
    optimizer = BlockAdam(
        [weight],
        lr=0.01,
        betas=(0.5, 0.99),
        clip=clip,
        amsgrad=amsgrad,
        bias_correction=bias_correction,
        refresh_every=refresh_every,
        grouping="tensor",
        backend=backend,
    )
    optimizer.param_groups[0]["lr"] = 0.01 * schedule
    for _ in range(steps):
        weight.grad = scale * torch.randn(n, generator=generator, dtype=torch.float64)
        optimizer.step()
    S = operator(optimizer, weight, n)
    assert torch.allclose(S, S.mT, atol=1e-7 * float(S.abs().max()))
    t, target = steps + 1, clip.final_lr * min(schedule, 1.0)  # a higher lr is the new peak
    lower, upper = target * (1 - 1 / (clip.gamma * t + 1)), target * (1 + 1 / (clip.gamma * t))
    eigenvalues = torch.linalg.eigvalsh((S + S.mT) / 2)
    assert float(eigenvalues.min()) >= lower * (1 - 1e-7)
    assert float(eigenvalues.max()) <= upper * (1 + 1e-7)


# Order -------------------------------------------------------------------------------------------------------------

SHAPES = [(5, 3), (7,), (4, 4), (), (2, 3, 2, 2), (70, 3), (3, 2, 1)]


def trained(order: list[int], in_groups: bool, cls: type[BlockOptimizer], options: dict[str, Any]) -> list[bytes]:
    """The parameters, in the order of `SHAPES`, after training in another order."""
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    given = [params[i] for i in order]
    optimizer = cls([{"params": [p]} for p in given] if in_groups else given, lr=0.05, **options)
    for _ in range(6):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [bits(param) for param in params]


@each_backend
@settings(quick, max_examples=15)
@given(
    order=st.permutations(range(len(SHAPES))),
    in_groups=st.booleans(),
    cls=st.sampled_from(CLASSES),
    grouping=st.sampled_from([name for name in PER_PARAMETER_GROUPINGS if name != "filter"]),
    refresh_every=st.sampled_from([1, 3]),
    clip=st.sampled_from([None, SpectrumClip(0.1, 0.1), CLOSING]),
)
def test_the_order_of_parameters_and_groups_changes_no_bit(
    order: list[int],
    in_groups: bool,
    cls: type[BlockOptimizer],
    grouping: str,
    refresh_every: int,
    clip: SpectrumClip | None,
    backend: str,
) -> None:
    options = {
        "grouping": grouping,
        "block_size": 3,
        "refresh_every": refresh_every,
        "clip": clip,
        "backend": backend,
    }
    assert trained(order, in_groups, cls, options) == trained([*range(len(SHAPES))], False, cls, options)


# The bound on a step -----------------------------------------------------------------------------------------------


def longest_allowed(a: list[float], b: list[float]) -> float:
    """c = √(Σ aₖ²/bₖ) for m = Σ aₖ gₖ and V = Σ bₖ gₖgₖᵀ: no block steps further than c α (docs/math.md)."""
    return math.sqrt(sum(x * x / y for x, y in zip(a, b, strict=True) if x))


METHODS: dict[str, tuple[type[BlockOptimizer], float, float | None]] = {
    "adam": (BlockAdam, 0.9, 0.999),
    "rmsprop": (BlockRMSprop, 0.0, 0.99),
    "adagrad": (BlockAdagrad, 0.0, None),
    "adafom": (BlockAdaFom, 0.9, None),
}


@each_backend
@quick
@given(
    method=st.sampled_from(sorted(METHODS)),
    exponents=st.lists(st.integers(-6, 6), min_size=1, max_size=15),
    n=st.sampled_from([1, 2, 7, 16, 40]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=seeds,
)
def test_no_block_steps_further_than_the_bound(
    method: str, exponents: list[int], n: int, dtype: torch.dtype, seed: int, backend: str
) -> None:
    """Whatever the sizes of successive gradients, to the factor of two that rounding is given in docs/math.md."""
    cls, beta1, beta2 = METHODS[method]
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.zeros(8 * n, dtype=dtype))
    options = {"bias_correction": False} if cls is BlockAdam else {}
    optimizer = cls([weight], lr=1e-3, grouping="chunk", block_size=n, backend=backend, **options)
    for t, exponent in enumerate(exponents, start=1):
        weight.data.zero_()
        weight.grad = 10.0**exponent * torch.randn(8 * n, generator=generator, dtype=dtype)
        optimizer.step()
        a = [(1 - beta1) * beta1**age for age in range(t)]
        b = [1 / t] * t if beta2 is None else [(1 - beta2) * beta2**age for age in range(t)]
        alpha = 1e-3 / math.sqrt(t) if beta2 is None else 1e-3
        length = weight.detach().double().view(-1, n).norm(dim=1).max().item()
        assert length <= 2 * alpha * longest_allowed(a, b)


# Memory ------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """What the process holds, without what glibc keeps for its next allocations."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@each_backend
def test_closing_gives_the_memory_of_the_matrices_back(backend: str) -> None:
    run(
        BlockAdam([nn.Parameter(torch.zeros(60))], clip=CLOSING, backend=backend), range(1, STEPS_TO_CLOSE + 2)
    )  # load all
    weight = nn.Parameter(torch.zeros(1000, 500))
    optimizer = BlockAdam([weight], clip=CLOSING, block_size=50, backend=backend)
    run(optimizer, range(1, STEPS_TO_CLOSE))
    matrices = sum(v.nbytes for name, v in optimizer.state[weight].items() if name not in ("step", "exp_avg"))
    before = resident_bytes()
    run(optimizer, [STEPS_TO_CLOSE])
    freed = before - resident_bytes()
    assert matrices > 50e6
    assert freed > 0.9 * matrices, f"{freed / 1e6:.0f} of {matrices / 1e6:.0f} MB"
