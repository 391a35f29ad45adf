"""Solves many small symmetric eigenproblems at once, one in each lane: that is, one in each thread of a program.

    1  T = Hᵀ V H, Householder reflections to tridiagonal form            y ← Hᵀ m
    2  Λ = Rᵀ T R, implicit QR with Wilkinson shifts, rotations logged    y ← Rᵀ y
    3  whatever is done to y = Uᵀ m, with the eigenvalues at hand
    4  y ← H R y, the log and the reflections backwards

The algorithm is that of `kernels.cpu.eigensolver`, which gives its references, in the precision of the statistics.
Vectors and matrices are rows of lanes in scratch memory, [row, lane], so that a warp reads and writes whole lines. A
lane is always the same thread, which only ever reads what it wrote itself: nothing has to wait for anything.

Letters: n block size, a packed lower triangle, d and e the tridiagonal, y the vector that is carried along. Each is a
pointer to its first row, lanes included; row i is LANES · i further on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockadapt.kernels.thresholds import FLOAT32, FLOAT64, GPU_APART

ROUNDOFF32, ROUNDOFF64 = tl.constexpr(FLOAT32.roundoff), tl.constexpr(FLOAT64.roundoff)
COLUMN32, COLUMN64 = tl.constexpr(FLOAT32.column), tl.constexpr(FLOAT64.column)
COUPLING32, COUPLING64 = tl.constexpr(FLOAT32.coupling), tl.constexpr(FLOAT64.coupling)
BULGE32, BULGE64 = tl.constexpr(FLOAT32.bulge), tl.constexpr(FLOAT64.bulge)
END, LOPSIDED = tl.constexpr(FLOAT32.end), tl.constexpr(FLOAT32.lopsided)
APART = tl.constexpr(GPU_APART)


@triton.jit
def exact_root(value):
    """Compute √value, correctly rounded; plain float32 roots are not."""
    return tl.sqrt_rn(value) if value.dtype == tl.float32 else tl.sqrt(value)


@triton.jit
def exact_ratio(left, right):
    """Compute left / right, correctly rounded; plain float32 quotients are not."""
    return tl.div_rn(left, right) if left.dtype == tl.float32 else left / right


@triton.jit
def tridiagonalise_(n, a, u, q, h, d, e, y, LANES: tl.constexpr, REAL: tl.constexpr):
    """Make T = Hᵀ A H and y ← Hᵀ y, for entries of at most about 1. The reflections I − u uᵀ/h stay in a's columns.

    Columns whose squares sum to no more than `least` are taken for tridiagonal: 1/h must not overflow.
    """
    least: tl.constexpr = COLUMN32 if REAL == tl.float32 else COLUMN64
    for k in range(n - 2):
        head = a + ((k + 1) * (k + 2) // 2 + k) * LANES
        alpha = tl.load(head)
        zero = alpha * 0
        below = zero
        for i in range(k + 2, n):
            entry = tl.load(a + (i * (i + 1) // 2 + k) * LANES)
            below += entry * entry
        tridiagonal = below <= least
        norm = exact_root(alpha * alpha + below)
        beta = tl.where(tridiagonal, alpha, tl.where(alpha < 0, norm, -norm))
        first = alpha - beta
        inverse = tl.where(tridiagonal, zero, exact_ratio(zero + 1, tl.where(tridiagonal, zero + 1, -beta * first)))
        tl.store(u + (k + 1) * LANES, first)
        tl.store(head, first)
        for i in range(k + 2, n):
            entry = tl.load(a + (i * (i + 1) // 2 + k) * LANES)
            tl.store(u + i * LANES, tl.where(tridiagonal, zero, entry))  # whose squares would be denormal
        tl.store(h + k * LANES, inverse)
        tl.store(e + k * LANES, beta)

        # q = A u / h − (uᵀ A u / 2h²) u, so that Hᵀ A H = A − q uᵀ − u qᵀ
        inner = zero
        projection = zero
        for i in range(k + 1, n):
            total = zero
            row = a + (i * (i + 1) // 2) * LANES
            for j in range(k + 1, i + 1):
                total += tl.load(row + j * LANES) * tl.load(u + j * LANES)
            for j in range(i + 1, n):
                total += tl.load(a + (j * (j + 1) // 2 + i) * LANES) * tl.load(u + j * LANES)
            total *= inverse
            entry = tl.load(u + i * LANES)
            inner += total * entry
            projection += entry * tl.load(y + i * LANES)
            tl.store(q + i * LANES, total)
        inner = inner * inverse * 0.5
        projection *= inverse
        for i in range(k + 1, n):
            row = a + (i * (i + 1) // 2) * LANES
            u_i = tl.load(u + i * LANES)
            q_i = tl.load(q + i * LANES) - inner * u_i
            tl.store(q + i * LANES, q_i)
            tl.store(y + i * LANES, tl.load(y + i * LANES) - projection * u_i)
            for j in range(k + 1, i + 1):
                change = u_i * tl.load(q + j * LANES) + q_i * tl.load(u + j * LANES)
                tl.store(row + j * LANES, tl.load(row + j * LANES) - change)  # rounded once
    for i in range(n):
        tl.store(d + i * LANES, tl.load(a + (i * (i + 1) // 2 + i) * LANES))
    if n > 1:
        tl.store(e + (n - 2) * LANES, tl.load(a + ((n - 1) * n // 2 + n - 2) * LANES))


@triton.jit
def apply_reflections_(n, a, h, y, LANES: tl.constexpr):
    """Take y back through the reflections: y ← H y."""
    for back in range(n - 2):
        k = n - 3 - back
        projection = tl.load(h + k * LANES) * 0
        for i in range(k + 1, n):
            projection += tl.load(a + (i * (i + 1) // 2 + k) * LANES) * tl.load(y + i * LANES)
        projection *= tl.load(h + k * LANES)
        for i in range(k + 1, n):
            entry = tl.load(a + (i * (i + 1) // 2 + k) * LANES)
            tl.store(y + i * LANES, tl.load(y + i * LANES) - projection * entry)


@triton.jit
def small_end_first(n, d, e, LANES: tl.constexpr, REAL: tl.constexpr):
    """Say where T has its small end on top: sweeps run from the large end to the small one."""
    noise: tl.constexpr = ROUNDOFF32 if REAL == tl.float32 else ROUNDOFF64
    top, bottom = tl.load(d), tl.load(d)
    for i in range(n - 1):
        bottom = tl.where(tl.abs(tl.load(e + i * LANES)) > noise, tl.load(d + (i + 1) * LANES), bottom)
    for back in range(n - 1):
        i = n - 2 - back
        top = tl.where(tl.abs(tl.load(e + i * LANES)) > noise, tl.load(d + i * LANES), top)
    return (tl.abs(bottom) > END) & (tl.abs(top) * LOPSIDED < tl.abs(bottom))


@triton.jit
def reverse_(n, rows, mask, LANES: tl.constexpr):
    """Turn the order of n rows round in the lanes of the mask."""
    for i in range(n // 2):
        here, there = rows + i * LANES, rows + (n - 1 - i) * LANES
        low, high = tl.load(here), tl.load(there)
        tl.store(here, tl.where(mask, high, low))
        tl.store(there, tl.where(mask, low, high))


@triton.jit
def diagonalise_2x2_(a, d, y, log, LANES: tl.constexpr, REAL: tl.constexpr):
    """Make Λ = Rᵀ A R and y ← Rᵀ y for blocks of 2 by one Jacobi rotation, logged as a sweep.

    It is done in float64: there is little to compute, and float32 loses half the digits of the smaller eigenvalue.
    """
    first, off = tl.load(a).to(tl.float64), tl.load(a + LANES).to(tl.float64)
    second = tl.load(a + 2 * LANES).to(tl.float64)
    slope = 0.5 * (first - second) / tl.where(off == 0, 1.0, off)  # cot 2θ
    root = tl.sqrt(slope * slope + 1)
    t = tl.where(off == 0, 0.0, 1 / tl.where(slope < 0, slope - root, slope + root))
    c = 1 / tl.sqrt(t * t + 1)
    s = t * c
    tl.store(d, (first + t * off).to(REAL))
    tl.store(d + LANES, (second - t * off).to(REAL))
    top, bottom = tl.load(y).to(tl.float64), tl.load(y + LANES).to(tl.float64)
    tl.store(y, (c * top + s * bottom).to(REAL))
    tl.store(y + LANES, (c * bottom - s * top).to(REAL))
    tl.store(log, (c * 0 + 1).to(REAL))
    tl.store(log + LANES, c.to(REAL))
    tl.store(log + 2 * LANES, s.to(REAL))


@triton.jit
def diagonalise_(n, d, e, y, log, most, LANES: tl.constexpr, REAL: tl.constexpr):
    """Make Λ = Rᵀ T R in d and y ← Rᵀ y. A sweep is logged in 2n − 1 rows: its last row's number, each c and s.

    A sweep runs through the rows that some lane still works on. Each lane has its own shift, from the last 2 × 2 that
    is coupled there; where T falls apart (e = 0) the bulge starts anew, and a row that is done gets exact identities,
    so that no lane depends on its neighbours. For what counts as zero see `kernels.thresholds`. There is
    a row before e's first, which is written and never read.

    Returns:
        The sweeps made, and where e is all zero. Elsewhere `most` sweeps were not enough.
    """
    relative: tl.constexpr = ROUNDOFF32 if REAL == tl.float32 else ROUNDOFF64
    least: tl.constexpr = COUPLING32 if REAL == tl.float32 else COUPLING64
    nothing: tl.constexpr = BULGE32 if REAL == tl.float32 else BULGE64
    zero = tl.load(d) * 0
    one = zero + 1
    none = (zero != 0).to(tl.int32)
    corner_off, corner_above, corner, last = zero, zero, zero, none
    for i in range(n - 1):
        off, above, below = tl.load(e + i * LANES), tl.load(d + i * LANES), tl.load(d + (i + 1) * LANES)
        small = tl.abs(off) <= (above + below) * relative + least
        tl.store(e + i * LANES, tl.where(small, zero, off))
        corner_off = tl.where(small, corner_off, off)
        corner_above = tl.where(small, corner_above, above)
        corner = tl.where(small, corner, below)
        last = tl.where(small, last, i + 1)
    hi = tl.max(last, 0)
    sweeps = 0
    while (hi > 0) & (sweeps < most):
        at = log + sweeps * ((2 * n - 1) * LANES)
        tl.store(at, zero + hi)
        gap = 0.5 * (corner_above - corner)
        square = corner_off * corner_off
        root = tl.sqrt(gap * gap + square)
        denominator = tl.where(gap < 0, gap - root, gap + root)
        shift = corner - square / tl.where(corner_off == 0, one, denominator)
        here, y_here = tl.load(d), tl.load(y)
        g, c, s, p = here - shift, one, one, zero
        above = zero
        floor = zero + APART  # there is no e before the first row
        corner_off, corner_above, corner, last = zero, zero, zero, none
        for i in range(hi):
            off = tl.load(e + i * LANES)
            bulge = s * off
            b = c * off
            square = bulge * bulge
            identity = square <= nothing
            square = g * g + square
            inverse = tl.rsqrt(tl.where(identity, one, square))
            inverse += inverse * (0.5 - 0.5 * (square * inverse) * inverse)  # rsqrt is good to 22 bits only
            c = tl.where(identity, one, g * inverse)
            s = tl.where(identity, zero, bulge * inverse)
            r = tl.where(identity, g, square * inverse)
            below = tl.load(d + (i + 1) * LANES)
            g = here - p
            t = (below - g) * s + c * (b + b)
            p = s * t
            diagonal = g + p
            tl.store(d + i * LANES, diagonal)
            g = c * t - b
            small = tl.abs(r) <= (above + diagonal) * relative + floor
            tl.store(e + (i - 1) * LANES, tl.where(small, zero, r))
            corner_off = tl.where(small, corner_off, r)
            corner_above = tl.where(small, corner_above, above)
            corner = tl.where(small, corner, diagonal)
            last = tl.where(small, last, i)
            y_below = tl.load(y + (i + 1) * LANES)
            tl.store(y + i * LANES, c * y_here + s * y_below)
            y_here = c * y_below - s * y_here
            tl.store(at + (2 * i + 1) * LANES, c)
            tl.store(at + (2 * i + 2) * LANES, s)
            apart = off == 0
            s = tl.where(apart, one, s)
            c = tl.where(apart, one, c)
            g = tl.where(apart, below - shift, g)
            p = tl.where(apart, zero, p)
            floor = tl.where(apart, zero + APART, zero + least)  # what was zero stays so
            above = diagonal
            here = below
        diagonal = here - p
        small = tl.abs(g) <= (above + diagonal) * relative + floor
        tl.store(e + (hi - 1) * LANES, tl.where(small, zero, g))
        corner_off = tl.where(small, corner_off, g)
        corner_above = tl.where(small, corner_above, above)
        corner = tl.where(small, corner, diagonal)
        last = tl.where(small, last, hi)
        tl.store(d + hi * LANES, diagonal)
        tl.store(y + hi * LANES, y_here)
        hi = tl.max(last, 0)
        sweeps += 1
    return sweeps, last == 0


@triton.jit
def apply_rotations_(n, y, log, sweeps, LANES: tl.constexpr):
    """Take y back through the log: y ← R y."""
    for back in range(sweeps):
        at = log + (sweeps - 1 - back) * ((2 * n - 1) * LANES)
        hi = tl.max(tl.load(at), 0).to(tl.int32)
        y_below = tl.load(y + hi * LANES)
        for up in range(hi):
            i = hi - 1 - up
            c, s = tl.load(at + (2 * i + 1) * LANES), tl.load(at + (2 * i + 2) * LANES)
            y_here = tl.load(y + i * LANES)
            tl.store(y + (i + 1) * LANES, s * y_here + c * y_below)
            y_below = c * y_here - s * y_below
        tl.store(y, y_below)


@triton.jit
def factor_column_(n, j, u, basis_at, by, there, LANES: tl.constexpr, REAL: tl.constexpr):
    """Take column j of U, n rows at u, through the reflections before it, and make the next one; all at `basis_at`.

    See `kernels.reflections`. Lanes that are not `there` are not touched.
    """
    at = 0
    for k in range(j):
        along = tl.load(u + k * LANES)
        square = along * 0 + 1
        for i in range(k + 1, n):
            v = tl.load(basis_at + (at + i - k - 1) * by, mask=there, other=0)
            along += v * tl.load(u + i * LANES)
            square += v * v
        along = exact_ratio(2 * along, square)
        for i in range(k + 1, n):
            v = tl.load(basis_at + (at + i - k - 1) * by, mask=there, other=0)
            tl.store(u + i * LANES, tl.load(u + i * LANES) - along * v)
        at += n - 1 - k
    head = tl.load(u + j * LANES)
    square = head * head
    for i in range(j + 1, n):
        entry = tl.load(u + i * LANES)
        square += entry * entry
    norm = exact_root(square)
    first = head + tl.where(head < 0, -norm, norm)
    for i in range(j + 1, n):
        tl.store(basis_at + (at + i - j - 1) * by, exact_ratio(tl.load(u + i * LANES), first), mask=there)
