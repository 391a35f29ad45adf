"""The fast kernel's other half: segments in, tiles out to threads, and what did not converge to `eigh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockadapt._threads import run_on_threads
from blockadapt.kernels import numba_tridiagonal as tiles
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


def _in_tiles(batch: Batch) -> bool:
    return batch.n <= MAX_BLOCK and batch.device.type == "cpu" and batch.dtype in (torch.float32, torch.float64)


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
        dtype = np.dtype(str(batch.dtype).removeprefix("torch."))
        self._segments = segments
        self._worker = _worker(dtype.name)
        self._table = np.array([_row(segment) for segment in segments], dtype=np.int64)
        self._coefficients = np.array([segment.terms for segment in segments], dtype=dtype)
        self._starts = np.zeros(len(segments) + 1, dtype=np.int64)
        np.cumsum([segment.num_blocks for segment in segments], out=self._starts[1:])
        self._failed = np.zeros(self._starts[-1], dtype=np.uint8)
        total = -(-int(self._starts[-1]) // LANES)
        self._threads = min(torch.get_num_threads(), total)
        order = self._order = np.zeros(tiles.ORDER, dtype=np.int64)
        order[tiles.SIZE], order[tiles.SEGMENTS] = batch.n, len(segments)
        order[tiles.TABLE_AT], order[tiles.COEFFICIENTS_AT] = self._table.ctypes.data, self._coefficients.ctypes.data
        order[tiles.STARTS_AT], order[tiles.FAILED_AT] = self._starts.ctypes.data, self._failed.ctypes.data
        # Chunks of a few tiles, so that threads finish together.
        order[tiles.TILES], order[tiles.CHUNK] = total, max(1, min(16, total // (8 * self._threads)))
        order[tiles.SWEEPS], order[tiles.KEPT] = tiles.MAX_SWEEPS * batch.n, not segments[0].refresh

    def carry_out_(self) -> list[Segment]:
        """Take the step; returns the blocks that did not converge, one segment each."""
        run_on_threads(self._worker, self._order.ctypes.data, self._threads)
        if not self._failed.any():
            return []
        return [_block(self._segments, self._starts, int(number)) for number in self._failed.nonzero()[0]]


@lru_cache(maxsize=2)
def _worker(dtype: str) -> Any:
    """The compiled function that a thread runs."""
    return compiled(tiles.worker(np.dtype(dtype).type), dtype).ctypes


def _row(segment: Segment) -> list[int]:
    """A row of the segment table: addresses and byte strides."""
    row: list[int] = []
    for name in _TENSORS:
        tensor: Tensor | None = getattr(segment, name)
        if tensor is None:
            row += [0, 0, 0, 0]
        else:
            size = tensor.element_size()
            row += [tensor.data_ptr(), *(stride * size for stride in tensor.stride())]
    return [*row, segment.x.shape[1], segment.x.shape[2]]


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
