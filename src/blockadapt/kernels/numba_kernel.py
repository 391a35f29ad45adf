"""The fast kernel's other half: segments in, tiles out to threads, and what did not converge to `eigh`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from blockadapt._threads import run_chunks
from blockadapt.kernels import numba_tridiagonal as tiles
from blockadapt.kernels.compilation import compile_once
from blockadapt.kernels.lanes import width
from blockadapt.kernels.protocol import Batch, Batches, Segment
from blockadapt.kernels.torch_eigh import EighKernel

MAX_BLOCK = 64
"""Blocks up to this size go through the tiles; larger ones through `eigh`, which LAPACK then does well."""

_CHUNK = 64
"""Most tiles a thread takes at a time: enough to make the call's cost vanish, few enough to share the work evenly."""

_SCRATCH = threading.local()


class NumbaKernel:
    """Blocks of up to 64 on the CPU, float32 and float64, in SIMD lanes; everything else through `eigh`."""

    name = "numba"

    def __init__(self) -> None:
        self._eigh = EighKernel()

    def step_(self, batches: Batches) -> None:
        """See `Kernel.step_`."""
        others = {batch: segments for batch, segments in batches.items() if not _in_tiles(batch)}
        changes = [self._eigh.prepare(segments) for segments in others.values()]  # may raise; tiles cannot
        for batch, segments in batches.items():
            if batch not in others:
                for alike in _alike(segments):
                    self._redo_(_advance_(batch, alike))
        for change in changes:
            change.write_()

    def _redo_(self, segments: Sequence[Segment]) -> None:
        """Solve single blocks in float64 by `eigh`. Their moments are updated and their x is shrunk already."""
        for segment in segments:
            copies = {name: t.double() for name in _TENSORS if (t := getattr(segment, name)) is not None}
            again = replace(
                segment,
                **copies,
                refresh=True,
                descent=segment.descent._replace(shrink=1.0),
                first=segment.first._replace(beta=1.0),
                second=segment.second._replace(decay=1.0, weight=0.0),
            )
            self._eigh.prepare([again]).write_()
            for name, copy in copies.items():
                if name != "grad":
                    getattr(segment, name).copy_(copy)


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


def _advance_(batch: Batch, segments: Sequence[Segment]) -> list[Segment]:
    """Take the step for these segments; returns the blocks that did not converge, one segment each."""
    dtype = np.dtype(str(batch.dtype).removeprefix("torch."))
    lanes = width(dtype.itemsize)
    compile_once(tiles.advance, tiles.SIGNATURES[dtype.name], dtype.name)
    table = np.array([_row(segment) for segment in segments], dtype=np.int64)
    terms = [(*s.descent, *s.first, *s.second, *s.spectrum) for s in segments]
    coefficients = np.array(terms, dtype=dtype)
    starts = np.zeros(len(segments) + 1, dtype=np.int64)
    np.cumsum([segment.num_blocks for segment in segments], out=starts[1:])
    total = -(-int(starts[-1]) // lanes)
    kept = not segments[0].refresh
    most = tiles.MAX_SWEEPS * batch.n
    failed: list[int] = []

    chunk = max(1, min(_CHUNK, -(-total // (4 * torch.get_num_threads()))))

    def work(index: int) -> None:
        first, last = index * chunk, min((index + 1) * chunk, total)
        scratch, log, missed = _scratch(batch.n, dtype, most, chunk * lanes)
        count = tiles.advance(batch.n, table, coefficients, starts, first, last, scratch, log, most, kept, missed)
        failed.extend(missed[:count].tolist())

    run_chunks(work, -(-total // chunk))
    return [_block(segments, starts, number) for number in sorted(failed)]


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


def _scratch(n: int, dtype: np.dtype, most: int, blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """This thread's own working memory, kept between steps."""
    held: dict[tuple[int, np.dtype, int], tuple[np.ndarray, np.ndarray, np.ndarray]]
    held = _SCRATCH.__dict__.setdefault("held", {})
    if (n, dtype, blocks) not in held:
        lanes = width(dtype.itemsize)
        scratch = _aligned(tiles.scratch_length(n, lanes), dtype)
        log = _aligned(max(1, most * (n - 1) * 2 * lanes), dtype)
        held[n, dtype, blocks] = (scratch, log, np.zeros(blocks, dtype=np.int64))
    return held[n, dtype, blocks]


def _aligned(length: int, dtype: np.dtype) -> np.ndarray:
    """Memory that begins at a cache line, so that no row of lanes straddles two more than it must."""
    raw = np.zeros(length * dtype.itemsize + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + length * dtype.itemsize].view(dtype)


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
