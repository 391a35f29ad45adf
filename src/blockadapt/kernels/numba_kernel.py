"""The fast kernel's other half: segments in, tiles out to threads, and what did not converge to `eigh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockadapt._threads import run_on_threads
from blockadapt.kernels import numba_tiles as tiles
from blockadapt.kernels.compilation import compiled
from blockadapt.kernels.lanes import LANES
from blockadapt.kernels.protocol import Batch, Batches, Segment
from blockadapt.kernels.torch_eigh import EighKernel

MAX_BLOCK = 64
"""Blocks up to this size go through the tiles; larger ones through `eigh`, which LAPACK then does well."""


class NumbaKernel:
    """Blocks of up to 64 on the CPU, float32 and float64, in SIMD lanes; everything else through `eigh`."""

    name = "numba"

    def __init__(self) -> None:
        self._eigh = EighKernel()

    def step_(self, batches: Batches) -> None:
        """See `Kernel.step_`."""
        others = {batch: segments for batch, segments in batches.items() if not _in_tiles(batch)}
        changes = [self._eigh.prepare(segments) for segments in others.values()]  # may raise; tiles cannot
        orders = [
            _Order(batch, alike)
            for batch, segments in batches.items()
            if batch not in others
            for alike in _alike(segments)
        ]
        for order in orders:
            self._redo_(order.carry_out_())
        for change in changes:
            change.write_()

    def _redo_(self, segments: Sequence[Segment]) -> None:
        """Solve single blocks in float64 by `eigh`. Their moments are updated and their x is shrunk already.

        Without m the gradient is formed again; no x has then been shrunk, for decay is either coupled or decoupled.
        """
        copies = [
            {name: tensor.double() for name in _TENSORS if (tensor := getattr(segment, name)) is not None}
            for segment in segments
        ]
        again = [
            replace(
                segment,
                **copy,
                refresh=True,
                descent=segment.descent._replace(shrink=1.0),
                first=segment.first._replace(beta=0.0 if segment.m is None else 1.0),
                second=segment.second._replace(decay=1.0, weight=0.0),
            )
            for segment, copy in zip(segments, copies, strict=True)
        ]
        if again:
            self._eigh.prepare(again).write_()
        for segment, copy in zip(segments, copies, strict=True):
            for name, tensor in copy.items():
                if name != "grad":
                    getattr(segment, name).copy_(tensor)


_TENSORS = ("x", "grad", "m", "second_moment", "largest", "basis", "eigenvalues")


_REALS = {torch.float32: np.float32, torch.float64: np.float64}


def _in_tiles(batch: Batch) -> bool:
    return batch.n <= MAX_BLOCK and batch.device.type == "cpu" and batch.dtype in _REALS


def _alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that keep the same state and do the same thing: one call each, and almost always one in all."""
    together: dict[tuple[bool, ...], list[Segment]] = {}
    for segment in segments:
        kind = (segment.m is None, segment.largest is None, segment.basis is None, segment.refresh)
        together.setdefault(kind, []).append(segment)
    return list(together.values())


class _Order:
    """A step for segments that are alike, made ready so that nothing is left that could raise."""

    def __init__(self, batch: Batch, segments: Sequence[Segment]) -> None:
        real = _REALS[batch.dtype]
        self._segments = segments
        self._worker = _worker(real)
        self._table = np.array([_row(segment) for segment in segments], dtype=np.int64)
        self._coefficients = np.array([segment.terms for segment in segments], dtype=real)
        starts = list(accumulate((segment.num_blocks for segment in segments), initial=0))
        self._starts = np.array(starts, dtype=np.int64)
        self._failed = np.zeros(starts[-1], dtype=np.uint8)
        total = -(-starts[-1] // LANES)
        self._threads = min(torch.get_num_threads(), total)
        order = {
            tiles.TICKET: 0,
            tiles.SIZE: batch.n,
            tiles.SEGMENTS: len(segments),
            tiles.TABLE_AT: self._table.ctypes.data,
            tiles.COEFFICIENTS_AT: self._coefficients.ctypes.data,
            tiles.STARTS_AT: self._starts.ctypes.data,
            tiles.FAILED_AT: self._failed.ctypes.data,
            tiles.TILES: total,
            # Chunks of a few tiles, so that threads finish together; those of 1 take no time, and run on.
            tiles.CHUNK: max(1, min(16 if batch.n > 1 else 512, total // (8 * self._threads))),
            tiles.SWEEPS: tiles.MAX_SWEEPS * batch.n,
            tiles.KEPT: not segments[0].refresh,
        }
        self._order = np.array([order[entry] for entry in range(tiles.ORDER)], dtype=np.int64)

    def carry_out_(self) -> list[Segment]:
        """Take the step; returns the blocks that did not converge, one segment each."""
        run_on_threads(self._worker, self._order.ctypes.data, self._threads)
        if not self._failed.any():
            return []
        return [_block(self._segments, self._starts, int(number)) for number in self._failed.nonzero()[0]]


@lru_cache(maxsize=2)
def _worker(real: Any) -> Any:
    """The compiled function that a thread runs."""
    return compiled(tiles.worker(real), real.__name__).ctypes


def _row(segment: Segment) -> list[int]:
    """A row of the segment table: addresses and byte strides."""
    size = segment.x.element_size()
    row: list[int] = []
    for name in _TENSORS:
        tensor: Tensor | None = getattr(segment, name)
        if tensor is None:
            row += (0, 0, 0, 0)
        else:
            major, minor, element = tensor.stride()
            row += (tensor.data_ptr(), major * size, minor * size, element * size)
    row += segment.x.shape[1:]
    return row


def _block(segments: Sequence[Segment], starts: np.ndarray, number: int) -> Segment:
    """The segment that holds one block only."""
    index = int(np.searchsorted(starts, number, side="right")) - 1
    segment = segments[index]
    major, minor = divmod(number - int(starts[index]), segment.x.shape[1])
    views = {
        name: tensor[major : major + 1, minor : minor + 1]
        for name in _TENSORS
        if (tensor := getattr(segment, name)) is not None
    }
    return replace(segment, **views)
