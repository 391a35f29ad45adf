"""Makes the launches of one step: where blocks lie, as the Triton kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from blockadapt.kernels.contract import Batch, Place, Segment, Tally
from blockadapt.kernels.gpu import step
from blockadapt.kernels.thresholds import GPU_MORE_SWEEPS, GPU_SWEEPS
from blockadapt.kernels.transfer import is_capturing, sent, term_table
from blockadapt.kernels.work_lists import WorkList

OWNER = "TritonKernel"
_REALS = {torch.float32: tl.float32, torch.float64: tl.float64}
_ADDRESSES = ("x", "m", "second_moment", "largest", "basis", "eigenvalues")
_STRIDED = ("x", "m", "second_moment", "largest")

INTERPRETED = not isinstance(step.advance, triton.JITFunction)
"""It says whether Triton runs kernels in Python: `TRITON_INTERPRET` was set when they were defined."""

WARPS_PER_PROCESSOR = 16
"""The programs of one warp that a streaming multiprocessor is given. No hardware has judged this choice yet."""

MOST_REGISTERS = 255
"""The registers that a thread of NVIDIA's can have."""

SCRATCH = 1 << 27
"""The bytes that one launch may take. They bound the programs of large blocks, which then take more tiles each."""


def launches_on(device: torch.device) -> bool:
    """Say whether Triton can launch on this device."""
    return device.type == "cpu" if INTERPRETED else device.type in ("cuda", "xpu")


def sweeps_allowed(n: int) -> int:
    """Say for how many QR sweeps the log has room; see `kernels.thresholds`."""
    return GPU_SWEEPS * n + GPU_MORE_SWEEPS


@dataclass(frozen=True)
class Launch:
    """Holds a kernel with all that it is called with."""

    function: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> None:
        """Compile it and load it onto the device, so that the launch itself can do nothing but launch."""
        compiled = self.function.warmup(*self.arguments, grid=(self.programs,), **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            compiled._init_handles()

    def run(self) -> None:
        """Launch it on the current stream."""
        self.function[(self.programs,)](*self.arguments, **self.options)


class Step(NamedTuple):
    """Holds the launches of blocks that are alike, and where they count themselves: `sums` is float64 [2, tiles]."""

    device: torch.device
    launches: list[Launch]
    tally: Tally | None
    sums: Tensor
    correction: float


@dataclass(frozen=True)
class Launches:
    """Holds a step that is ready to be launched."""

    steps: list[Step]

    def write_(self) -> None:
        """See `Change.write_`."""
        for step_ in self.steps:
            with _on(step_.device):
                for launch in step_.launches:
                    launch.run()
            if step_.tally is not None:
                step_.tally.add(step_.sums, step_.correction)


class TritonWorkList(WorkList):
    """Holds a work list on the device: what of its table stays from step to step, and who owns each tile."""

    def __init__(self, batch: Batch, places: Sequence[Place], refresh: bool, tally: Tally | None = None) -> None:
        super().__init__(OWNER, batch, places)
        self._refresh, self._keeps, self._tally = refresh, places[0].keeps, tally
        self._lanes = lanes_on(batch.device, max(place.num_blocks for place in places))
        tiles = [triton.cdiv(place.num_blocks, self._lanes) for place in places]
        first = np.cumsum([0, *tiles])
        self._tiles = int(first[-1])
        rows = [_row(place, int(start)) for place, start in zip(places, first, strict=False)]
        self._table = sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), batch.device)
        owners = torch.from_numpy(np.repeat(np.arange(len(places), dtype=np.int32), tiles))
        self._owners = sent(owners, batch.device)
        self._compiled = False

    def ready(self, segments: Sequence[Segment]) -> Step:
        """Make this step's launches, compiled. The table of its gradients and coefficients is then on its way.

        Raises:
            ValueError: A gradient is not in plain memory of the device, of the batch's dtype and large enough.
        """
        batch = self._batch
        grads = self.gradients_at([segment.grad for segment in segments]).tolist()
        with _on(batch.device):
            terms = term_table([segment.coefficients for segment in segments], batch.device, torch.float64)
            table = torch.cat([self._table, _column(grads, batch.device), terms.view(torch.int64)], dim=1)
            sums = torch.empty((2, self._tiles if self._tally else 0), dtype=torch.float64, device=batch.device)
            launches = self._launches(table, sums)
            if not self._compiled:
                for launch in launches:
                    launch.compile()
                self._compiled = True
        correction = 1.0 if self._tally is None else float(segments[0].coefficients.first.correction)
        return Step(batch.device, launches, self._tally, sums, correction)

    def _launches(self, table: Tensor, sums: Tensor) -> list[Launch]:
        n, dtype, device, _ = self._batch
        lanes, owners, tiles = self._lanes, self._owners, self._tiles
        has_m, has_largest, has_basis = self._keeps
        shape = {"LANES": lanes, "REAL": _REALS[dtype], "HAS_M": has_m, "HAS_LARGEST": has_largest}
        shape |= {"MEASURED": self._tally is not None, "enable_fp_fusion": True}
        N = triton.next_power_of_2(n)
        most = processors(device) * WARPS_PER_PROCESSOR
        if not self._refresh and n > 1:  # blocks of 1 keep nothing
            shape |= {"N": N, "num_warps": max(1, N * dtype.itemsize // 64)} | registers(device, MOST_REGISTERS)
            return [Launch(step.turn, min(tiles, most), (table, owners, sums, tiles, n), shape)]
        shape |= {"HAS_BASIS": has_basis and n > 1} | registers(device)
        sweeps = sweeps_allowed(n)
        rows = step.scratch_rows(n, sweeps)
        programs = min(tiles, most, max(1, SCRATCH // (rows * lanes * dtype.itemsize)))
        scratch = torch.empty(programs * rows * lanes, dtype=dtype, device=device)
        unsolved = torch.empty(1 + tiles * lanes, dtype=torch.int32, device=device)
        unsolved[:1].zero_()
        found = (table, owners, sums, scratch, unsolved, tiles, sweeps, n, rows)
        launches = [Launch(step.advance, programs, found, shape | {"PAIR": n == 2, "num_warps": 1})]
        if n > 2:  # smaller ones always converge
            again = shape | {"N": N, "num_warps": max(1, N // 4)}
            launches.append(Launch(step.redo, processors(device), (table, owners, sums, unsolved, tiles, n), again))
        return launches


def lanes_on(device: torch.device, blocks: int) -> int:
    """Say how many lanes a program has: the threads of a warp. The interpreter is faster the more it does at once."""
    if INTERPRETED:
        return min(1024, max(32, int(triton.next_power_of_2(blocks))))
    return 64 if device.type == "cuda" and torch.version.hip else 32


def registers(device: torch.device, most: int = 65536 // (32 * WARPS_PER_PROCESSOR)) -> dict[str, int]:
    """Let NVIDIA's compiler use `most` registers a thread, by an option; else it spills a few.

    By default they are what WARPS_PER_PROCESSOR leave. The sixteen warps of `redo` for blocks of 64 have as many.
    """
    return {"maxnreg": most} if device.type == "cuda" and not torch.version.hip else {}


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Count the streaming multiprocessors of a device, or what its maker calls so."""
    if INTERPRETED:
        return 2
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", 64))  # Intel has none


def _on(device: torch.device) -> Any:
    """Make the context in which launches go to this device: Triton launches on the current one.

    On the CPU the interpreter computes with NumPy, which is to be as silent about NaN as a GPU is.
    """
    return np.errstate(all="ignore") if device.type == "cpu" else torch.get_device_module(device).device(device)


def _column(addresses: Sequence[int], device: torch.device) -> Tensor:
    """Make a column of the table. A graph that is captured has each address as an argument of a fill."""
    if is_capturing(device):
        return torch.cat([torch.full((1, 1), address, dtype=torch.int64, device=device) for address in addresses])
    return sent(torch.tensor(addresses, dtype=torch.int64, device="cpu"), device).unsqueeze(1)


def _row(place: Place, first: int) -> list[int]:
    """List what stays of a row of the table from step to step, in the order of its columns."""

    def address(name: str) -> int:
        tensor: Tensor | None = getattr(place, name, None)
        return 0 if tensor is None else tensor.data_ptr()

    def strides(name: str) -> tuple[int, ...]:
        tensor: Tensor | None = getattr(place, name)
        return (0, 0, 0) if tensor is None else tensor.stride()

    *_, minor, k = place.x.shape
    return [
        *map(address, _ADDRESSES),
        *(stride for name in _STRIDED for stride in strides(name)),
        k,
        minor,
        place.num_blocks,
        first,
    ]
