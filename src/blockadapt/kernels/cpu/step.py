"""Takes a step for 32 blocks at a time: out of memory into lanes, through the update, and back.

For each tile, in one pass over memory:

    1  read x, g, m; update m
    2  update V where it lies, and go on with the copy in cache
    3  y = Uᵀ m, by solving the eigenproblem (`eigensolver`) or with the basis that was kept
    4  y ← s(Λ) y, any function of the eigenvalues
    5  x ← x − U y

Where the inverse root is all that is asked for, `partial_fractions` gives U s(Λ) Uᵀ m without 3 and 4 in most tiles.
The few of their blocks that it is not for are put off, and solved 32 at a time.

Nothing here allocates and nothing can fail: all memory is the thread's scratch (`scratch`), and a block that the QR
sweeps do not solve is solved by Jacobi's method. Letters as in `eigensolver`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from blockadapt.kernels.cpu.ahead import note_
from blockadapt.kernels.cpu.effective import tally_
from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.kept_basis import step_in_kept_basis_
from blockadapt.kernels.cpu.new_basis import step_by_jacobi_, step_in_new_basis_
from blockadapt.kernels.cpu.ones import advance_ones
from blockadapt.kernels.cpu.scratch import scratch_at
from blockadapt.kernels.cpu.simd import LANES, all_lanes, broadcast, fma, load, pointer, select, store, take_ticket
from blockadapt.kernels.cpu.spectral import INVERSE_ROOT, Formula
from blockadapt.kernels.cpu.tables import (
    ADDRESS,
    BASIS,
    EIGENVALUES,
    ENTRIES,
    ENTRY,
    EXTENT,
    GRAD,
    TENSORS,
    TERM,
    TERMS,
    M,
    Tables,
    X,
)
from blockadapt.kernels.cpu.tile_io import (
    WITHIN,
    fetch_,
    fill_,
    full_tile,
    is_full,
    locate,
    locate_each_,
    locate_kept_,
    move_on_,
    put_,
)


def worker(real: Any, formula: Formula = INVERSE_ROOT) -> Callable[[Any], None]:
    """Make the C function that each thread runs, for one float type and spectral function."""

    def work(data: Any) -> None:
        entries = carray(data, (ENTRIES,), np.int64)
        shape = entries[ENTRY.pieces], TERMS
        carry_out(entries, carray(pointer(entries[ENTRY.coefficients_at]), shape, real), formula)

    return work


@jit
def carry_out(entries: Any, coefficients: Any, formula: Any) -> None:
    """Carry out a work list as one of its threads: take the next portion of tiles until none is left."""
    n, pieces, most, kept = entries[ENTRY.n], entries[ENTRY.pieces], entries[ENTRY.sweeps], entries[ENTRY.kept] != 0
    tables = Tables(
        tensors=carray(pointer(entries[ENTRY.tensors_at]), (pieces, len(TENSORS), 4), np.int64),
        extents=carray(pointer(entries[ENTRY.extents_at]), (pieces, len(EXTENT)), np.int64),
        coefficients=coefficients,
        starts=carray(pointer(entries[ENTRY.starts_at]), (pieces + 1,), np.int64),
        sums=carray(pointer(entries[ENTRY.sums_at]), (2, entries[ENTRY.counted]), np.float64),
    )
    portions = carray(pointer(entries[ENTRY.portions_at]), (entries[ENTRY.portions] + 1,), np.int64)
    thread = take_ticket(entries, ENTRY.workers)
    measured = entries[ENTRY.counted] != 0
    s = scratch_at(entries[ENTRY.scratch_at] + thread * entries[ENTRY.scratch_bytes], n, most, coefficients, measured)
    s.lie.blank[:] = 0
    while True:
        portion = take_ticket(entries, ENTRY.ticket)
        if portion >= entries[ENTRY.portions]:
            return
        if n == 1:
            advance_ones(tables, portions[portion], portions[portion + 1], s, formula)
        else:
            for _ in range(advance(n, tables, portions[portion], portions[portion + 1], s, most, kept, formula)):
                take_ticket(entries, ENTRY.by_jacobi)


@jit
def advance(n: int, tables: Any, first: int, last: int, s: Any, most: int, kept: bool, formula: Any) -> int:
    """Take the step for tiles [first, last) of blocks of n; see the module's head.

    `kept` uses each block's kept basis instead of finding it. Blocks that `step_in_new_basis_` puts off come again, as
    many at a time as there are lanes: their V and m are this step's by then, and their x is not. Returns how many
    blocks Jacobi's method has solved.
    """
    L = LANES
    has = tables.tensors[0, :, ADDRESS]
    lie, size = s.lie, s.x.itemsize
    zero, one = broadcast(s.x.dtype.type(0)), broadcast(s.x.dtype.type(1))
    filled = -1  # the one piece whose coefficients the lanes hold
    contiguous, run, together, by_jacobi = 0, 0, 0, 0
    tile, waiting = first - 1, 0
    while tile + 1 < last or waiting > 0:
        again = waiting >= L or tile + 1 == last
        if again:
            taken = min(waiting, L)
            waiting -= taken
            locate_each_(tables, s.waiting, waiting, taken, lie)
            contiguous, run = 0, 0
        elif run > 1:
            move_on_(tables, lie)
            run -= 1
        else:
            contiguous, run = locate(n, tables, (tile + 1) * L, lie)
        tile += not again
        if filled < 0 or lie.owners[0] != filled or lie.owners[L - 1] != filled:
            fill_(s.terms, tables.coefficients, lie.owners)
            filled = lie.owners[0] if lie.owners[0] == lie.owners[L - 1] else -1
        if again:  # V is this step's already
            store(s.terms, TERM.second.decay * L, one)
            store(s.terms, TERM.second.weight * L, zero)
            filled = -1
        fetch_(n, s.x, lie.where[X], lie.steps[X], lie.lengths, contiguous, lie.spare)
        fetch_(n, s.g, lie.where[GRAD], lie.steps[GRAD], lie.lengths, contiguous, lie.spare)
        if has[M] != 0:
            fetch_(n, s.m, lie.where[M], lie.steps[M], lie.lengths, contiguous, lie.spare)
        basis = full_tile(tables, BASIS, n * (n - 1) // 2, tile, lie, s.x)
        eigenvalues = full_tile(tables, EIGENVALUES, n, tile, lie, s.x)
        apart = has[BASIS] != 0 and not is_full(tables, lie)
        if apart:
            together = locate_kept_(tables, tile * L, lie, size)
            basis, eigenvalues = s.basis, s.eigenvalues
        if apart and kept:
            fetch_(n * (n - 1) // 2, basis, lie.where[BASIS], lie.steps[BASIS], lie.kept, together, lie.spare)
            fetch_(n, eigenvalues, lie.where[EIGENVALUES], lie.steps[EIGENVALUES], lie.kept, together, lie.spare)
        noted = 0 if again else note_(n, tables, tile, s, contiguous == WITHIN, L)
        average_(n, s, has[M] != 0, again, L)
        if has[M] != 0:
            put_(n, s.m, lie.where[M], lie.steps[M], lie.lengths, contiguous, lie.spare)
        put_off = zero < zero
        if kept:
            finite = step_in_kept_basis_(n, s, basis, eigenvalues, has, formula, noted, L)
        else:
            finite, solved, put_off = step_in_new_basis_(n, s, basis, eigenvalues, has, most, formula, noted, again, L)
            if not all_lanes(solved | ~finite):
                store(s.u, 0, select(solved | ~finite, zero, one))
                for lane in range(L):
                    if s.u[lane] != 0:
                        step_by_jacobi_(n, lane, s, basis, eigenvalues, has, formula, L)
                        by_jacobi += 1
            if not all_lanes(~put_off):
                waiting = put_off_(put_off, tile * L, s, waiting, L)
        tally_(tables, tile, s.sums, L)
        move_(n, s, finite, put_off, L)
        put_(n, s.x, lie.where[X], lie.steps[X], lie.lengths, contiguous, lie.spare)
        if apart and not kept:
            put_(n * (n - 1) // 2, basis, lie.where[BASIS], lie.steps[BASIS], lie.kept, together, lie.spare)
        if apart:
            put_(n, eigenvalues, lie.where[EIGENVALUES], lie.steps[EIGENVALUES], lie.kept, together, lie.spare)
    return by_jacobi


@inlined
def average_(n: int, s: Any, has_m: bool, again: bool, L: int) -> None:
    """Set g ← sign g + coupled x, m ← β₁ m + (1 − β₁) g, and y = m, or g where there is no m; m has it all `again`."""
    terms = s.terms
    sign, coupled = load(terms, TERM.descent.sign * L), load(terms, TERM.descent.coupled * L)
    beta1 = load(terms, TERM.first.beta * L)
    for i in range(n):
        gradient = fma(coupled, load(s.x, i * L), sign * load(s.g, i * L))
        store(s.g, i * L, gradient)
        average = gradient
        if has_m:
            average = load(s.m, i * L)
            if not again:
                average = fma(beta1, average - gradient, gradient)
            store(s.m, i * L, average)
        store(s.y, i * L, average)


@inlined
def put_off_(mask: Any, block: int, s: Any, waiting: int, L: int) -> int:
    """Add the blocks of these lanes, from `block` on, to those that wait; returns how many wait then."""
    store(s.u, 0, select(mask, broadcast(s.u.dtype.type(1)), broadcast(s.u.dtype.type(0))))
    for lane in range(L):
        if s.u[lane] != 0 and s.lie.lengths[lane] > 0:
            s.waiting[waiting] = block + lane
            waiting += 1
    return waiting


@inlined
def move_(n: int, s: Any, finite: Any, put_off: Any, L: int) -> None:
    """Set x ← shrink x − y; it is NaN in lanes that are not finite, and stays in those that are put off."""
    unknown = broadcast(s.x.dtype.type(np.nan))
    shrink = load(s.terms, TERM.descent.shrink * L)
    for i in range(n):
        move = select(finite, load(s.y, i * L), unknown)
        x = load(s.x, i * L)
        store(s.x, i * L, select(put_off, x, fma(shrink, x, -move)))
