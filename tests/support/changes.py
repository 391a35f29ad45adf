"""What tests need that change something between two steps: a parameter, an optimizer in training, a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from support.contract_cases import bits_of_all

CLOSED = SpectrumClip(gamma=1e6)
"""Closed from the first step on."""


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """One of this shape, with the same numbers each time."""
    generator = torch.Generator().manual_seed(5)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


def trained(shape: tuple[int, ...] = (12, 7), steps: int = 3, **options: Any) -> tuple[nn.Parameter, BlockAdam]:
    """A parameter after some steps, with a gradient for the next one."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = BlockAdam([param], **{"block_size": 5, "lr": 0.01, **options})
    for _ in range(steps):
        param.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    param.grad = torch.randn(shape, generator=generator)
    return param, optimizer


def refuses(optimizer: BlockOptimizer, message: str, error: type[Exception] = ValueError) -> None:
    """The next step raises this, in the class's own words, and changes nothing."""
    before = bits_of_all(optimizer)
    with pytest.raises(error, match=f"^{type(optimizer).__name__}: {message}"):
        optimizer.step()
    assert bits_of_all(optimizer) == before
