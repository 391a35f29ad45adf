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
    is coupled there: its corner. For what counts as zero see `kernels.thresholds`. There is a row before e's first,
    which is written and never read.

    Returns:
        The sweeps made, and where e is all zero. Elsewhere `most` sweeps were not enough.
    """
    corner_off, corner_above, corner, last = decouple_(n, d, e, LANES, REAL)
    hi = tl.max(last, 0)
    sweeps = 0
    while (hi > 0) & (sweeps < most):
        at = log + sweeps * ((2 * n - 1) * LANES)
        tl.store(at, tl.full((LANES,), 0, REAL) + hi)
        shift = wilkinson_shift(corner_off, corner_above, corner)
        corner_off, corner_above, corner, last = sweep_(hi, shift, d, e, y, at, LANES, REAL)
        hi = tl.max(last, 0)
        sweeps += 1
    return sweeps, last == 0


@triton.jit
def decouple_(n, d, e, LANES: tl.constexpr, REAL: tl.constexpr):
    """Zero the e that are negligible; returns the corner, and its last row."""
    least: tl.constexpr = COUPLING32 if REAL == tl.float32 else COUPLING64
    zero = tl.full((LANES,), 0, REAL)
    corner_off, corner_above, corner, last = zero, zero, zero, tl.full((LANES,), 0, tl.int32)
    for i in range(n - 1):
        off, above, here = tl.load(e + i * LANES), tl.load(d + i * LANES), tl.load(d + (i + 1) * LANES)
        small = is_negligible(off, above, here, least, REAL)
        tl.store(e + i * LANES, tl.where(small, zero, off))
        corner_off, corner_above = tl.where(small, corner_off, off), tl.where(small, corner_above, above)
        corner, last = tl.where(small, corner, here), tl.where(small, last, i + 1)
    return corner_off, corner_above, corner, last


@triton.jit
def is_negligible(off, above, here, floor, REAL: tl.constexpr):
    """Say whether an e is nothing beside its neighbours on the diagonal: |e| ≤ ε (d + d') + floor."""
    relative: tl.constexpr = ROUNDOFF32 if REAL == tl.float32 else ROUNDOFF64
    return tl.abs(off) <= (above + here) * relative + floor


@triton.jit
def wilkinson_shift(off, above, here):
    """Compute the corner's eigenvalue that is nearer to its last entry; that entry itself where nothing is coupled."""
    gap = 0.5 * (above - here)
    square = off * off
    root = tl.sqrt(gap * gap + square)
    return here - square / tl.where(off == 0, 1.0, tl.where(gap < 0, gap - root, gap + root))


@triton.jit
def rotation(g, bulge, REAL: tl.constexpr):
    """Make c = g/r, s = bulge/r and r = √(g² + bulge²); exactly 1, 0 and g where the bulge is nothing."""
    nothing: tl.constexpr = BULGE32 if REAL == tl.float32 else BULGE64
    square = bulge * bulge
    identity = square <= nothing
    square = g * g + square
    inverse = tl.rsqrt(tl.where(identity, 1.0, square))
    inverse += inverse * (0.5 - 0.5 * (square * inverse) * inverse)  # rsqrt is good to 22 bits only
    c, s = tl.where(identity, 1.0, g * inverse), tl.where(identity, 0.0, bulge * inverse)
    return c, s, tl.where(identity, g, square * inverse)


@triton.jit
def sweep_(hi, shift, d, e, y, at, LANES: tl.constexpr, REAL: tl.constexpr):
    """Take one implicit QR step through the rows 0 to `hi`, with y ← Rᵀ y. Its rotations are logged after `at`.

    Where T falls apart (e = 0) the bulge starts anew, and a row that is done gets exact identities, so that no lane
    depends on its neighbours. Returns the corner that is left, and its last row.
    """
    least: tl.constexpr = COUPLING32 if REAL == tl.float32 else COUPLING64
    zero, one = tl.full((LANES,), 0, REAL), tl.full((LANES,), 1, REAL)
    corner_off, corner_above, corner, last = zero, zero, zero, tl.full((LANES,), 0, tl.int32)
    here, y_here = tl.load(d), tl.load(y)
    g, c, s, p, above = here - shift, one, one, zero, zero
    floor = zero + APART  # there is no e before the first row
    for i in range(hi):
        off = tl.load(e + i * LANES)
        b = c * off
        c, s, r = rotation(g, s * off, REAL)
        below = tl.load(d + (i + 1) * LANES)
        g = here - p
        t = (below - g) * s + c * (b + b)
        p = s * t
        diagonal = g + p
        tl.store(d + i * LANES, diagonal)
        g = c * t - b
        small = is_negligible(r, above, diagonal, floor, REAL)
        tl.store(e + (i - 1) * LANES, tl.where(small, zero, r))
        corner_off, corner_above = tl.where(small, corner_off, r), tl.where(small, corner_above, above)
        corner, last = tl.where(small, corner, diagonal), tl.where(small, last, i)
        y_below = tl.load(y + (i + 1) * LANES)
        tl.store(y + i * LANES, c * y_here + s * y_below)
        y_here = c * y_below - s * y_here
        tl.store(at + (2 * i + 1) * LANES, c)
        tl.store(at + (2 * i + 2) * LANES, s)
        apart = off == 0
        c, s = tl.where(apart, one, c), tl.where(apart, one, s)
        g, p = tl.where(apart, below - shift, g), tl.where(apart, zero, p)
        floor = tl.where(apart, zero + APART, zero + least)  # what was zero stays so
        above, here = diagonal, below
    diagonal = here - p
    small = is_negligible(g, above, diagonal, floor, REAL)
    tl.store(e + (hi - 1) * LANES, tl.where(small, zero, g))
    tl.store(d + hi * LANES, diagonal)
    tl.store(y + hi * LANES, y_here)
    corner_off, corner_above = tl.where(small, corner_off, g), tl.where(small, corner_above, above)
    return corner_off, corner_above, tl.where(small, corner, diagonal), tl.where(small, last, hi)


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
def solve_(
    n, a, d, e, y, h, u, q, log, most, PAIR: tl.constexpr, LANES: tl.constexpr, REAL: tl.constexpr
):  # fmt: skip
    """Make Λ = Uᵀ A U in d and y ← Uᵀ y; U = H R stays in a, h and the log. Blocks of 2 are a PAIR.

    Returns:
        The sweeps made, where rows were reversed before them, and where they were enough.
    """
    if PAIR:
        diagonalise_2x2_(a, d, y, log, LANES, REAL)
        always = tl.full((LANES,), 1, tl.int1)
        return 1, always == 0, always
    else:
        tridiagonalise_(n, a, u, q, h, d, e, y, LANES, REAL)
        is_reversed = small_end_first(n, d, e, LANES, REAL)
        reverse_(n, d, is_reversed, LANES)
        reverse_(n - 1, e, is_reversed, LANES)
        reverse_(n, y, is_reversed, LANES)
        sweeps, converged = diagonalise_(n, d, e, y, log, most, LANES, REAL)
        return sweeps, is_reversed, converged


@triton.jit
def apply_basis_(n, a, h, y, log, sweeps, is_reversed, LANES: tl.constexpr):
    """Take y back: y ← U y."""
    apply_rotations_(n, y, log, sweeps, LANES)
    reverse_(n, y, is_reversed, LANES)
    apply_reflections_(n, a, h, y, LANES)


@triton.jit
def factor_column_(n, j, u, basis_at, by, there, LANES: tl.constexpr):
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
