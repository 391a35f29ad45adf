"""Solves many small symmetric eigenproblems at once, one in each SIMD lane.

    1  T = Hᵀ V H, Householder reflections to tridiagonal form            y ← Hᵀ m
    2  Λ = Rᵀ T R, implicit QR with Wilkinson shifts, rotations logged    y ← Rᵀ y
    3  whatever is done to y = Uᵀ m, with the eigenvalues at hand
    4  y ← H R y, the log and the reflections backwards

Eigenvectors are not formed unless asked for: y is carried along instead. All lanes sweep together; a lane that has
converged gets identity rotations, so its numbers do not depend on its neighbours, nor on the number of threads.
`eigensolver_reference` does the same for one block in plain NumPy.

Letters: n block size, L lanes, a packed lower triangle [n(n+1)/2, L], d and e the tridiagonal [n, L], y and g [n, L].
Rows of lanes are addressed by their first element. References: Golub and Van Loan, Matrix Computations, 8.3; the
rotation recurrence is that of EISPACK's imtql2 (Dubrulle, Martin and Wilkinson 1968) with the ends exchanged.
"""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.ahead import ask, ask_rest
from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.simd import (
    absolute,
    all_lanes,
    broadcast,
    fma,
    load,
    narrow,
    reciprocal_sqrt,
    select,
    sqrt,
    store,
    widen,
)
from blockadapt.kernels.cpu.thresholds import thresholds
from blockadapt.kernels.cpu.tridiagonal import four_columns

# Blocks of 2, in one rotation -------------------------------------------------------------------------------------


@jit
def diagonalise_2x2_(a: Any, d: Any, e: Any, y: Any, log: Any, L: int) -> None:
    """Find Λ = Rᵀ A R and y ← Rᵀ y for blocks of 2 by one Jacobi rotation, in float64, logged as a sweep of one row."""
    zero, one, half = broadcast(0.0), broadcast(1.0), broadcast(0.5)
    first, off, second = widen(load(a, 0)), widen(load(a, L)), widen(load(a, 2 * L))
    none = off == zero
    slope = half * (first - second) / select(none, one, off)  # cot 2θ
    root = sqrt(fma(slope, slope, one))
    t = select(none, zero, one / select(slope < zero, slope - root, slope + root))
    c = one / sqrt(fma(t, t, one))
    s = t * c
    store(d, 0, narrow(fma(t, off, first), d))
    store(d, L, narrow(fma(-t, off, second), d))
    store(e, 0, narrow(zero, e))
    top, bottom = widen(load(y, 0)), widen(load(y, L))
    store(y, 0, narrow(fma(c, top, s * bottom), y))
    store(y, L, narrow(fma(c, bottom, -(s * top)), y))
    store(log, 0, narrow(c, log))
    store(log, L, narrow(s, log))


# Stage 2: eigenvalues ---------------------------------------------------------------------------------------------


@jit
def small_end_first(n: int, d: Any, e: Any, L: int) -> Any:
    """Say in which lanes T has its small end on top: sweeps run from the large end to the small one.

    The other way the shift gets lost among larger numbers, and with it the accuracy of small eigenvalues. As in LAPACK,
    the ends compared are those of what is coupled; an end that is noise beside the largest entry says nothing.
    """
    f = d.dtype.type
    limits = thresholds(d)
    noise = broadcast(f(limits.roundoff))
    top, bottom = load(d, 0), load(d, 0)
    for i in range(n - 1):
        bottom = select(noise < absolute(load(e, i * L)), load(d, (i + 1) * L), bottom)
    for i in range(n - 2, -1, -1):
        top = select(noise < absolute(load(e, i * L)), load(d, i * L), top)
    significant = broadcast(f(limits.end)) < absolute(bottom)
    return significant & (absolute(top) * broadcast(f(limits.lopsided)) < absolute(bottom))


@jit
def reverse_(n: int, rows: Any, mask: Any, columns: int, L: int) -> None:
    """Reverse the order of n rows of `columns` entries in the lanes of the mask."""
    for i in range(n // 2):
        for j in range(columns):
            here, there = (i * columns + j) * L, ((n - 1 - i) * columns + j) * L
            low, high = load(rows, here), load(rows, there)
            store(rows, here, select(mask, high, low))
            store(rows, there, select(mask, low, high))


@jit
def diagonalise_(n: int, d: Any, e: Any, y: Any, log: Any, ends: Any, most: int, ahead: Any, noted: int, L: int) -> int:
    """Find Λ = Rᵀ T R, in d, and y ← Rᵀ y. Each sweep's rotations go to `log`, its last row to `ends`.

    A sweep runs through the rows that some lane still works on. Each lane has its own shift, from the last 2 × 2 that
    is coupled there: its corner. With each rotation a pair of lines is asked for, see `ahead`.

    Returns the number of sweeps; where e is not all zero afterwards, `most` was not enough.
    """
    zero = broadcast(d.dtype.type(0))
    corner = decouple_(n, d, e, L)
    hi = n - 1
    sweeps, rotations = 0, 0
    while hi > 0 and sweeps < most:
        if all_lanes(load(e, (hi - 1) * L) == zero):
            hi -= 1
            continue
        ends[sweeps] = hi
        sweeps += 1
        corner = sweep_(hi, wilkinson_shift(corner, d), d, e, y, log, rotations, ahead, noted, L)
        rotations += hi
    ask_rest(ahead, noted, rotations)
    return sweeps


@inlined
def decouple_(n: int, d: Any, e: Any, L: int) -> Any:
    """Zero the e that are negligible; returns the corner."""
    f = d.dtype.type
    zero, floor = broadcast(f(0)), broadcast(f(thresholds(d).coupling))
    corner = zero, zero, zero
    for i in range(n - 1):
        off, above, here = load(e, i * L), load(d, i * L), load(d, (i + 1) * L)
        coupled = is_coupled(off, above, here, floor, d)
        store(e, i * L, select(coupled, off, zero))
        corner = coupled_corner(coupled, corner, off, above, here)
    return corner


@inlined
def is_coupled(off: Any, above: Any, here: Any, floor: Any, like: Any) -> Any:
    """Say whether an e counts beside its neighbours on the diagonal: |e| > ε (d + d') + floor."""
    roundoff = broadcast(like.dtype.type(thresholds(like).roundoff))
    return fma(above + here, roundoff, floor) < absolute(off)


@inlined
def coupled_corner(coupled: Any, corner: Any, off: Any, above: Any, here: Any) -> Any:
    """Keep the corner (e, d, d') so far, or take the one that ends here where its e counts."""
    return select(coupled, off, corner[0]), select(coupled, above, corner[1]), select(coupled, here, corner[2])


@inlined
def wilkinson_shift(corner: Any, like: Any) -> Any:
    """Compute the corner's eigenvalue that is nearer to its last entry; that entry itself where nothing is coupled."""
    f = like.dtype.type
    zero, one, half = broadcast(f(0)), broadcast(f(1)), broadcast(f(0.5))
    off, above, last = corner
    gap = half * (above - last)
    square = off * off
    root = sqrt(fma(gap, gap, square))
    denominator = select(gap < zero, gap - root, gap + root)
    return last - square / select(off == zero, one, denominator)


@inlined
def sweep_(
    hi: int, shift: Any, d: Any, e: Any, y: Any, log: Any, rotations: int, ahead: Any, noted: int, L: int
) -> Any:
    """Make one QR sweep through rows 0 … hi with this shift: a bulge is chased down; returns the corner afterwards.

    Where T falls apart (e = 0) the bulge starts anew, and a row that is done gets exact identities.
    """
    f = d.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    limits = thresholds(d)
    floor, nothing = broadcast(f(limits.coupling)), broadcast(f(limits.bulge))
    here, y_here = load(d, 0), load(y, 0)
    g, c, s, p = here - shift, one, one, zero
    above = zero
    apart = one == zero
    corner = zero, zero, zero
    position = 2 * L * rotations
    for i in range(hi):
        off = load(e, i * L)
        bulge = s * off
        b = c * off
        square = bulge * bulge
        turning = nothing < square
        square = fma(g, g, square)
        inverse = reciprocal_sqrt(square)
        c = select(turning, g * inverse, one)
        s = select(turning, bulge * inverse, zero)
        r = select(turning, square * inverse, g)
        below = load(d, (i + 1) * L)
        g = here - p
        t = fma(below - g, s, c * (b + b))
        p = s * t
        diagonal = g + p
        store(d, i * L, diagonal)
        g = fma(c, t, -b)
        if i > 0:
            coupled = ~apart & is_coupled(r, above, diagonal, floor, d)
            store(e, (i - 1) * L, select(coupled, r, zero))
            corner = coupled_corner(coupled, corner, r, above, diagonal)
        y_below = load(y, (i + 1) * L)
        store(y, i * L, fma(c, y_here, s * y_below))
        y_here = fma(-s, y_here, c * y_below)
        store(log, position, c)
        store(log, position + L, s)
        position += 2 * L
        ask(ahead, noted, rotations + i)
        apart = off == zero  # then c = 1 and p = 0 already
        s = select(apart, one, s)
        g = select(apart, below - shift, g)
        above = diagonal
        here = below
    diagonal = here - p
    coupled = ~apart & is_coupled(g, above, diagonal, floor, d)
    store(e, (hi - 1) * L, select(coupled, g, zero))
    store(d, hi * L, diagonal)
    store(y, hi * L, y_here)
    return coupled_corner(coupled, corner, g, above, diagonal)


# Stage 4: back ----------------------------------------------------------------------------------------------------


@jit
def apply_rotations_(y: Any, log: Any, ends: Any, sweeps: int, L: int) -> None:
    """Set y ← R y."""
    position = 0
    for sweep in range(sweeps):
        position += 2 * L * ends[sweep]
    for sweep in range(sweeps - 1, -1, -1):
        bottom = load(y, ends[sweep] * L)
        for i in range(ends[sweep] - 1, -1, -1):
            position -= 2 * L
            c, s = load(log, position), load(log, position + L)
            top = load(y, i * L)
            store(y, (i + 1) * L, fma(s, top, c * bottom))
            bottom = fma(-s, bottom, c * top)  # so that one sum waits for the row before, not two operations
        store(y, 0, bottom)


@jit
def form_rotations_(n: int, u: Any, log: Any, ends: Any, sweeps: int, L: int) -> None:
    """Make U = R, n rows of n columns. Rows and columns that no later sweep has touched are still those of I: left out.

    Four columns at once share the rotations; between two rotations their common row stays in registers.
    """
    f = u.dtype.type
    for i in range(n * n):
        store(u, i * L, broadcast(f(1)) if i % (n + 1) == 0 else broadcast(f(0)))
    position = 0
    for sweep in range(sweeps):
        position += 2 * L * ends[sweep]
    for sweep in range(sweeps - 1, -1, -1):
        hi = ends[sweep]
        for first in range(0, hi + 1, 4):
            j0, j1, j2, j3 = four_columns(first, n, L)
            row = hi * n * L
            b0, b1, b2, b3 = load(u, row + j0), load(u, row + j1), load(u, row + j2), load(u, row + j3)
            at = position
            for _ in range(hi):
                at -= 2 * L
                c, s = load(log, at), load(log, at + L)
                above = row - n * L
                t0, t1, t2, t3 = load(u, above + j0), load(u, above + j1), load(u, above + j2), load(u, above + j3)
                store(u, row + j0, fma(s, t0, c * b0))
                store(u, row + j1, fma(s, t1, c * b1))
                store(u, row + j2, fma(s, t2, c * b2))
                store(u, row + j3, fma(s, t3, c * b3))
                b0, b1 = fma(-s, b0, c * t0), fma(-s, b1, c * t1)
                b2, b3 = fma(-s, b2, c * t2), fma(-s, b3, c * t3)
                row = above
            store(u, j0, b0)
            store(u, j1, b1)
            store(u, j2, b2)
            store(u, j3, b3)
        position -= 2 * L * hi
