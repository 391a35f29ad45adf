"""Many small symmetric eigenproblems at once, one in each SIMD lane.

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

import numba
from numba.extending import overload

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

# Stage 1: tridiagonal form ----------------------------------------------------------------------------------------


@jit
def tridiagonalise_(n: int, a: Any, h: Any, d: Any, e: Any, y: Any, u: Any, q: Any, least: float, L: int) -> None:
    """T = Hᵀ A H and y ← Hᵀ y. The reflections I − u uᵀ/h stay in a's columns, 1/h in `h`.

    Columns whose squares below the subdiagonal sum to no more than `least` are taken for tridiagonal.
    """
    for k in range(n - 2):
        inverse = reflection_(n, k, a, h, e, u, least, L)
        reflect_(n, k, a, y, u, q, inverse, L)
    for i in range(n):
        store(d, i * L, load(a, (i * (i + 1) // 2 + i) * L))
    if n > 1:
        store(e, (n - 2) * L, load(a, ((n - 1) * n // 2 + n - 2) * L))


@inlined
def reflection_(n: int, k: int, a: Any, h: Any, e: Any, u: Any, least: float, L: int) -> Any:
    """u and 1/h of the reflection that takes column k of A below its diagonal to (β, 0, …, 0); returns 1/h."""
    f = a.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    head = ((k + 1) * (k + 2) // 2 + k) * L
    alpha = load(a, head)
    below = zero
    for i in range(k + 2, n):
        entry = load(a, (i * (i + 1) // 2 + k) * L)
        below = fma(entry, entry, below)
    norm = sqrt(fma(alpha, alpha, below))
    tridiagonal = below <= broadcast(f(least))
    beta = select(tridiagonal, alpha, select(alpha < zero, norm, -norm))
    first = alpha - beta
    inverse = select(tridiagonal, zero, one / select(tridiagonal, one, -(beta * first)))
    store(u, (k + 1) * L, first)
    store(a, head, first)
    for i in range(k + 2, n):
        entry = load(a, (i * (i + 1) // 2 + k) * L)
        store(u, i * L, select(tridiagonal, zero, entry))  # a tiny entry would breed denormal numbers
    store(h, k * L, inverse)
    store(e, k * L, beta)
    return inverse


@inlined
def reflect_(n: int, k: int, a: Any, y: Any, u: Any, q: Any, inverse: Any, L: int) -> None:
    """Hᵀ A H = A − q uᵀ − u qᵀ with q = A u / h − (uᵀ A u / 2h²) u, below and right of column k, and y ← Hᵀ y."""
    f = a.dtype.type
    zero, half = broadcast(f(0)), broadcast(f(0.5))
    inner = zero
    projection = zero
    for i in range(k + 1, n):
        row = i * (i + 1) // 2
        total = zero
        for j in range(k + 1, i + 1):
            total = fma(load(a, (row + j) * L), load(u, j * L), total)
        for j in range(i + 1, n):
            total = fma(load(a, (j * (j + 1) // 2 + i) * L), load(u, j * L), total)
        total = total * inverse
        entry = load(u, i * L)
        inner = fma(total, entry, inner)
        projection = fma(entry, load(y, i * L), projection)
        store(q, i * L, total)
    inner = inner * inverse * half
    projection = projection * inverse
    for i in range(k + 1, n):
        row = i * (i + 1) // 2
        minus_u = -load(u, i * L)
        minus_q = fma(inner, -minus_u, -load(q, i * L))
        store(q, i * L, -minus_q)
        store(y, i * L, fma(projection, minus_u, load(y, i * L)))
        for j in range(k + 1, i + 1):
            entry = load(a, (row + j) * L)
            store(a, (row + j) * L, fma(minus_u, load(q, j * L), fma(minus_q, load(u, j * L), entry)))


def tridiagonalise_in_float64_(
    n: int, a: Any, h: Any, d: Any, e: Any, y: Any, u: Any, q: Any, wide: Any, L: int
) -> None:
    """`tridiagonalise_`, in float64 also for float32 blocks.

    This is where a float32 solver loses its accuracy: n − 2 updates of the matrix, each rounded. In float64 the whole
    step takes a third longer, and its result is closer to the truth than that of LAPACK in float32.
    """
    (_tridiagonalise_widened_ if a.itemsize == 4 else _tridiagonalise_as_it_is_)(n, a, h, d, e, y, u, q, wide, L)


def _tridiagonalise_as_it_is_(
    n: int, a: Any, h: Any, d: Any, e: Any, y: Any, u: Any, q: Any, wide: Any, L: int
) -> None:
    tridiagonalise_(n, a, h, d, e, y, u, q, thresholds(a).column, L)


def _tridiagonalise_widened_(n: int, a: Any, h: Any, d: Any, e: Any, y: Any, u: Any, q: Any, wide: Any, L: int) -> None:
    triangle = n * (n + 1) // 2
    for i in range(triangle):
        store(wide.a, i * L, widen(load(a, i * L)))
    for i in range(n):
        store(wide.y, i * L, widen(load(y, i * L)))
    tridiagonalise_(n, wide.a, wide.h, wide.d, wide.e, wide.y, wide.u, wide.q, thresholds(a).column, L)
    for i in range(triangle):
        store(a, i * L, narrow(load(wide.a, i * L)))
    for rows, wide_rows in ((h, wide.h), (d, wide.d), (e, wide.e), (y, wide.y)):
        for i in range(n):
            store(rows, i * L, narrow(load(wide_rows, i * L)))


@overload(tridiagonalise_in_float64_, inline="never")
def _tridiagonalise_in_float64(
    n: int, a: Any, h: Any, d: Any, e: Any, y: Any, u: Any, q: Any, wide: Any, L: int
) -> Any:
    return _tridiagonalise_widened_ if a.dtype == numba.float32 else _tridiagonalise_as_it_is_


# Blocks of 2, in one rotation -------------------------------------------------------------------------------------


@jit
def diagonalise_2x2_(a: Any, d: Any, e: Any, y: Any, log: Any, L: int) -> None:
    """Λ = Rᵀ A R and y ← Rᵀ y for blocks of 2 by one Jacobi rotation, logged as a sweep of one row."""
    f = a.dtype.type
    zero, one, half = broadcast(f(0)), broadcast(f(1)), broadcast(f(0.5))
    first, off, second = load(a, 0), load(a, L), load(a, 2 * L)
    none = off == zero
    slope = half * (first - second) / select(none, one, off)  # cot 2θ
    root = sqrt(fma(slope, slope, one))
    t = select(none, zero, one / select(slope < zero, slope - root, slope + root))
    c = one / sqrt(fma(t, t, one))
    s = t * c
    store(d, 0, fma(t, off, first))
    store(d, L, fma(-t, off, second))
    store(e, 0, zero)
    top, bottom = load(y, 0), load(y, L)
    store(y, 0, fma(c, top, s * bottom))
    store(y, L, fma(c, bottom, -(s * top)))
    store(log, 0, c)
    store(log, L, s)


def diagonalise_2x2_in_float64_(a: Any, d: Any, e: Any, y: Any, log: Any, wide: Any, L: int) -> None:
    """`diagonalise_2x2_`, in float64 also for float32 blocks."""
    (_diagonalise_2x2_widened_ if a.itemsize == 4 else _diagonalise_2x2_as_it_is_)(a, d, e, y, log, wide, L)


def _diagonalise_2x2_as_it_is_(a: Any, d: Any, e: Any, y: Any, log: Any, wide: Any, L: int) -> None:
    diagonalise_2x2_(a, d, e, y, log, L)


def _diagonalise_2x2_widened_(a: Any, d: Any, e: Any, y: Any, log: Any, wide: Any, L: int) -> None:
    for i in range(3):
        store(wide.a, i * L, widen(load(a, i * L)))
    for i in range(2):
        store(wide.y, i * L, widen(load(y, i * L)))
    diagonalise_2x2_(wide.a, wide.d, wide.e, wide.y, wide.u, L)
    store(e, 0, broadcast(e.dtype.type(0)))
    for rows, wide_rows in ((d, wide.d), (y, wide.y), (log, wide.u)):
        for i in range(2):
            store(rows, i * L, narrow(load(wide_rows, i * L)))


@overload(diagonalise_2x2_in_float64_, inline="never")
def _diagonalise_2x2_in_float64(a: Any, d: Any, e: Any, y: Any, log: Any, wide: Any, L: int) -> Any:
    return _diagonalise_2x2_widened_ if a.dtype == numba.float32 else _diagonalise_2x2_as_it_is_


# Stage 2: eigenvalues ---------------------------------------------------------------------------------------------


@jit
def small_end_first(n: int, d: Any, e: Any, L: int) -> Any:
    """Where T has its small end on top: sweeps run from the large end to the small one.

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
    """Reverse the order of n rows of so many columns in the lanes of the mask."""
    for i in range(n // 2):
        for j in range(columns):
            here, there = (i * columns + j) * L, ((n - 1 - i) * columns + j) * L
            low, high = load(rows, here), load(rows, there)
            store(rows, here, select(mask, high, low))
            store(rows, there, select(mask, low, high))


@jit
def diagonalise_(n: int, d: Any, e: Any, y: Any, log: Any, ends: Any, most: int, L: int) -> int:
    """Λ = Rᵀ T R into d and y ← Rᵀ y. Each sweep's rotations go to `log`, its last row to `ends`.

    A sweep runs through the rows that some lane still works on. Each lane has its own shift, from the last 2 × 2 that
    is coupled there: its corner.
    Returns the number of sweeps; where e is not all zero afterwards, `most` was not enough.
    """
    zero = broadcast(d.dtype.type(0))
    corner = decouple_(n, d, e, L)
    hi = n - 1
    sweeps = 0
    position = 0
    while hi > 0 and sweeps < most:
        if all_lanes(load(e, (hi - 1) * L) == zero):
            hi -= 1
            continue
        ends[sweeps] = hi
        sweeps += 1
        corner = sweep_(hi, wilkinson_shift(corner, d), d, e, y, log, position, L)
        position += 2 * L * hi
    return sweeps


@inlined
def decouple_(n: int, d: Any, e: Any, L: int) -> Any:
    """Zero the e that are negligible; returns the corner."""
    f = d.dtype.type
    zero, floor = broadcast(f(0)), broadcast(f(thresholds(d).coupling))
    corner = zero, zero, zero
    for i in range(n - 1):
        off, above, here = load(e, i * L), load(d, i * L), load(d, (i + 1) * L)
        small = is_negligible(off, above, here, floor, d)
        store(e, i * L, select(small, zero, off))
        corner = coupled_corner(small, corner, off, above, here)
    return corner


@inlined
def is_negligible(off: Any, above: Any, here: Any, floor: Any, like: Any) -> Any:
    """Whether an e is zero beside its neighbours on the diagonal: |e| ≤ ε (d + d') + floor."""
    roundoff = broadcast(like.dtype.type(thresholds(like).roundoff))
    return absolute(off) <= fma(above + here, roundoff, floor)


@inlined
def coupled_corner(small: Any, corner: Any, off: Any, above: Any, here: Any) -> Any:
    """The corner (e, d, d') so far, or the one that ends here where its e is not negligible."""
    return select(small, corner[0], off), select(small, corner[1], above), select(small, corner[2], here)


@inlined
def wilkinson_shift(corner: Any, like: Any) -> Any:
    """The eigenvalue of the corner that is nearer to its last entry; that entry itself where nothing is coupled."""
    f = like.dtype.type
    zero, one, half = broadcast(f(0)), broadcast(f(1)), broadcast(f(0.5))
    off, above, last = corner
    gap = half * (above - last)
    square = off * off
    root = sqrt(fma(gap, gap, square))
    denominator = select(gap < zero, gap - root, gap + root)
    return last - square / select(off == zero, one, denominator)


@inlined
def sweep_(hi: int, shift: Any, d: Any, e: Any, y: Any, log: Any, position: int, L: int) -> Any:
    """One QR sweep through rows 0 … hi with this shift: a bulge is chased down; returns the corner afterwards.

    Where T falls apart (e = 0) the bulge starts anew, and a row that is done gets exact identities.
    """
    f = d.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    limits = thresholds(d)
    least, everything = broadcast(f(limits.coupling)), broadcast(f(limits.everything))
    nothing = broadcast(f(limits.bulge))
    here, y_here = load(d, 0), load(y, 0)
    g, c, s, p = here - shift, one, one, zero
    above = zero
    floor = least
    corner = zero, zero, zero
    for i in range(hi):
        off = load(e, i * L)
        bulge = s * off
        b = c * off
        square = bulge * bulge
        identity = square <= nothing
        square = fma(g, g, square)
        inverse = reciprocal_sqrt(square)
        c = select(identity, one, g * inverse)
        s = select(identity, zero, bulge * inverse)
        r = select(identity, g, square * inverse)
        below = load(d, (i + 1) * L)
        g = here - p
        t = fma(below - g, s, c * (b + b))
        p = s * t
        diagonal = g + p
        store(d, i * L, diagonal)
        g = fma(c, t, -b)
        if i > 0:
            small = is_negligible(r, above, diagonal, floor, d)
            store(e, (i - 1) * L, select(small, zero, r))
            corner = coupled_corner(small, corner, r, above, diagonal)
        y_below = load(y, (i + 1) * L)
        store(y, i * L, fma(c, y_here, s * y_below))
        y_here = fma(c, y_below, -(s * y_here))
        store(log, position, c)
        store(log, position + L, s)
        position += 2 * L
        apart = off == zero
        s = select(apart, one, s)
        c = select(apart, one, c)
        g = select(apart, below - shift, g)
        p = select(apart, zero, p)
        floor = select(apart, everything, least)  # what was zero stays so
        above = diagonal
        here = below
    diagonal = here - p
    small = is_negligible(g, above, diagonal, floor, d)
    store(e, (hi - 1) * L, select(small, zero, g))
    store(d, hi * L, diagonal)
    store(y, hi * L, y_here)
    return coupled_corner(small, corner, g, above, diagonal)


# Stage 4: back ----------------------------------------------------------------------------------------------------


@jit
def apply_rotations_(y: Any, log: Any, ends: Any, sweeps: int, L: int) -> None:
    """y ← R y."""
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
            bottom = fma(c, top, -(s * bottom))
        store(y, 0, bottom)


@jit
def apply_reflections_(n: int, a: Any, h: Any, y: Any, L: int) -> None:
    """y ← H y."""
    zero = broadcast(a.dtype.type(0))
    for k in range(n - 3, -1, -1):
        projection = zero
        for i in range(k + 1, n):
            projection = fma(load(a, (i * (i + 1) // 2 + k) * L), load(y, i * L), projection)
        projection = -(projection * load(h, k * L))
        for i in range(k + 1, n):
            store(y, i * L, fma(projection, load(a, (i * (i + 1) // 2 + k) * L), load(y, i * L)))


@jit
def four_columns(first: int, n: int, L: int) -> Any:
    """Where columns first … first + 3 of a row of n begin; past the last one, that one again."""
    last = n - 1
    return min(first, last) * L, min(first + 1, last) * L, min(first + 2, last) * L, min(first + 3, last) * L


@jit
def form_rotations_(n: int, u: Any, log: Any, ends: Any, sweeps: int, L: int) -> None:
    """U = R, n rows of n columns. Rows and columns that no later sweep has touched are still those of I: left out.

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
                b0, b1 = fma(c, t0, -(s * b0)), fma(c, t1, -(s * b1))
                b2, b3 = fma(c, t2, -(s * b2)), fma(c, t3, -(s * b3))
                row = above
            store(u, j0, b0)
            store(u, j1, b1)
            store(u, j2, b2)
            store(u, j3, b3)
        position -= 2 * L * hi


@jit
def reflect_basis_(n: int, a: Any, h: Any, u: Any, L: int) -> None:
    """U ← H U, n rows of n columns, four columns at once."""
    zero = broadcast(a.dtype.type(0))
    for k in range(n - 3, -1, -1):
        inverse = -load(h, k * L)
        for first in range(0, n, 4):
            j0, j1, j2, j3 = four_columns(first, n, L)
            p0, p1, p2, p3 = zero, zero, zero, zero
            for i in range(k + 1, n):
                entry, row = load(a, (i * (i + 1) // 2 + k) * L), i * n * L
                p0, p1 = fma(entry, load(u, row + j0), p0), fma(entry, load(u, row + j1), p1)
                p2, p3 = fma(entry, load(u, row + j2), p2), fma(entry, load(u, row + j3), p3)
            p0, p1, p2, p3 = p0 * inverse, p1 * inverse, p2 * inverse, p3 * inverse
            for i in range(k + 1, n):
                entry, row = load(a, (i * (i + 1) // 2 + k) * L), i * n * L
                u0, u1, u2, u3 = load(u, row + j0), load(u, row + j1), load(u, row + j2), load(u, row + j3)
                store(u, row + j0, fma(p0, entry, u0))
                store(u, row + j1, fma(p1, entry, u1))
                store(u, row + j2, fma(p2, entry, u2))
                store(u, row + j3, fma(p3, entry, u3))
