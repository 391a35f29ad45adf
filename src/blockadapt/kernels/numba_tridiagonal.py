"""The fast CPU kernel: many small symmetric eigenproblems at once, one in each SIMD lane.

For a tile of 32 blocks, in one pass over memory:

    1  read V, add w g gᵀ, write it back, and go on with the copy in cache
    2  T = Hᵀ V H, Householder reflections to tridiagonal form            y ← Hᵀ m
    3  Λ = Rᵀ T R, implicit QR with Wilkinson shifts, rotations logged    y ← Rᵀ y
    4  y ← s(Λ) y, any function of the eigenvalues
    5  y ← H R y, the log and the reflections backwards                   x ← x − y

Eigenvectors are never formed: y = Uᵀ m is carried along instead. All lanes sweep together; a lane that has converged
gets identity rotations, so its numbers do not depend on its neighbours, nor on the number of threads.

Letters: n block size, L lanes, a packed lower triangle [n(n+1)/2, L], d and e the tridiagonal [n, L], y and g [n, L].
Rows of lanes are addressed by their first element. References: Golub and Van Loan, Matrix Computations, 8.3; the
rotation recurrence is that of EISPACK's imtql2 (Dubrulle, Martin and Wilkinson 1968) with the ends exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from blockadapt.kernels.lanes import (
    LANES,
    TURN,
    absolute,
    broadcast,
    every,
    fma,
    gather,
    load,
    load_row,
    maximum,
    minimum,
    narrow,
    pointer,
    power_of_two,
    prefetch,
    reciprocal_sqrt,
    scatter,
    select,
    sqrt,
    store,
    store_row,
    take_ticket,
    turn_in,
    turn_out,
    widen,
)

MAX_SWEEPS = 6
"""QR sweeps allowed for each eigenvalue; two are used. A block that needs more is solved by `eigh`."""

jit = numba.njit(nogil=True, error_model="numpy")

# Columns of the segment table: for each tensor its address and the byte strides of [major, minor, element].
X, GRAD, M, V, LARGEST, BASIS, EIGENVALUES = range(0, 28, 4)
MINOR, LENGTH = 28, 29
TABLE = 30
# Columns of the coefficient table, in the order of a Segment's NamedTuples.
SIGN, COUPLED, SHRINK, BETA1, _, DECAY, WEIGHT, _, LR, CORRECTION, DAMPING, LOWER, UPPER = range(13)
TERMS = 13


@jit
def reduce_(n: int, a: Any, free: Any, h: Any, d: Any, e: Any, y: Any, least: float, L: int) -> None:
    """T = Hᵀ A H and y ← Hᵀ y. The reflections I − u uᵀ/h stay in a's columns, 1/h in `h`. `free` holds 2n rows.

    Columns whose squares sum to no more than `least` are taken for tridiagonal: 1/h must not overflow.
    """
    f = a.dtype.type
    zero, one, half = broadcast(f(0)), broadcast(f(1)), broadcast(f(0.5))
    nothing = broadcast(f(least))
    u, q = free[: n * L], free[n * L : 2 * n * L]
    for k in range(n - 2):
        head = ((k + 1) * (k + 2) // 2 + k) * L
        alpha = load(a, head)
        below = zero
        for i in range(k + 2, n):
            entry = load(a, (i * (i + 1) // 2 + k) * L)
            below = fma(entry, entry, below)
        norm = sqrt(fma(alpha, alpha, below))
        beta = select(alpha < zero, norm, -norm)
        tridiagonal = below <= nothing
        beta = select(tridiagonal, alpha, beta)
        first = alpha - beta
        inverse = select(tridiagonal, zero, one / select(tridiagonal, one, -(beta * first)))
        store(u, (k + 1) * L, first)
        store(a, head, first)
        for i in range(k + 2, n):
            entry = load(a, (i * (i + 1) // 2 + k) * L)
            store(u, i * L, select(tridiagonal, zero, entry))  # a tiny entry would breed denormal numbers
        store(h, k * L, inverse)
        store(e, k * L, beta)

        # q = A u / h − (uᵀ A u / 2h²) u, so that Hᵀ A H = A − q uᵀ − u qᵀ
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
    for i in range(n):
        store(d, i * L, load(a, (i * (i + 1) // 2 + i) * L))
    if n > 1:
        store(e, (n - 2) * L, load(a, ((n - 1) * n // 2 + n - 2) * L))


@jit
def rotate_(a: Any, d: Any, e: Any, y: Any, log: Any, L: int) -> None:
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


def reduce_exactly_(n: int, a: Any, free: Any, h: Any, d: Any, e: Any, y: Any, wide: Any, L: int) -> None:
    """`reduce_`, in float64 also for float32 blocks.

    This is where a float32 solver loses its accuracy: n − 2 updates of the matrix, each rounded. In float64 the whole
    step takes a third longer, and its result is closer to the truth than that of LAPACK in float32.
    """
    (_reduce_wide_ if a.itemsize == 4 else _reduce_plain_)(n, a, free, h, d, e, y, wide, L)


def _reduce_plain_(n: int, a: Any, free: Any, h: Any, d: Any, e: Any, y: Any, wide: Any, L: int) -> None:
    reduce_(n, a, free, h, d, e, y, 1e-60, L)


def _reduce_wide_(n: int, a: Any, free: Any, h: Any, d: Any, e: Any, y: Any, wide: Any, L: int) -> None:
    triangle = n * (n + 1) // 2
    a2, rest = wide[: triangle * L], wide[triangle * L :]
    h2, d2, e2, y2 = _four(rest, n * L)
    for i in range(triangle):
        store(a2, i * L, widen(load(a, i * L)))
    for i in range(n):
        store(y2, i * L, widen(load(y, i * L)))
    reduce_(n, a2, rest[4 * n * L :], h2, d2, e2, y2, 1e-28, L)  # 1/h is to fit into float32
    for i in range(triangle):
        store(a, i * L, narrow(load(a2, i * L)))
    for rows, rows2 in ((h, h2), (d, d2), (e, e2), (y, y2)):
        for i in range(n):
            store(rows, i * L, narrow(load(rows2, i * L)))


def rotate_exactly_(a: Any, d: Any, e: Any, y: Any, log: Any, wide: Any, L: int) -> None:
    """`rotate_`, in float64 also for float32 blocks."""
    (_rotate_wide_ if a.itemsize == 4 else _rotate_plain_)(a, d, e, y, log, wide, L)


def _rotate_plain_(a: Any, d: Any, e: Any, y: Any, log: Any, wide: Any, L: int) -> None:
    rotate_(a, d, e, y, log, L)


def _rotate_wide_(a: Any, d: Any, e: Any, y: Any, log: Any, wide: Any, L: int) -> None:
    a2, d2, y2, log2 = _four(wide, 3 * L)
    for i in range(3):
        store(a2, i * L, widen(load(a, i * L)))
    for i in range(2):
        store(y2, i * L, widen(load(y, i * L)))
    rotate_(a2, d2, wide[12 * L :], y2, log2, L)
    store(e, 0, broadcast(e.dtype.type(0)))
    for rows, rows2 in ((d, d2), (y, y2), (log, log2)):
        for i in range(2):
            store(rows, i * L, narrow(load(rows2, i * L)))


@overload(rotate_exactly_, inline="never")
def _rotate_exactly(a: Any, d: Any, e: Any, y: Any, log: Any, wide: Any, L: int) -> Any:
    return _rotate_wide_ if a.dtype == numba.float32 else _rotate_plain_


@jit
def _four(rest: Any, size: int) -> Any:
    return rest[:size], rest[size : 2 * size], rest[2 * size : 3 * size], rest[3 * size : 4 * size]


@overload(reduce_exactly_, inline="never")
def _reduce_exactly(n: int, a: Any, free: Any, h: Any, d: Any, e: Any, y: Any, wide: Any, L: int) -> Any:
    return _reduce_wide_ if a.dtype == numba.float32 else _reduce_plain_


@jit
def aligned(memory: Any) -> Any:
    """From the first cache line on: a row of lanes that straddles lines takes twice as long to load."""
    return memory[(-memory.ctypes.data % 64) // memory.itemsize :]


@jit
def wide_length(n: int, L: int) -> int:
    """Numbers of float64 scratch that `reduce_exactly_` and `rotate_exactly_` need."""
    return max(13, n * (n + 1) // 2 + 6 * n) * L


@jit
def unreduce_(n: int, a: Any, h: Any, y: Any, columns: int, L: int) -> None:
    """Y ← H Y for n rows of so many columns each."""
    zero = broadcast(a.dtype.type(0))
    for k in range(n - 3, -1, -1):
        inverse = -load(h, k * L)
        for j in range(columns):
            projection = zero
            for i in range(k + 1, n):
                projection = fma(load(a, (i * (i + 1) // 2 + k) * L), load(y, (i * columns + j) * L), projection)
            projection = projection * inverse
            for i in range(k + 1, n):
                at = (i * columns + j) * L
                store(y, at, fma(projection, load(a, (i * (i + 1) // 2 + k) * L), load(y, at)))


@jit
def ascends(n: int, d: Any, e: Any, L: int) -> Any:
    """Where T has its small end on top: sweeps run from the large end to the small one.

    The other way the shift gets lost among larger numbers, and with it the accuracy of small eigenvalues. As in LAPACK,
    the ends compared are those of what is coupled; an end that is noise beside the largest entry says nothing.
    """
    f = d.dtype.type
    noise = broadcast(f(1.1920929e-07) if d.itemsize == 4 else f(2.220446049250313e-16))
    top, bottom = load(d, 0), load(d, 0)
    for i in range(n - 1):
        bottom = select(noise < absolute(load(e, i * L)), load(d, (i + 1) * L), bottom)
    for i in range(n - 2, -1, -1):
        top = select(noise < absolute(load(e, i * L)), load(d, i * L), top)
    significant = broadcast(f(1e-6)) < absolute(bottom)
    return significant & (absolute(top) * broadcast(f(4)) < absolute(bottom))


@jit
def reverse_(n: int, rows: Any, mask: Any, columns: int, L: int) -> None:
    """Turn the order of n rows of so many columns round in the lanes of the mask."""
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
    is coupled there; where T falls apart (e = 0) the bulge starts anew, and a row that is done gets exact identities.

    An e is zero if it is below ε (d + d') for its neighbours on the diagonal, as in EISPACK, or below 4e-3 ε, where the
    largest entry of a block is scaled into [1, 2): eigenvalues below 5e-10 of the largest are not told apart.
    Returns the number of sweeps; where e is not all zero afterwards, `most` was not enough.
    """
    f = d.dtype.type
    zero, one, half = broadcast(f(0)), broadcast(f(1)), broadcast(f(0.5))
    unit = f(1.1920929e-07) if d.itemsize == 4 else f(2.220446049250313e-16)
    relative, least, always = broadcast(unit), broadcast(unit * f(4e-3)), broadcast(f(1e3))
    # The square of a bulge that is gone: still normal, so that a larger one gives a rotation of full precision.
    nothing = broadcast(f(1e-36) if d.itemsize == 4 else f(1e-300))
    corner_off, corner_above, corner = zero, zero, zero
    for i in range(n - 1):
        off = load(e, i * L)
        small = absolute(off) <= fma(load(d, i * L) + load(d, (i + 1) * L), relative, least)
        store(e, i * L, select(small, zero, off))
        corner_off = select(small, corner_off, off)
        corner_above = select(small, corner_above, load(d, i * L))
        corner = select(small, corner, load(d, (i + 1) * L))
    hi = n - 1
    sweeps = 0
    position = 0
    while hi > 0 and sweeps < most:
        if every(load(e, (hi - 1) * L) == zero):
            hi -= 1
            continue
        ends[sweeps] = hi
        sweeps += 1
        gap = half * (corner_above - corner)
        square = corner_off * corner_off
        root = sqrt(fma(gap, gap, square))
        denominator = select(gap < zero, gap - root, gap + root)
        shift = corner - square / select(corner_off == zero, one, denominator)
        here, y_here = load(d, 0), load(y, 0)
        g, c, s, p = here - shift, one, one, zero
        above = zero
        floor = least
        corner_off, corner_above, corner = zero, zero, zero
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
                small = absolute(r) <= fma(above + diagonal, relative, floor)
                store(e, (i - 1) * L, select(small, zero, r))
                corner_off = select(small, corner_off, r)
                corner_above = select(small, corner_above, above)
                corner = select(small, corner, diagonal)
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
            floor = select(apart, always, least)  # what was zero stays so
            above = diagonal
            here = below
        diagonal = here - p
        small = absolute(g) <= fma(above + diagonal, relative, floor)
        store(e, (hi - 1) * L, select(small, zero, g))
        corner_off = select(small, corner_off, g)
        corner_above = select(small, corner_above, above)
        corner = select(small, corner, diagonal)
        store(d, hi * L, diagonal)
        store(y, hi * L, y_here)
    return sweeps


@jit
def undiagonalise_(y: Any, log: Any, ends: Any, sweeps: int, columns: int, L: int) -> None:
    """Y ← R Y for rows of so many columns each."""
    position = 0
    for sweep in range(sweeps):
        position += 2 * L * ends[sweep]
    for sweep in range(sweeps - 1, -1, -1):
        for i in range(ends[sweep] - 1, -1, -1):
            position -= 2 * L
            c, s = load(log, position), load(log, position + L)
            here, below = i * columns * L, (i + 1) * columns * L
            for _ in range(columns):
                top, bottom = load(y, here), load(y, below)
                store(y, here, fma(c, top, -(s * bottom)))
                store(y, below, fma(s, top, c * bottom))
                here += L
                below += L


@jit
def locate(table: Any, starts: Any, block: int, where: Any, steps: Any, lengths: Any, owners: Any, size: int) -> bool:
    """Addresses of each lane's block, from `block` on; lanes past the last block repeat it. A number has `size` bytes.

    Returns whether the lanes' coordinates lie side by side, with one length and one owner.
    """
    L = LANES
    segment = np.searchsorted(starts, block, side="right") - 1
    within, minors = block - starts[segment], table[segment, MINOR]
    major = within // minors
    minor = within - major * minors
    if minor + L <= minors:  # a tile within one line of one segment: almost all are
        for role in range(7):
            stride = table[segment, 4 * role + 2]
            first = table[segment, 4 * role] + major * table[segment, 4 * role + 1] + minor * stride
            for lane in range(L):
                where[role, lane] = first + lane * stride
        for lane in range(L):
            lengths[lane] = table[segment, LENGTH]
            owners[lane] = segment
        for role in range(3):
            for lane in range(L):
                steps[role, lane] = table[segment, 4 * role + 3]
        beside = True
        for role in range(3):
            has = table[segment, 4 * role] != 0
            beside = beside and (not has or table[segment, 4 * role + 2] == size)
        return beside
    for lane in range(L):
        for role in range(7):
            column = 4 * role
            stride = table[segment, column + 2]
            where[role, lane] = table[segment, column] + major * table[segment, column + 1] + minor * stride
        for role in range(3):
            steps[role, lane] = table[segment, 4 * role + 3]
        lengths[lane] = table[segment, LENGTH]
        owners[lane] = segment
        if block + lane + 1 < starts[-1]:
            minor += 1
            if minor == table[segment, MINOR]:
                minor = 0
                major += 1
            if block + lane + 1 == starts[segment + 1]:
                segment += 1
                major = 0
    return False


@jit
def fetch_(role: int, n: int, rows: Any, where: Any, steps: Any, lengths: Any, beside: bool, spare: Any) -> None:
    """Coordinates of each lane's block into n rows; missing ones are zero."""
    L = where.shape[1]
    zero = broadcast(rows.dtype.type(0))
    for i in range(n):
        if beside:
            store(rows, i * L, load_row(where[role, 0] + i * steps[role, 0], rows) if i < lengths[0] else zero)
        else:
            for lane in range(L):
                inside = i < lengths[lane]
                nowhere = rows.ctypes.data + i * L * rows.itemsize  # the row itself, zero until it is filled
                spare[lane] = where[role, lane] + i * steps[role, lane] if inside else nowhere
            store(rows, i * L, zero)
            store(rows, i * L, gather(spare, 0, rows))


@jit
def put_(role: int, n: int, rows: Any, where: Any, steps: Any, lengths: Any, beside: bool, spare: Any) -> None:
    """The inverse of `fetch_`; missing coordinates are dropped."""
    L = where.shape[1]
    for i in range(n):
        if beside:
            if i < lengths[0]:
                store_row(where[role, 0] + i * steps[role, 0], load(rows, i * L))
        else:
            for lane in range(L):
                inside = i < lengths[lane]
                spare[lane] = where[role, lane] + i * steps[role, lane] if inside else spare[L:].ctypes.data
            scatter(spare, 0, load(rows, i * L))


@jit
def lift_(addresses: Any, count: int, rows: Any, L: int) -> None:
    """`count` consecutive numbers of each lane into as many rows. The last square of 16 overlaps the one before."""
    if count < TURN:
        for i in range(count):
            store(rows, i * L, gather(addresses, i * rows.itemsize, rows))
        return
    for i in range(0, count, TURN):
        i = min(i, count - TURN)
        turn_in(addresses, i * rows.itemsize, rows, i * L)


@jit
def lower_(addresses: Any, count: int, rows: Any, L: int) -> None:
    """The inverse of `lift_`."""
    if count < TURN:
        for i in range(count):
            scatter(addresses, i * rows.itemsize, load(rows, i * L))
        return
    for i in range(0, count, TURN):
        i = min(i, count - TURN)
        turn_out(addresses, i * rows.itemsize, rows, i * L)


@jit
def expect(address: int, length: int) -> None:
    """Prefetch what follows a tile's rows in memory: the next tile's, almost always. No more than a cache can keep."""
    for line in range(0, min(length, 32768), 64):
        prefetch(address + length + line)


@jit
def effective_(n: int, d: Any, y: Any, terms: Any, L: int) -> None:
    """y ← s(λ) y with s = clip(lr / (√(λ/correction) + damping), lower, upper)."""
    zero = broadcast(d.dtype.type(0))
    lr, damping = load(terms, LR * L), load(terms, DAMPING * L)
    lower, upper = load(terms, LOWER * L), load(terms, UPPER * L)
    unbias = broadcast(d.dtype.type(1)) / load(terms, CORRECTION * L)
    for i in range(n):
        s = lr / (sqrt(maximum(load(d, i * L), zero) * unbias) + damping)
        store(y, i * L, load(y, i * L) * minimum(maximum(s, lower), upper))


@jit
def amsgrad_(n: int, d: Any, addresses: Any, rows: Any, keep: Any, L: int) -> None:
    """Σ̂ ← max(Σ̂, Σ), both ascending; d ← Σ̂ in the order of d. Lanes outside `keep` leave Σ̂ as it is."""
    f = d.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    ranks, largest, merged = rows[: n * L], rows[n * L : 2 * n * L], rows[2 * n * L : 3 * n * L]
    for i in range(n):
        store(largest, i * L, gather(addresses, i * d.itemsize, d))
        value = load(d, i * L)
        rank = zero
        for j in range(n):
            other = load(d, j * L)
            before = (other < value) | (other == value) if j < i else other < value
            rank = rank + select(before, one, zero)
        store(ranks, i * L, rank)
    for position in range(n):
        at = broadcast(f(position))
        total = load(largest, position * L)
        for i in range(n):
            value = load(d, i * L)
            total = select(load(ranks, i * L) == at, maximum(value, total), total)
        store(merged, position * L, total)
        scatter(addresses, position * d.itemsize, select(keep, total, load(largest, position * L)))
    for i in range(n):
        rank = load(ranks, i * L)
        value = zero
        for position in range(n):
            value = select(rank == broadcast(f(position)), load(merged, position * L), value)
        store(d, i * L, value)


@jit
def log_length(n: int, most: int, L: int) -> int:
    """Numbers that the log of `most` sweeps takes."""
    return max(1, most * (n - 1) * 2 * L)


@jit
def scratch_length(n: int, L: int) -> int:
    """Numbers of scratch that `advance` needs."""
    return (n * (n + 1) // 2 + 12 * n + n * n + TERMS) * L


@jit
def advance(
    n: int, table: Any, coefficients: Any, starts: Any, tile: int, end: int, scratch: Any, wide: Any, log: Any,
    most: int, kept: bool, failed: Any,
) -> None:  # fmt: skip
    """Take the step for tiles [tile, end) of blocks of n; see the module's head.

    `kept` uses each block's stored basis instead of finding it. Blocks that did not converge within `most` sweeps have
    their moments updated and their x shrunk, but not moved, and are marked in `failed`.
    """
    f = scratch.dtype.type
    L = LANES
    zero, one = broadcast(f(0)), broadcast(f(1))
    tiny = broadcast(f(1.1754944e-38) if scratch.itemsize == 4 else f(2.2250738585072014e-308))
    triangle = n * (n + 1) // 2
    a = scratch[: triangle * L]
    rest = scratch[triangle * L :]
    x, g, m, d = _four(rest, n * L)
    e, y, h, _ = _four(rest[4 * n * L :], n * L)
    free = rest[7 * n * L : 9 * n * L]
    basis = rest[9 * n * L : (9 * n + n * n) * L]
    sorting = rest[(9 * n + n * n) * L : (12 * n + n * n) * L]
    terms = rest[(12 * n + n * n) * L :]
    where = np.zeros((7, L), dtype=np.int64)
    steps = np.zeros((3, L), dtype=np.int64)
    lengths = np.zeros(L, dtype=np.int64)
    owners = np.zeros(L, dtype=np.int64)
    spare = np.zeros(L + 1, dtype=np.int64)
    ends = np.zeros(most, dtype=np.int64)
    has_m, has_largest, has_basis = table[0, M] != 0, table[0, LARGEST] != 0, table[0, BASIS] != 0
    filled = -1  # the one segment whose coefficients the lanes hold
    while tile < end:
        beside = locate(table, starts, tile * L, where, steps, lengths, owners, scratch.itemsize)
        if filled < 0 or owners[0] != filled or owners[L - 1] != filled:
            for lane in range(L):
                for term in range(TERMS):
                    terms[term * L + lane] = coefficients[owners[lane], term]
            filled = owners[0] if owners[0] == owners[L - 1] else -1
        fetch_(0, n, x, where, steps, lengths, beside, spare)
        fetch_(1, n, g, where, steps, lengths, beside, spare)
        if has_m:
            fetch_(2, n, m, where, steps, lengths, beside, spare)
        lift_(where[3], triangle, a, L)
        expect(where[3, 0], L * triangle * scratch.itemsize)
        if kept:
            expect(where[5, 0], L * n * n * scratch.itemsize)

        sign, coupled, beta1 = load(terms, SIGN * L), load(terms, COUPLED * L), load(terms, BETA1 * L)
        for i in range(n):
            gradient = fma(coupled, load(x, i * L), sign * load(g, i * L))
            store(g, i * L, gradient)
            average = gradient
            if has_m:
                average = fma(beta1, load(m, i * L) - gradient, gradient)
                store(m, i * L, average)
            store(y, i * L, average)
        if has_m:
            put_(2, n, m, where, steps, lengths, beside, spare)
        decay, weight = load(terms, DECAY * L), load(terms, WEIGHT * L)
        largest, check = zero, zero
        row = 0
        for i in range(n):
            weighted = weight * load(g, i * L)
            for j in range(i + 1):
                entry = fma(weighted, load(g, j * L), decay * load(a, row))
                store(a, row, entry)
                row += L
            entry = load(a, row - L)
            largest = maximum(entry, largest)
            check = fma(entry, zero, check)
        lower_(where[3], triangle, a, L)
        finite = check == zero  # 0 · ∞ and 0 · NaN are NaN; a bad entry off the diagonal has one on it
        solved = finite

        if kept:
            lift_(where[5], n * n, basis, L)
            for j in range(n):
                turned_g, turned_y = zero, zero
                for i in range(n):
                    entry = load(basis, (i * n + j) * L)
                    turned_g = fma(entry, load(g, i * L), turned_g)
                    turned_y = fma(entry, load(y, i * L), turned_y)
                value = gather(where[6], j * scratch.itemsize, scratch)
                value = fma(weight * turned_g, turned_g, decay * value)
                scatter(where[6], j * scratch.itemsize, value)
                store(d, j * L, value)
                store(e, j * L, turned_y)
            if has_largest:
                amsgrad_(n, d, where[4], sorting, finite, L)
            effective_(n, d, e, terms, L)
            for i in range(n):
                total = zero
                for j in range(n):
                    total = fma(load(basis, (i * n + j) * L), load(e, j * L), total)
                store(y, i * L, total)
        else:
            scale = power_of_two(maximum(select(finite, largest, one), tiny))
            inverse = one / scale
            # Entries too small to matter go: arithmetic on denormal numbers is a hundred times slower.
            least = broadcast(f(1e-18) if scratch.itemsize == 4 else f(1e-150))
            for i in range(triangle):
                entry = load(a, i * L) * inverse
                store(a, i * L, select(finite & (least < absolute(entry)), entry, zero))
            ascending = one < zero
            if n == 2:
                rotate_exactly_(a, d, e, y, log, wide, L)
                sweeps = ends[0] = 1
            else:
                reduce_exactly_(n, a, free, h, d, e, y, wide, L)
                ascending = ascends(n, d, e, L)
                reverse_(n, d, ascending, 1, L)
                reverse_(n - 1, e, ascending, 1, L)
                reverse_(n, y, ascending, 1, L)
                sweeps = diagonalise_(n, d, e, y, log, ends, most, L)
            for i in range(n - 1):
                solved = solved & (load(e, i * L) == zero)
            for i in range(n):
                store(d, i * L, load(d, i * L) * scale)
            if has_basis:
                for i in range(n):
                    scatter(where[6], i * scratch.itemsize, load(d, i * L))
            if has_largest:
                amsgrad_(n, d, where[4], sorting, solved, L)
            effective_(n, d, y, terms, L)
            undiagonalise_(y, log, ends, sweeps, 1, L)
            reverse_(n, y, ascending, 1, L)
            if n > 2:
                unreduce_(n, a, h, y, 1, L)
            if has_basis:
                for i in range(n * n):
                    store(basis, i * L, one if i % (n + 1) == 0 else zero)
                undiagonalise_(basis, log, ends, sweeps, n, L)
                reverse_(n, basis, ascending, n, L)
                unreduce_(n, a, h, basis, n, L)
                lower_(where[5], n * n, basis, L)
            if not every(solved):
                store(free, 0, select(solved | ~finite, zero, one))
                for lane in range(L):
                    if free[lane] != 0 and tile * L + lane < starts[-1]:
                        failed[tile * L + lane] = 1

        shrink = load(terms, SHRINK * L)
        unknown = broadcast(f(np.nan))
        for i in range(n):
            move = select(solved, load(y, i * L), select(finite, zero, unknown))
            store(x, i * L, fma(shrink, load(x, i * L), -move))
        put_(0, n, x, where, steps, lengths, beside, spare)
        tile += 1


# Entries of an order: what a thread needs to know, as int64. The first is taken from by all threads.
TICKET, SIZE, SEGMENTS, TABLE_AT, COEFFICIENTS_AT, STARTS_AT, FAILED_AT, TILES, CHUNK, SWEEPS, KEPT = range(11)
ORDER = 11


def worker(real: Any) -> Callable[[Any], None]:
    """The function that each thread runs, for one float type: take the next chunk of tiles until none is left."""

    def work(data: Any) -> None:
        order = numba.carray(data, (ORDER,), np.int64)
        n, segments, most = order[SIZE], order[SEGMENTS], order[SWEEPS]
        table = numba.carray(pointer(order[TABLE_AT]), (segments, TABLE), np.int64)
        coefficients = numba.carray(pointer(order[COEFFICIENTS_AT]), (segments, TERMS), real)
        starts = numba.carray(pointer(order[STARTS_AT]), (segments + 1,), np.int64)
        failed = numba.carray(pointer(order[FAILED_AT]), (starts[segments],), np.uint8)
        L = LANES
        scratch = aligned(np.empty(scratch_length(n, L) + L, real))
        log = aligned(np.empty(log_length(n, most, L) + L, real))
        wide = aligned(np.empty(wide_length(n, L) + L, np.float64))
        kept = order[KEPT] != 0
        while True:
            first = take_ticket(order, TICKET) * order[CHUNK]
            if first >= order[TILES]:
                return
            last = min(first + order[CHUNK], order[TILES])
            advance(n, table, coefficients, starts, first, last, scratch, wide, log, most, kept, failed)

    return work
