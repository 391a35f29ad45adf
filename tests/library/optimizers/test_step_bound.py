"""A gradient far larger than those before it moves no block further than exact arithmetic allows.

With V = Σ bₖ gₖgₖᵀ and m = Σ aₖ gₖ, Cauchy and Schwarz give mᵀV⁻¹m ≤ Σ aₖ²/bₖ = c², so a block's step is at most c lr
long, whatever the gradients are. In float32 the small eigenvalues of such a V are noise.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockadapt import BlockAdaFom, BlockAdagrad, BlockAdam, BlockRMSprop
from blockadapt.optimizers import BlockOptimizer

STEPS, BLOCKS = 12, 200

CASES: dict[str, tuple[type[BlockOptimizer], dict[str, Any]]] = {
    "adam": (BlockAdam, {"bias_correction": False}),
    "adam, corrected": (BlockAdam, {}),
    "amsgrad": (BlockAdam, {"bias_correction": False, "amsgrad": True}),
    "adam, kept basis": (BlockAdam, {"bias_correction": False, "refresh_every": 3}),
    "rmsprop": (BlockRMSprop, {}),
    "adagrad": (BlockAdagrad, {}),
    "adafom": (BlockAdaFom, {}),
}


def bound(optimizer: BlockOptimizer, t: int) -> float:
    """c · lr at step t, with the weights a and b written out."""
    (group,) = optimizer.param_groups
    lr, ages = group["lr"], range(t)
    beta1, beta2 = 0.0, 0.0
    if "betas" in group:
        beta1, beta2 = group["betas"]
    elif isinstance(optimizer, BlockRMSprop):
        beta2 = group["alpha"]
    elif isinstance(optimizer, BlockAdaFom):
        beta1 = group["beta1"]
    a = [(1 - beta1) * beta1**age for age in ages]
    b = [(1 - beta2) * beta2**age for age in ages]
    if isinstance(optimizer, (BlockAdagrad, BlockAdaFom)):
        b = [1 / t for _ in ages]
        lr /= math.sqrt(t)
    if group.get("bias_correction", False):
        lr *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return float(lr * math.sqrt(sum(x * x / y for x, y in zip(a, b, strict=True) if x)))


def lengths(optimizer: BlockOptimizer, param: Tensor, grads: list[Tensor], n: int) -> list[float]:
    """The longest step of any block, at each step."""
    found = []
    for grad in grads:
        before = param.detach().clone()
        param.grad = grad.to(param.dtype)
        optimizer.step()
        found.append((param.detach() - before).view(-1, n).double().norm(dim=1).max().item())
    return found


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("jump", [1.0, 1e2, 1e3, 1e5])
@pytest.mark.parametrize("backend", ["eigh", "numba"])
@pytest.mark.parametrize("case", CASES)
def test_no_block_steps_further_than_exact_arithmetic_allows(
    case: str, backend: str, jump: float, scale: float
) -> None:
    n = 10
    cls, options = CASES[case]
    generator = torch.Generator().manual_seed(5)
    grads = [scale * torch.randn(BLOCKS * n, generator=generator) for _ in range(STEPS)]
    grads[2] *= jump
    param = nn.Parameter(torch.zeros(BLOCKS * n))
    optimizer = cls([param], lr=1e-3, grouping="chunk", block_size=n, backend=backend, **options)
    for t, length in enumerate(lengths(optimizer, param, grads, n), start=1):
        assert length <= 2 * bound(optimizer, t), f"step {t}"
