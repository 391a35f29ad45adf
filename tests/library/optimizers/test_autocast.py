"""A step, and what is recorded of it, are computed in the precision of the statistics, also inside of autocast."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.diagnostics import SpectrumRecorder
from support.contract_cases import param_bits

OPTIONS = {
    "input": {},
    "tensor": {"grouping": "tensor"},  # eigh's under each backend: more than 64 coordinates
    "kept basis": {"refresh_every": 2},
    "amsgrad, clipped": {"amsgrad": True, "clip": SpectrumClip(0.05, 1.0)},
    "diagonal": {"grouping": "diagonal"},
}


def trained(backend: str, options: dict[str, Any], autocast: bool) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Bits of the parameters and of the state after some steps, and what was recorded of these."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(10, 12))
    optimizer = BlockAdam([param], lr=0.1, backend=backend, **options)
    with SpectrumRecorder(optimizer, every=1) as recorder:
        for _ in range(4):
            param.grad = torch.randn(10, 12)
            with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
                optimizer.step()
                assert torch.is_autocast_enabled("cpu") is autocast
    return param_bits([param]), param_bits(optimizer.state[param].values()), recorder.history


@pytest.mark.parametrize("backend", ["eigh", "numba"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_autocast_changes_no_bit(options: dict[str, Any], backend: str) -> None:
    expected, found = (trained(backend, options, autocast) for autocast in (False, True))
    assert found[:2] == expected[:2]
    assert [str(row) for row in found[2]] == [str(row) for row in expected[2]]  # as text, because NaN is no NaN


def test_a_closure_is_called_inside_of_autocast() -> None:
    param = nn.Parameter(torch.randn(4, 4))
    optimizer = BlockAdam([param], lr=0.1)
    types = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        product = param @ param
        types.append(product.dtype)
        loss = product.float().square().mean()
        loss.backward()
        return loss

    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step(closure)
    assert types == [torch.bfloat16]
