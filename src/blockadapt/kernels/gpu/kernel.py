"""Says which blocks the GPU kernel takes, and keeps its side of the contract. Triton is imported at the first step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from blockadapt.kernels.contract import Batch, Change, Kernel, Segment
from blockadapt.kernels.layout import MAX_TILED
from blockadapt.kernels.refresh import decomposed
from blockadapt.kernels.segments import columns
from blockadapt.kernels.work_lists import WorkLists
from blockadapt.spectrum import InverseRoot


class TritonKernel(Kernel):
    """Moves blocks of up to 64 on GPUs, float32 and float64; on the CPU in Triton's interpreter (`TRITON_INTERPRET=1`).

    Args:
        gpus_only: Leave the CPU to other kernels even there: the interpreter proves, and is slow.
    """

    name = "triton"
    measures = True

    def __init__(self, gpus_only: bool = False) -> None:
        self._gpus_only = gpus_only
        self._work_lists = WorkLists()

    def takes(self, batch: Batch) -> bool:
        """Say yes to blocks of up to 64 under the paper's spectral function, on a device that Triton can launch on."""
        if self._gpus_only and batch.device.type == "cpu":
            return False
        small = batch.n <= MAX_TILED and batch.dtype in (torch.float32, torch.float64)
        work = _work() if small and type(batch.function) is InverseRoot else None
        return work is not None and work.launches_on(batch.device)

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> Change:
        """See `Kernel.prepare`."""
        make = _work().TritonWorkList
        steps = [self._work_lists.of(batch, together, make).ready(together) for together in columns(segments)]
        launches: Change = _work().Launches(steps)
        return launches

    def decompose(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See `Kernel.decompose`; a kernel of its own does it, so that work lists of steps stay."""
        return decomposed(TritonKernel(), packed, n)


@lru_cache(maxsize=1)
def _work() -> Any:
    """Import the module of launches; None where Triton cannot be imported."""
    try:
        return import_module("blockadapt.kernels.gpu.work")
    except ImportError:
        return None
