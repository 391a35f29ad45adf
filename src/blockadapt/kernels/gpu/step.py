"""Takes the step of a batch, in Triton kernels.

    advance     a tile of blocks a program, a block a lane, vectors as rows of scratch: V, m, eigensolve, s, x
    turn        the same under a basis that was kept: no eigensolve
    redo        a block a program, by Jacobi in float64: what did not converge in `advance`

A row of the table says where the blocks of a place lie and what the step's numbers are. Tiles never straddle places, so
a program reads one row. Lanes past the last block, and rows past a short run, are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockadapt.kernels.contract import TERMS
from blockadapt.kernels.gpu import eigensolver as solver
from blockadapt.kernels.gpu.jacobi import jacobi
from blockadapt.kernels.layout import TILE as _TILE
from blockadapt.kernels.thresholds import FLOAT32, FLOAT64

COLUMNS = (
    "x", "m", "second_moment", "largest", "basis", "eigenvalues",
    "x.major", "x.minor", "x.step", "m.major", "m.minor", "m.step", "second_moment.major", "second_moment.minor",
    "second_moment.step", "largest.major", "largest.minor", "largest.step", "k", "minor", "num_blocks", "first tile",
    "grad", *TERMS,
)  # fmt: skip
"""The table, int64, has addresses, strides in elements, counts, and what each step brings: where the gradient lies, and
the terms as float64 bits."""


def _column(name: str) -> tl.constexpr:
    return tl.constexpr(COLUMNS.index(name))


WIDTH = tl.constexpr(len(COLUMNS))
TILE = tl.constexpr(_TILE)
X, M, V, LARGEST, BASIS, EIGENVALUES = (_column(name) for name in COLUMNS[:6])
X_BY, M_BY, V_BY, LARGEST_BY = (_column(f"{name}.major") for name in ("x", "m", "second_moment", "largest"))
K, MINOR, NUM_BLOCKS, FIRST, GRAD = (_column(name) for name in ("k", "minor", "num_blocks", "first tile", "grad"))
SIGN, COUPLED, SHRINK = (_column(f"descent.{term}") for term in ("sign", "coupled", "shrink"))
BETA, DECAY, WEIGHT = _column("first.beta"), _column("second.decay"), _column("second.weight")
LR, CORRECTION, DAMPING, LOWER, UPPER, RESOLUTION = (
    _column(f"spectrum.{term}") for term in ("lr", "correction", "damping", "lower", "upper", "resolution")
)
ENTRY32, ENTRY64 = tl.constexpr(FLOAT32.entry), tl.constexpr(FLOAT64.entry)
LEAST32, LEAST64 = tl.constexpr(FLOAT32.least_normal), tl.constexpr(FLOAT64.least_normal)


@triton.jit
def term(row, column: tl.constexpr, REAL: tl.constexpr):
    """Read a coefficient of this row of the table."""
    return tl.load(row + column).to(tl.float64, bitcast=True).to(REAL)


@triton.jit
def at(row, tensor: tl.constexpr, strides: tl.constexpr, block, REAL: tl.constexpr):
    """Say where the first numbers of these blocks lie, and the stride from one to the next."""
    minor = tl.load(row + MINOR).to(tl.int32)
    start = tl.load(row + tensor).to(tl.pointer_type(REAL))
    start += (block // minor).to(tl.int64) * tl.load(row + strides)
    return start + (block % minor).to(tl.int64) * tl.load(row + strides + 1), tl.load(row + strides + 2)


@triton.jit
def in_tile(row, tensor: tl.constexpr, width, block, REAL: tl.constexpr):
    """Say where the first of `width` numbers of these blocks lie in tiles, and the stride from one to the next."""
    start = tl.load(row + tensor).to(tl.pointer_type(REAL))
    num_blocks = tl.load(row + NUM_BLOCKS).to(tl.int32)
    by = tl.where(block < num_blocks // TILE * TILE, TILE, num_blocks % TILE)
    return start + (block // TILE).to(tl.int64) * (width * TILE) + block % TILE, by


@triton.jit
def unclipped(eigenvalues, largest, row, REAL: tl.constexpr):
    """Compute f(λ) = lr / (√(max(λ, resolution · λ_max) / correction) + damping)."""
    above = tl.maximum(eigenvalues, term(row, RESOLUTION, REAL) * largest)
    root = solver.exact_root(solver.exact_ratio(above, above * 0 + term(row, CORRECTION, REAL)))
    return solver.exact_ratio(root * 0 + term(row, LR, REAL), root + term(row, DAMPING, REAL))


@triton.jit
def clipped(f, row, REAL: tl.constexpr):
    """Compute s(λ) = clip(f(λ), lower, upper)."""
    return tl.minimum(tl.maximum(f, term(row, LOWER, REAL)), term(row, UPPER, REAL))


@triton.jit
def tally_(sums, tile, tiles, along, square):
    """Write Σ f(λ) y² and Σ y² of a tile, from those of each lane; see `contract.Tally`."""
    tl.store(sums + tile, tl.sum(along, 0))
    tl.store(sums + tiles + tile, tl.sum(square, 0))


@triton.jit
def scale_of(largest, REAL: tl.constexpr):
    """Find the power of two below the largest entry, and its inverse: both are normal numbers."""
    if REAL == tl.float32:
        bits = tl.maximum(largest, LEAST32).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(bits, 0x7E800000)
        return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)
    else:
        wide = tl.maximum(largest, LEAST64).to(tl.int64, bitcast=True) & 0x7FF0000000000000
        wide = tl.minimum(wide, 0x7FD0000000000000)
        return wide.to(tl.float64, bitcast=True), (0x7FE0000000000000 - wide).to(tl.float64, bitcast=True)


@triton.jit
def pick(rows, index, number):
    """Take row `number` of rows [N, LANES], `index` being their numbers [N, 1]."""
    return tl.sum(tl.where(index == number, rows, 0), 0)


@triton.jit
def reflection(basis_at, by, k, n, index, there):
    """Read w = (0, …, 0, 1, v_k) [N, LANES] of a kept basis, and make τ [1, LANES]; see `kernels.reflections`."""
    first = k * (n - 1) - k * (k - 1) // 2  # numbers of the reflections before it
    v_at = basis_at[None, :] + (first + index - k - 1) * by[None, :]
    w = tl.load(v_at, mask=there & (index > k) & (index < n), other=0)
    w = tl.where(index == k, w * 0 + 1, w)
    return w, (2 / tl.sum(w * w, 0))[None, :]


@triton.jit
def amsgrad(eigenvalues, index, largest, by, keep, n):
    """Set Σ̂ ← max(Σ̂, Σ) with both ascending, where `keep`; returns Σ̂ in the order of eigenvalues [N, LANES].

    `largest` points to the lanes' first maxima, which lie `by` apart.
    """
    rank = (eigenvalues * 0).to(tl.int32)
    for j in range(n):
        other = pick(eigenvalues, index, j)[None, :]
        rank += ((other < eigenvalues) | ((other == eigenvalues) & (j < index))).to(tl.int32)
    rank = tl.where(index < n, rank, n)
    merged = eigenvalues * 0
    for position in range(n):
        here = largest + position * by
        ascending = tl.sum(tl.where(rank == position, eigenvalues, 0), 0)
        maximum = tl.maximum(ascending, tl.load(here, mask=keep, other=0))
        tl.store(here, maximum, mask=keep)
        merged = tl.where(rank == position, maximum[None, :], merged)
    return merged


@triton.jit
def amsgrad_(n, d, ascending, ranks, largest, by, keep, LANES: tl.constexpr, REAL: tl.constexpr):
    """Do what `amsgrad` does to eigenvalues in rows of scratch, with two vectors of scratch more."""
    for i in range(n):
        value = tl.load(d + i * LANES)
        rank = (value * 0).to(tl.int32)
        for j in range(i):
            rank += (tl.load(d + j * LANES) <= value).to(tl.int32)
        for j in range(i + 1, n):
            rank += (tl.load(d + j * LANES) < value).to(tl.int32)
        tl.store(ascending + rank * LANES, value)
        tl.store(ranks + i * LANES, rank.to(REAL))
    for position in range(n):
        here = largest + position * by
        maximum = tl.maximum(tl.load(ascending + position * LANES), tl.load(here, mask=keep, other=0))
        tl.store(here, maximum, mask=keep)
        tl.store(ascending + position * LANES, maximum)
    for i in range(n):
        rank = tl.load(ranks + i * LANES).to(tl.int32)
        tl.store(d + i * LANES, tl.load(ascending + rank * LANES))


@triton.jit
def moments_(
    n, row, block, there, length, x_at, x_by, a, g, y, HAS_M: tl.constexpr, LANES: tl.constexpr, REAL: tl.constexpr
):  # fmt: skip
    """Update m and V, and copy them to the scratch: m to y, V to a. The gradient goes to g.

    Returns V's largest entry, and 0 where all entries are finite, else NaN: 0 · ∞ and 0 · NaN are NaN.
    """
    grad_at, _ = at(row, GRAD, X_BY, block, REAL)
    m_at, m_by = at(row, M, M_BY, block, REAL)
    v_at, v_by = at(row, V, V_BY, block, REAL)
    sign, coupled, beta = term(row, SIGN, REAL), term(row, COUPLED, REAL), term(row, BETA, REAL)
    decay, weight = term(row, DECAY, REAL), term(row, WEIGHT, REAL)
    zero = tl.full((LANES,), 0, REAL)
    largest, check = zero, zero
    for i in range(n):
        exists = length > i
        g_i = sign * tl.load(grad_at + i * x_by, mask=exists, other=0)
        g_i += coupled * tl.load(x_at + i * x_by, mask=exists, other=0)
        m = g_i
        if HAS_M:
            m = beta * (tl.load(m_at + i * m_by, mask=exists, other=0) - g_i) + g_i
            tl.store(m_at + i * m_by, m, mask=exists)
        tl.store(g + i * LANES, g_i)
        tl.store(y + i * LANES, m)
        weighted = weight * g_i
        entry = zero
        for j in range(i + 1):
            here = v_at + (i * (i + 1) // 2 + j) * v_by
            entry = weighted * tl.load(g + j * LANES) + decay * tl.load(here, mask=there, other=0)
            tl.store(here, entry, mask=there)
            tl.store(a + (i * (i + 1) // 2 + j) * LANES, entry)
        largest = tl.maximum(largest, entry)
        check += entry * 0  # a bad entry off the diagonal has one on it
    return largest, check


@triton.jit
def scale_(n, a, y, largest, finite, LANES: tl.constexpr, REAL: tl.constexpr):
    """Divide a by a power of two, so that its largest entry is about 1; returns that. What is not finite is zeroed."""
    zero = tl.full((LANES,), 0, REAL)
    scale, inverse = scale_of(tl.where(finite, largest, zero + 1), REAL)
    for i in range(n * (n + 1) // 2):
        entry = tl.load(a + i * LANES) * inverse
        # Entries too small to matter go: their squares would be denormal.
        counts = finite & (tl.abs(entry) > (ENTRY32 if REAL == tl.float32 else ENTRY64))
        tl.store(a + i * LANES, tl.where(counts, entry, zero))
    for i in range(n):
        tl.store(y + i * LANES, tl.where(finite, tl.load(y + i * LANES), zero))
    return scale


@triton.jit
def scale_back_(
    n, row, block, there, d, scale, finite, HAS_BASIS: tl.constexpr, LANES: tl.constexpr, REAL: tl.constexpr
):  # fmt: skip
    """Multiply the eigenvalues by the scale again. Those of a basis that is kept are kept with it."""
    for i in range(n):
        value = tl.load(d + i * LANES) * scale
        tl.store(d + i * LANES, value)
        if HAS_BASIS:
            kept_at, by = in_tile(row, EIGENVALUES, n, block, REAL)
            tl.store(kept_at + i * by, tl.where(finite, value, float("nan")), mask=there)


@triton.jit
def apply_spectrum_(n, row, d, y, MEASURED: tl.constexpr, LANES: tl.constexpr, REAL: tl.constexpr):
    """Make y ← s(Λ) y; returns Σ f(λ) y² and Σ y² of each lane, where they are MEASURED."""
    largest = tl.full((LANES,), 0, REAL)
    for i in range(n):
        largest = tl.maximum(largest, tl.load(d + i * LANES))
    along, square = tl.full((LANES,), 0, tl.float64), tl.full((LANES,), 0, tl.float64)
    for i in range(n):
        f = unclipped(tl.load(d + i * LANES), largest, row, REAL)
        y_i = tl.load(y + i * LANES)
        if MEASURED:
            power = y_i.to(tl.float64) * y_i.to(tl.float64)
            along += f.to(tl.float64) * power
            square += power
        tl.store(y + i * LANES, clipped(f, row, REAL) * y_i)
    return along, square


@triton.jit
def move_(n, row, length, x_at, x_by, y, solved, finite, LANES: tl.constexpr, REAL: tl.constexpr):
    """Make x ← shrink · x − y, where it is solved; x ← shrink · x where it is not, and NaN where V is not finite."""
    shrink = term(row, SHRINK, REAL)
    zero = tl.full((LANES,), 0, REAL)
    for i in range(n):
        exists = length > i
        move = tl.where(solved, tl.load(y + i * LANES), tl.where(finite, zero, float("nan")))
        tl.store(x_at + i * x_by, shrink * tl.load(x_at + i * x_by, mask=exists, other=0) - move, mask=exists)


@triton.jit
def keep_basis_(
    n, row, block, there, a, h, u, log, sweeps, is_reversed, LANES: tl.constexpr, REAL: tl.constexpr
):  # fmt: skip
    """Write U as reflections. A column of it is what the way back makes of a unit vector."""
    basis_at, by = in_tile(row, BASIS, n * (n - 1) // 2, block, REAL)
    zero, number = tl.full((LANES,), 0, REAL), tl.full((LANES,), 0, tl.int32)
    for j in range(n - 1):
        for i in range(n):
            tl.store(u + i * LANES, tl.where(number + i == j, zero + 1, zero))
        solver.apply_basis_(n, a, h, u, log, sweeps, is_reversed, LANES)
        solver.factor_column_(n, j, u, basis_at, by, there, LANES)


@triton.jit
def list_(unsolved, tile, lane, failed, LANES: tl.constexpr):
    """List the blocks that failed, for `redo`."""
    if tl.max(failed.to(tl.int32), 0) > 0:
        position = tl.atomic_add(unsolved + lane * 0, 1, mask=failed)
        tl.store(unsolved + 1 + position, tile * LANES + lane, mask=failed)


@triton.jit(do_not_specialize=["tiles", "most", "n", "rows"])
def advance(
    table, owners, sums, scratch, unsolved, tiles, most, n, rows,
    PAIR: tl.constexpr, LANES: tl.constexpr, REAL: tl.constexpr,
    HAS_M: tl.constexpr, HAS_LARGEST: tl.constexpr, HAS_BASIS: tl.constexpr, MEASURED: tl.constexpr,
):  # fmt: skip
    """Find U and take the step. `scratch` has `scratch_rows` rows of lanes a program.

    One kernel serves all n but 2, which is a PAIR.

    Blocks that did not converge within `most` sweeps have their moments updated and their x shrunk, but not moved, and
    are listed in `unsolved`: their number, then tile · LANES + lane of each.
    """
    lane = tl.arange(0, LANES)
    a = scratch + tl.program_id(0).to(tl.int64) * rows * LANES + lane
    d = a + (n * (n + 1) // 2) * LANES
    y, h, u, q, e = d + n * LANES, d + 2 * n * LANES, d + 3 * n * LANES, d + 4 * n * LANES, d + (5 * n + 1) * LANES
    log = d + (6 * n + 1) * LANES
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = table + tl.load(owners + tile).to(tl.int64) * WIDTH
        block = (tile - tl.load(row + FIRST).to(tl.int32)) * LANES + lane
        there = block < tl.load(row + NUM_BLOCKS).to(tl.int32)
        length = tl.where(there, tl.load(row + K).to(tl.int32), 0)
        x_at, x_by = at(row, X, X_BY, block, REAL)

        largest, check = moments_(n, row, block, there, length, x_at, x_by, a, u, y, HAS_M, LANES, REAL)
        finite = check == 0
        scale = scale_(n, a, y, largest, finite, LANES, REAL)
        sweeps, is_reversed, converged = solver.solve_(n, a, d, e, y, h, u, q, log, most, PAIR, LANES, REAL)
        solved = finite & converged
        scale_back_(n, row, block, there, d, scale, finite, HAS_BASIS, LANES, REAL)
        if HAS_LARGEST:
            largest_at, largest_by = at(row, LARGEST, LARGEST_BY, block, REAL)
            amsgrad_(n, d, u, q, largest_at, largest_by, there & solved, LANES, REAL)
        along, square = apply_spectrum_(n, row, d, y, MEASURED, LANES, REAL)
        if MEASURED:  # what did not converge is counted when it is redone
            lost = tl.where(finite, 0.0, float("nan")).to(tl.float64)
            tally_(sums, tile, tiles, tl.where(solved, along, lost), tl.where(solved, square, lost))

        solver.apply_basis_(n, a, h, y, log, sweeps, is_reversed, LANES)
        move_(n, row, length, x_at, x_by, y, solved, finite, LANES, REAL)
        if HAS_BASIS:
            keep_basis_(n, row, block, there, a, h, u, log, sweeps, is_reversed, LANES, REAL)
        list_(unsolved, tile, lane, there & finite & (solved == 0), LANES)


def scratch_rows(n: int, most: int) -> int:
    """Count a program's rows of lanes in `advance`: the triangle, six vectors and one more row, the log."""
    return n * (n + 1) // 2 + 6 * n + 1 + max(most, 1) * (2 * n - 1)


@triton.jit(do_not_specialize=["tiles", "n"])
def turn(
    table, owners, sums, tiles, n, N: tl.constexpr, LANES: tl.constexpr, REAL: tl.constexpr,
    HAS_M: tl.constexpr, HAS_LARGEST: tl.constexpr, MEASURED: tl.constexpr,
):  # fmt: skip
    """Take the step under the basis that is kept: Λ ← d Λ + w (Uᵀ g)², and V itself is updated as ever.

    Every number is written by the thread that read it: rows [N, LANES] keep one layout throughout.
    """
    lane = tl.arange(0, LANES)
    index = tl.arange(0, N)[:, None]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = table + tl.load(owners + tile).to(tl.int64) * WIDTH
        block = (tile - tl.load(row + FIRST).to(tl.int32)) * LANES + lane
        in_place = block < tl.load(row + NUM_BLOCKS).to(tl.int32)
        there = in_place[None, :]
        exists = there & (index < tl.load(row + K).to(tl.int32))
        x_at, by = at(row, X, X_BY, block, REAL)
        x_at = x_at[None, :] + index * by
        grad_at, by = at(row, GRAD, X_BY, block, REAL)
        x = tl.load(x_at, mask=exists, other=0)
        g = term(row, SIGN, REAL) * tl.load(grad_at[None, :] + index * by, mask=exists, other=0)
        g += term(row, COUPLED, REAL) * x
        m = g
        if HAS_M:
            m_at, by = at(row, M, M_BY, block, REAL)
            m_at = m_at[None, :] + index * by
            m = term(row, BETA, REAL) * (tl.load(m_at, mask=exists, other=0) - g) + g
            tl.store(m_at, m, mask=exists)

        decay, weight = term(row, DECAY, REAL), term(row, WEIGHT, REAL)
        v_at, v_by = at(row, V, V_BY, block, REAL)
        for i in range(n):
            g_i = pick(g, index, i)[None, :]
            here = v_at[None, :] + (i * (i + 1) // 2 + index) * v_by
            inside = there & (index <= i)
            tl.store(here, weight * g_i * g + decay * tl.load(here, mask=inside, other=0), mask=inside)
        basis_at, by = in_tile(row, BASIS, n * (n - 1) // 2, block, REAL)
        y, turned = m, g
        for k in range(n - 1):
            w, tau = reflection(basis_at, by, k, n, index, there)
            y -= tau * tl.sum(w * y, 0)[None, :] * w
            turned -= tau * tl.sum(w * turned, 0)[None, :] * w

        eigenvalues_at, by = in_tile(row, EIGENVALUES, n, block, REAL)
        eigenvalues_at = eigenvalues_at[None, :] + index * by[None, :]
        d = decay * tl.load(eigenvalues_at, mask=there & (index < n), other=0) + weight * turned * turned
        tl.store(eigenvalues_at, d, mask=there & (index < n))
        finite = tl.sum(d * 0, 0) == 0
        d = tl.where(finite[None, :], d, 0.0)
        if HAS_LARGEST:
            largest_at, by = at(row, LARGEST, LARGEST_BY, block, REAL)
            d = amsgrad(d, index, largest_at, by, in_place & finite, n)
        f = unclipped(d, tl.max(tl.maximum(d, 0.0), 0)[None, :], row, REAL)
        if MEASURED:
            power = tl.where(finite[None, :], y, float("nan")).to(tl.float64)
            power = tl.where(index < n, power * power, 0.0)
            tally_(sums, tile, tiles, tl.sum(f.to(tl.float64) * power, 0), tl.sum(power, 0))
        y = tl.where(index < n, clipped(f, row, REAL) * y, 0.0)
        basis_at, by = in_tile(row, BASIS, n * (n - 1) // 2, block, REAL)
        for back in range(n - 1):
            w, tau = reflection(basis_at, by, n - 2 - back, n, index, there)
            y -= tau * tl.sum(w * y, 0)[None, :] * w
        x = term(row, SHRINK, REAL) * x - tl.where(finite[None, :], y, float("nan"))
        tl.store(x_at, x, mask=exists)


@triton.jit
def listed(row, block, index, exists, x, HAS_M: tl.constexpr, REAL: tl.constexpr):
    """Read m of a block as `advance` left it, in float64. Without m the gradient is formed again from x.

    No x has then been shrunk, for decay is either coupled or decoupled.
    """
    if HAS_M:
        m_at, by = at(row, M, M_BY, block, REAL)
        return tl.load(m_at + index * by, mask=exists, other=0).to(tl.float64)
    else:
        grad_at, by = at(row, GRAD, X_BY, block, REAL)
        m = term(row, SIGN, REAL) * tl.load(grad_at + index * by, mask=exists, other=0)
        return (m + term(row, COUPLED, REAL) * x).to(tl.float64)


@triton.jit
def keep_factored_(U, index, j, n, basis_at, by, REAL: tl.constexpr):
    """Write U as reflections: each column in turn is taken to ±e_k, see `kernels.reflections`."""
    for k in range(n - 1):
        column = tl.where((index >= k) & (index < n), tl.sum(tl.where(j == k, U, 0.0), 1), 0.0)
        head = tl.sum(tl.where(index == k, column, 0.0), 0)
        norm = tl.sqrt(tl.sum(column * column, 0))
        w = tl.where(index == k, 1.0, column / (head + tl.where(head < 0, -norm, norm)))
        U -= (2 / tl.sum(w * w, 0)) * w[:, None] * tl.sum(w[:, None] * U, 0)[None, :]
        here = basis_at + (k * (n - 1) - k * (k - 1) // 2 + index - k - 1) * by
        tl.store(here, w.to(REAL), mask=(index > k) & (index < n))


@triton.jit(do_not_specialize=["tiles", "n"])
def redo(
    table, owners, sums, unsolved, tiles, n, N: tl.constexpr, LANES: tl.constexpr, REAL: tl.constexpr,
    HAS_M: tl.constexpr, HAS_LARGEST: tl.constexpr, HAS_BASIS: tl.constexpr, MEASURED: tl.constexpr,
):  # fmt: skip
    """Move the blocks that `advance` has listed: cyclic Jacobi in float64, which always converges.

    Their moments are updated and their x is shrunk already.
    """
    index = tl.arange(0, N)
    i, j = index[:, None], index[None, :]
    for number in range(tl.program_id(0), tl.load(unsolved), tl.num_programs(0)):
        code = tl.load(unsolved + 1 + number)
        row = table + tl.load(owners + code // LANES).to(tl.int64) * WIDTH
        block = (code // LANES - tl.load(row + FIRST).to(tl.int32)) * LANES + code % LANES
        exists = index < tl.load(row + K).to(tl.int32)
        x_at, by = at(row, X, X_BY, block, REAL)
        x_at += index * by
        x = tl.load(x_at, mask=exists, other=0)
        m = listed(row, block, index, exists, x, HAS_M, REAL)
        v_at, by = at(row, V, V_BY, block, REAL)
        high, low = tl.maximum(i, j), tl.minimum(i, j)
        A = tl.load(v_at + (high * (high + 1) // 2 + low) * by, mask=high < n, other=0).to(tl.float64)
        scale, inverse = scale_of(tl.max(tl.max(tl.where(i == j, A, 0.0), 1), 0), tl.float64)
        A, U = jacobi(A * inverse, index, i, j, n, N)

        y = tl.sum(U * m[:, None], 0)
        d = (tl.sum(tl.where(i == j, A, 0.0), 0) * scale).to(REAL)
        if HAS_BASIS:
            eigenvalues_at, by = in_tile(row, EIGENVALUES, n, block, REAL)
            tl.store(eigenvalues_at + index * by, d, mask=index < n)
        if HAS_LARGEST:
            largest_at, by = at(row, LARGEST, LARGEST_BY, block, REAL)
            alone = tl.full((1,), 0, tl.int32)
            d = tl.sum(amsgrad(d[:, None], i, largest_at + alone, by, alone == 0, n), 1)
        f = unclipped(d, tl.max(tl.maximum(d, 0.0), 0), row, REAL)
        if MEASURED:
            power = tl.where(index < n, y * y, 0.0)
            tl.atomic_add(sums + code // LANES, tl.sum(f.to(tl.float64) * power, 0))
            tl.atomic_add(sums + tiles + code // LANES, tl.sum(power, 0))
        s = tl.where(index < n, clipped(f, row, REAL), 0.0)
        tl.store(x_at, x - tl.sum(U * (s * y)[None, :], 1).to(REAL), mask=exists)
        if HAS_BASIS:
            basis_at, by = in_tile(row, BASIS, n * (n - 1) // 2, block, REAL)
            keep_factored_(U, index, j, n, basis_at, by, REAL)
