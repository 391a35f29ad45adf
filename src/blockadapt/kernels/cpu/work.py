"""Makes the work list of one step: where blocks lie, as the compiled step reads it. Threads take tiles from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from blockadapt.kernels import thresholds
from blockadapt.kernels.contract import Batch, Place, Segment, Tally
from blockadapt.kernels.cpu.compilation import compiled
from blockadapt.kernels.cpu.scratch import LINE, offsets
from blockadapt.kernels.cpu.spectral import Formula
from blockadapt.kernels.cpu.step import worker
from blockadapt.kernels.cpu.tables import ADDRESS, ENTRY, GRAD, TENSORS, TERMS, Entries, Extents
from blockadapt.kernels.cpu.threads import ready, run_on_threads
from blockadapt.kernels.layout import TILE
from blockadapt.kernels.segments import Segments
from blockadapt.kernels.work_lists import WorkList
from blockadapt.spectrum import InverseRoot, SpectralFunction
from blockadapt.validation import Described, refusal

OWNER = "NumbaKernel"
_REALS = {torch.float32: np.float32, torch.float64: np.float64}


class NumbaWorkList(WorkList):
    """Holds all that the threads read.

    It has one scratch, and the addresses of one step's gradients. So only the last step that was filled in can be
    carried out, once, and one Python thread at a time does either.
    """

    def __init__(self, batch: Batch, places: Sequence[Place], refresh: bool, tally: Tally | None = None) -> None:
        super().__init__(OWNER, batch, places)
        real = _REALS[batch.dtype]
        self._worker = worker_for(real, lanes_formula(batch.function)).ctypes
        pieces = _pieces(places)
        self._of = np.array([i for i, _ in pieces])
        self._tensors = np.array([_tensor_rows(places[i], extents) for i, extents in pieces], dtype=np.int64)
        self._extents = np.array([extents for _, extents in pieces], dtype=np.int64)
        self._coefficients = np.empty((len(pieces), TERMS), dtype=real)
        self._starts = np.cumsum([0, *(extents.blocks for _, extents in pieces)], dtype=np.int64)
        self._tally, self._pair = tally, torch.zeros(2, dtype=torch.float64, device="cpu")
        self._pair_here = self._pair.numpy()
        self._sums = np.zeros((2, 0 if tally is None else -(-int(self._starts[-1]) // TILE)))
        self._threads = self._number = 0
        self._written: np.ndarray | None = None
        self._lock = Lock()
        sweeps = thresholds.CPU_SWEEPS * batch.n
        entries = Entries(
            ticket=0,
            workers=0,
            by_jacobi=0,
            n=batch.n,
            pieces=len(pieces),
            portions=0,
            sweeps=sweeps,
            kept=not refresh,
            scratch_bytes=offsets.py_func(batch.n, sweeps, self._coefficients.itemsize).end,
            tensors_at=self._tensors.ctypes.data,
            extents_at=self._extents.ctypes.data,
            coefficients_at=self._coefficients.ctypes.data,
            starts_at=self._starts.ctypes.data,
            portions_at=0,
            scratch_at=0,
            counted=self._sums.shape[1],
            sums_at=self._sums.ctypes.data,
        )
        self._entries = np.array(entries, dtype=np.int64)
        self._at = self._entries.ctypes.data

    def fill_in_(self, segments: Sequence[Segment]) -> int:
        """Fill in what each step brings anew; nothing is left then that could raise. Returns the step's number."""
        with self._lock:
            self._number += 1
            self._fill_in_(segments)
            return self._number

    def _fill_in_(self, segments: Sequence[Segment]) -> None:
        columns = Segments.of(segments)
        begins = self.gradients_at(columns.grads)
        if begins is not self._written:
            self._tensors[:, GRAD, ADDRESS], self._written = begins[self._of], begins
        coefficients = [recipe.coefficients for recipe in columns.recipes]
        distinct = {id(each): each for each in coefficients}  # one for each group and step, whatever its tensors
        self._coefficients[:] = coefficients[0].terms
        if len(distinct) > 1:
            rows = np.array([each.terms for each in distinct.values()], dtype=self._coefficients.dtype)
            number = {key: i for i, key in enumerate(distinct)}
            self._coefficients[:] = rows[np.array([number[id(each)] for each in coefficients])[self._of]]
        self._correction = float(coefficients[0].first.correction)  # those that are measured together have it in common
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._share_out_(threads)
        ready(self._workers)
        self._entries[[ENTRY.ticket, ENTRY.workers, ENTRY.by_jacobi]] = 0

    def _share_out_(self, threads: int) -> None:
        """Cut the tiles into portions, and give each of the threads its scratch."""
        tiles = -(-int(self._starts[-1]) // TILE)
        portions = _portions(tiles, threads, least=4 if self._batch.n > 1 else 512)
        workers = min(threads, len(portions) - 1)
        scratch = np.empty(workers * int(self._entries[ENTRY.scratch_bytes]) + LINE, dtype=np.uint8)
        self._entries[ENTRY.portions] = len(portions) - 1
        self._entries[ENTRY.portions_at] = portions.ctypes.data
        self._entries[ENTRY.scratch_at] = scratch.ctypes.data + -scratch.ctypes.data % LINE
        self._threads, self._workers, self._portions, self._scratch = threads, workers, portions, scratch

    def carry_out_(self, number: int) -> None:
        """Take this step. What the tiles have measured is added up in their order, into memory that is there.

        Raises:
            RuntimeError: It was taken already, or another step of the same blocks was made ready since.
        """
        with self._lock:
            if number != self._number:
                rule = "written once, before another of the same blocks is prepared"
                raise RuntimeError(refusal(OWNER, "change", rule, Described("another one")))
            self._number += 1
            run_on_threads(self._worker, self._at, self._workers)
            if self._tally is not None:
                np.add.reduce(self._sums, axis=1, out=self._pair_here)
                self._tally.add(self._pair, self._correction)

    @property
    def by_jacobi(self) -> int:
        """Count the blocks that the last step solved by Jacobi's method."""
        return int(self._entries[ENTRY.by_jacobi])


def _portions(tiles: int, threads: int, least: int) -> np.ndarray:
    """Say where the portions begin that threads take: long ones first, to run through memory, then ever shorter ones.

    So all threads finish together, also where one is slower than another.
    """
    starts = [0]
    while (left := tiles - starts[-1]) > 0:
        starts.append(starts[-1] + min(left, max(least, left // (2 * threads))))
    return np.array(starts, dtype=np.int64)


def _pieces(places: Sequence[Place]) -> list[tuple[int, Extents]]:
    """Cut places into the pieces of a work list, each with the number of its place.

    A kept basis lies in tiles. So the full tiles of all places come first, and the blocks that are left after them
    share tiles. Elsewhere a piece is a whole place.
    """
    pieces = [
        (i, Extents(place.x.shape[1], place.x.shape[2], 0, place.num_blocks, 0)) for i, place in enumerate(places)
    ]
    if places[0].basis is None or places[0].n == 1:
        return pieces
    rests = [extents.blocks % TILE for _, extents in pieces]
    full = [
        (i, extents._replace(blocks=extents.blocks - rest)) for (i, extents), rest in zip(pieces, rests, strict=True)
    ]
    left = [
        (i, extents._replace(first=extents.blocks - rest, blocks=rest, rest=rest))
        for (i, extents), rest in zip(pieces, rests, strict=True)
    ]
    return [(i, extents) for i, extents in (*full, *left) if extents.blocks]


def _tensor_rows(place: Place, extents: Extents) -> list[tuple[int, ...]]:
    """Say where each of `TENSORS` lies. The gradient lies as x does, and its address is filled in later."""

    def row(name: str) -> tuple[int, ...]:
        tensor: Tensor | None = place.x if name == "grad" else getattr(place, name)
        if tensor is None:
            return 0, 0, 0, 0
        if name in ("basis", "eigenvalues"):
            width = tensor.numel() // place.num_blocks
            return tensor.data_ptr() + extents.first * width * tensor.itemsize, 0, 0, 0
        return (tensor.data_ptr(), *(stride * tensor.itemsize for stride in tensor.stride()))

    return [*map(row, TENSORS)]


# What threads run -------------------------------------------------------------------------------------------------


def lanes_formula(function: SpectralFunction) -> Callable[..., Any] | None:
    """Return a function's formula for lanes, as a plain function; None for `InverseRoot`, which is built in."""
    formula = None if type(function) is InverseRoot else function.lanes
    plain: Callable[..., Any] | None = getattr(formula, "__func__", formula)  # one written as a method has been bound
    return plain


@lru_cache(maxsize=64)
def worker_for(real: Any, formula: Callable[..., Any] | None) -> Any:
    """Compile the function that a thread runs; it is in the attribute `ctypes`.

    With a formula of the user's it is compiled in memory, anew in each process: it is not kept on disk.

    Raises:
        ValueError: The formula does not compile.
    """
    if formula is None:
        return compiled(worker(real), real.__name__)
    try:
        return numba.cfunc("void(voidptr)", error_model="numpy")(worker(real, Formula(formula)))
    except numba.core.errors.NumbaError as error:
        rule = "a function of (eigenvalue, lr, damping) in the vocabulary of `blockadapt.kernels.cpu.simd`"
        raise ValueError(refusal(OWNER, "lanes", rule, formula)) from error
