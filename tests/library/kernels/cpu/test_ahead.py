"""What the next tile needs of memory is asked for while this one is computed: all of it, and little else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockadapt.kernels.cpu import ahead, step, work
from blockadapt.kernels.cpu.scratch import LINE
from blockadapt.kernels.cpu.simd import LANES
from blockadapt.kernels.cpu.spectral import INVERSE_ROOT
from support.blocks import PATHS, TENSORS, Case, training
from support.uncompiled import uncompiled  # noqa: F401

TILES = 3


def side_by_side(segment: Case) -> Case:
    """The same with neighbouring blocks' coordinates contiguous, as `"input"` has them: block j is column j."""

    def turned(tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous().mT

    assert segment.m is not None
    return replace(segment, x=turned(segment.x), grad=turned(segment.grad), m=turned(segment.m))


def lines(tensor: Tensor, first: int) -> set[int]:
    """The numbers of the cache lines that hold a tensor's bytes from `first` on."""
    start = tensor.data_ptr()
    return set(range((start + first) // LINE, (start + tensor.numel() * tensor.itemsize - 1) // LINE + 1))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("path", ["plain", "new basis", "kept basis"])
@pytest.mark.parametrize("lie", ["within", "side by side"])
@pytest.mark.parametrize("n", [2, 4])
def test_all_that_the_next_tile_needs_is_asked_for(
    n: int, lie: str, path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = TILES * LANES
    segment = training(n, blocks, dtype, minor=1 if lie == "within" else blocks)
    segment = PATHS[path](segment if lie == "within" else side_by_side(segment))
    place = segment.segment().place
    work_list: Any = work.NumbaWorkList(place.batch, [place], segment.refresh)
    work_list.fill_in_([segment.segment()])
    asked: list[int] = []
    monkeypatch.setattr(ahead, "prefetch", lambda address: asked.append(int(address) // LINE))
    step.carry_out(work_list._entries, work_list._coefficients, INVERSE_ROOT)

    tensors = {name: tensor for name in TENSORS if (tensor := getattr(segment, name)) is not None}
    needed: set[int] = set()
    for name, tensor in tensors.items():
        if name in ("x", "grad", "m") and lie == "side by side":
            for i in range(n):
                row = tensor[0, :, i]
                needed |= lines(row, LANES * tensor.itemsize)
        else:
            needed |= lines(tensor, tensor.numel() // TILES * tensor.itemsize)
    assert not needed - set(asked)
    everything = sum(len(lines(tensor, 0)) for tensor in tensors.values())
    assert len(asked) <= everything + 2 * len(tensors) * n  # once each


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("path", ["plain", "new basis", "kept basis"])
def test_the_next_tile_may_be_in_another_tensor(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [PATHS[path](training(4, LANES, torch.float32, k)) for k in range(TILES)]
    places = [segment.segment().place for segment in segments]
    work_list: Any = work.NumbaWorkList(places[0].batch, places, segments[0].refresh)
    work_list.fill_in_([segment.segment() for segment in segments])
    asked: list[int] = []
    monkeypatch.setattr(ahead, "prefetch", lambda address: asked.append(int(address) // LINE))
    step.carry_out(work_list._entries, work_list._coefficients, INVERSE_ROOT)
    for segment in segments[1:]:
        for tensor in (getattr(segment, name) for name in TENSORS):
            assert tensor is None or not lines(tensor, 0) - set(asked)
    assert not lines(segments[0].second_moment, 0) & set(asked)
