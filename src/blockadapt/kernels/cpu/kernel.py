"""The fast kernel: which blocks it takes, and its side of the contract. Numba is imported at the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from blockadapt.kernels.contract import Batch, Kernel, Segment, alike
from blockadapt.kernels.layout import MAX_TILED
from blockadapt.kernels.refresh import decomposed
from blockadapt.spectrum import InverseRoot


class NumbaKernel(Kernel):
    """Blocks of up to 64 on the CPU, float32 and float64, in SIMD lanes."""

    name = "numba"
    measures = True

    def __init__(self) -> None:
        self._work_lists: dict[tuple[object, ...], Any] = {}

    def takes(self, batch: Batch) -> bool:
        """Blocks of up to 64 whose spectral function has a form for lanes, where Numba can be imported."""
        small = batch.n <= MAX_TILED and batch.device.type == "cpu" and batch.dtype in (torch.float32, torch.float64)
        return small and _has_lanes_form(batch) and _work() is not None

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> NumbaChange:
        """See `Kernel.prepare`."""
        groups = [segments] if self._are_known(batch, segments) else alike(segments)
        return NumbaChange([self._work_list(batch, each) for each in groups], segments)

    def _are_known(self, batch: Batch, segments: Sequence[Segment]) -> bool:
        """Whether these are all segments of one work list, in its order."""
        first = segments[0]
        if first.tally is not None and len(alike(segments)) > 1:
            return False
        if any(segment.refresh != first.refresh or segment.tally is not first.tally for segment in segments):
            return False
        work_list = self._work_lists.get((batch, first.place.keeps, first.refresh, first.tally))
        return work_list is not None and work_list.fits([segment.place for segment in segments])

    def _work_list(self, batch: Batch, segments: Sequence[Segment]) -> Any:
        """The work list of these segments, filled in; the one of an earlier step if they lie where they lay."""
        places = [segment.place for segment in segments]
        key = batch, places[0].keeps, segments[0].refresh, segments[0].tally
        work_list = self._work_lists.get(key)
        if work_list is None or not work_list.fits(places):
            work_list = self._work_lists[key] = _work().WorkList(batch, places, *key[2:])
        work_list.fill_in_(segments)
        return work_list

    def decompose(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See `Kernel.decompose`; by a kernel of its own, so that work lists of steps stay."""
        return decomposed(NumbaKernel(), packed, n)


@dataclass(frozen=True)
class NumbaChange:
    """Work lists that are ready to be carried out. What a write needs of memory and threads is theirs already.

    The segments are held for their gradients: a work list has only their addresses.
    """

    work_lists: list[Any]
    segments: Sequence[Segment]

    def write_(self) -> None:
        """See `Change.write_`."""
        for work_list in self.work_lists:
            work_list.carry_out_()


@lru_cache(maxsize=1)
def _work() -> Any:
    """The module of compiled work; None where Numba cannot be imported."""
    try:
        return import_module("blockadapt.kernels.cpu.work")
    except ImportError:
        return None


def _has_lanes_form(batch: Batch) -> bool:
    return type(batch.function) is InverseRoot or batch.function.lanes is not None
