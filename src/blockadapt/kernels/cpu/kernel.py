"""Says which blocks the fast kernel takes, and keeps its side of the contract. Numba is imported at the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from blockadapt.kernels.contract import Batch, Kernel, Segment
from blockadapt.kernels.layout import MAX_TILED
from blockadapt.kernels.refresh import decomposed
from blockadapt.kernels.segments import Segments, columns
from blockadapt.kernels.work_lists import WorkLists
from blockadapt.spectrum import InverseRoot


class NumbaKernel(Kernel):
    """Moves blocks of up to 64 on the CPU, float32 and float64, in SIMD lanes."""

    name = "numba"
    measures = True

    def __init__(self) -> None:
        self._work_lists = WorkLists()

    def takes(self, batch: Batch) -> bool:
        """Say yes to blocks of up to 64 whose spectral function has a formula for lanes, if Numba can compile."""
        small = batch.n <= MAX_TILED and batch.device.type == "cpu" and batch.dtype in (torch.float32, torch.float64)
        return small and _has_lanes_formula(batch) and _work() is not None

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> NumbaChange:
        """See `Kernel.prepare`."""
        return NumbaChange([self._work_list(batch, together) for together in columns(segments)], segments)

    def _work_list(self, batch: Batch, segments: Segments) -> tuple[Any, int]:
        """Fill in the work list of these segments; it is that of an earlier step if they lie where they lay."""
        work_list = self._work_lists.of(batch, segments, _work().NumbaWorkList)
        return work_list, work_list.fill_in_(segments)

    def decompose(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See `Kernel.decompose`; a kernel of its own does it, so that work lists of steps stay."""
        return decomposed(NumbaKernel(), packed, n)


@dataclass(frozen=True)
class NumbaChange:
    """Holds work lists that are ready to be carried out, each with the step's number. What a write needs is theirs.

    The segments are held for their gradients: a work list has only their addresses.
    """

    work_lists: list[tuple[Any, int]]
    segments: Sequence[Segment]

    def write_(self) -> None:
        """See `Change.write_`."""
        for work_list, number in self.work_lists:
            work_list.carry_out_(number)


@lru_cache(maxsize=1)
def _work() -> Any:
    """Import the module of compiled work; None where Numba cannot be imported, or `NUMBA_DISABLE_JIT` keeps it idle."""
    try:
        idle = import_module("numba").config.DISABLE_JIT
        return None if idle else import_module("blockadapt.kernels.cpu.work")
    except ImportError:
        return None


def _has_lanes_formula(batch: Batch) -> bool:
    return type(batch.function) is InverseRoot or batch.function.lanes is not None
