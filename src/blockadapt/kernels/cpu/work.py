"""The work list of one step: where blocks lie, as the compiled step reads it, and threads that take tiles from it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockadapt.kernels.contract import Batch, Coefficients, Place, Segment
from blockadapt.kernels.cpu import step as tiles
from blockadapt.kernels.cpu.compilation import compiled
from blockadapt.kernels.cpu.threads import run_on_threads
from blockadapt.kernels.eigh import EighKernel
from blockadapt.kernels.layout import TILE

_STRIDED = ("x", "m", "second_moment", "largest")
_TENSORS = (*_STRIDED, "basis", "eigenvalues")


_REALS = {torch.float32: np.float32, torch.float64: np.float64}


def alike(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that keep the same state and do the same thing: one call each, and almost always one in all."""
    together: dict[tuple[object, ...], list[Segment]] = {}
    for segment in segments:
        together.setdefault((segment.place.keeps, segment.refresh), []).append(segment)
    return list(together.values())


class Order:
    """The step of blocks that are alike: all that the threads read, kept from step to step.

    It holds the places weakly, so that their memory is free as soon as nobody else wants it.
    """

    def __init__(self, batch: Batch, places: Sequence[Place], refresh: bool) -> None:
        real = _REALS[batch.dtype]
        self._places = [weakref.ref(place) for place in places]
        self._worker = _worker(real)
        self._table = np.array([_row(place) for place in places], dtype=np.int64)
        self._coefficients = np.empty((len(places), tiles.TERMS), dtype=real)
        # A basis lies in tiles, which begin with its segment.
        unit = 1 if places[0].basis is None else TILE
        self._starts = np.array(
            list(accumulate((-(-place.num_blocks // unit) * unit for place in places), initial=0)), dtype=np.int64
        )
        self._failed = np.zeros(self._starts[-1], dtype=np.uint8)
        self._threads = 0
        order = {
            tiles.TICKET: 0,
            tiles.FAILURES: 0,
            tiles.SIZE: batch.n,
            tiles.SEGMENTS: len(places),
            tiles.TABLE_AT: self._table.ctypes.data,
            tiles.COEFFICIENTS_AT: self._coefficients.ctypes.data,
            tiles.STARTS_AT: self._starts.ctypes.data,
            tiles.FAILED_AT: self._failed.ctypes.data,
            tiles.CHUNKS: 0,
            tiles.CHUNKS_AT: 0,
            tiles.SWEEPS: tiles.MAX_SWEEPS * batch.n,
            tiles.KEPT: not refresh,
        }
        self._order = np.array([order[entry] for entry in range(tiles.ORDER)], dtype=np.int64)
        self._at = self._order.ctypes.data

    def fits(self, places: Sequence[Place]) -> bool:
        """Whether it was made for these places."""
        return len(places) == len(self._places) and all(
            known() is place for known, place in zip(self._places, places, strict=True)
        )

    def fill_in_(self, segments: Sequence[Segment]) -> None:
        """What each step brings anew; nothing is left then that could raise."""
        size = self._coefficients.itemsize
        self._table[:, tiles.GRAD] = [segment.grad.data_ptr() + size * segment.place.offset for segment in segments]
        coefficients = segments[0].coefficients
        one = all(segment.coefficients is coefficients for segment in segments)
        self._coefficients[:] = coefficients.terms if one else [segment.coefficients.terms for segment in segments]
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._threads = threads
            self._chunks = _chunks(-(-len(self._failed) // TILE), threads, least=4 if segments[0].place.n > 1 else 512)
            self._order[tiles.CHUNKS] = len(self._chunks) - 1
            self._order[tiles.CHUNKS_AT] = self._chunks.ctypes.data
        self._order[tiles.TICKET] = self._order[tiles.FAILURES] = 0

    def carry_out_(self, segments: Sequence[Segment]) -> list[Segment]:
        """Take the step; returns the blocks that did not converge, one segment each."""
        run_on_threads(self._worker, self._at, min(self._threads, len(self._chunks) - 1))
        if not self._order[tiles.FAILURES]:
            return []
        numbers = self._failed.nonzero()[0]
        self._failed[:] = 0
        return [_block(segments, self._starts, int(number)) for number in numbers]


def _chunks(tiles: int, threads: int, least: int) -> np.ndarray:
    """Where the chunks begin that threads take: long ones first, to run through memory, then ever shorter ones.

    So all threads finish together, also where one is slower than another.
    """
    starts = [0]
    while (left := tiles - starts[-1]) > 0:
        starts.append(starts[-1] + min(left, max(least, left // (2 * threads))))
    return np.array(starts, dtype=np.int64)


@lru_cache(maxsize=2)
def _worker(real: Any) -> Any:
    """The compiled function that a thread runs."""
    return compiled(tiles.worker(real), real.__name__).ctypes


def _row(place: Place) -> list[int]:
    """A row of the segment table, in the order of its columns. Where the gradient lies is filled in later."""
    size = place.x.element_size()

    def strided(tensor: Tensor | None) -> tuple[int, ...]:
        return (tensor.data_ptr(), *(stride * size for stride in tensor.stride())) if tensor is not None else (0,) * 4

    def tiled(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    return [
        *strided(place.x),
        *strided(place.x),
        *strided(place.m),
        *strided(place.second_moment),
        *strided(place.largest),
        tiled(place.basis),
        tiled(place.eigenvalues),
        *place.x.shape[1:],
        place.num_blocks,
    ]


def _block(segments: Sequence[Segment], starts: np.ndarray, number: int) -> Segment:
    """The segment that holds one block only."""
    index = int(np.searchsorted(starts, number, side="right")) - 1
    segment, within = segments[index], number - int(starts[index])
    major, minor = divmod(within, segment.place.x.shape[1])
    tile, lane = divmod(within, TILE)

    def strided(tensor: Tensor) -> Tensor:
        return tensor[major : major + 1, minor : minor + 1]

    def tiled(tensor: Tensor) -> Tensor:
        return tensor[tile : tile + 1, :, lane : lane + 1]

    views: dict[str, Any] = {
        name: strided(tensor) if name in _STRIDED else tiled(tensor)
        for name in _TENSORS
        if (tensor := getattr(segment.place, name)) is not None
    }
    offset = segment.place.offset + major * segment.place.x.stride(0) + minor * segment.place.x.stride(1)
    return segment._replace(place=replace(segment.place, **views, offset=offset))


def redo_(segments: Sequence[Segment]) -> None:
    """Solve single blocks in float64 by `eigh`. Their moments are updated and their x is shrunk already.

    Without m the gradient is formed again; no x has then been shrunk, for decay is either coupled or decoupled.
    """
    again = []
    for place, grad, _, (descent, first, second, spectrum) in segments:
        tensors: dict[str, Any] = {
            name: tensor.double().contiguous() for name in _TENSORS if (tensor := getattr(place, name)) is not None
        }
        coefficients = Coefficients(
            descent._replace(shrink=1.0),
            first._replace(beta=0.0 if place.m is None else 1.0),
            second._replace(decay=1.0, weight=0.0),
            spectrum,
        )
        whole = place.part(grad).double().contiguous()
        again.append(Segment(replace(place, **tensors, offset=0), whole, True, coefficients))
    if again:
        EighKernel().prepare(again[0].place.batch, again).write_()
    for segment, solved in zip(segments, again, strict=True):
        for name in _TENSORS:
            if (tensor := getattr(segment.place, name)) is not None:
                tensor.copy_(getattr(solved.place, name))
