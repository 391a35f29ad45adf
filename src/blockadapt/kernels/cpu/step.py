"""Tiles: 32 blocks at a time out of memory into lanes, through one step, and back.

For each tile, in one pass over memory:

    1  read V, add w g gᵀ, write it back, and go on with the copy in cache
    2  y = Uᵀ m, by solving the eigenproblem (`eigensolver`) or with the basis that was kept
    3  y ← s(Λ) y, any function of the eigenvalues
    4  x ← x − U y

Letters as in `eigensolver`. Where a block lies is an address and byte strides, from the segment table. What is
kept between refreshes lies in tiles already, and a segment that keeps a basis begins a tile of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from blockadapt.kernels.contract import TERMS as NAMES
from blockadapt.kernels.cpu.eigensolver import (
    _four,
    ascends,
    diagonalise_,
    jit,
    log_length,
    reduce_exactly_,
    reflect_,
    reverse_,
    rotate_exactly_,
    rotations_,
    undiagonalise_,
    unreduce_,
    wide_length,
)
from blockadapt.kernels.cpu.lanes import (
    LANES,
    TURN,
    absolute,
    broadcast,
    every,
    fma,
    gather,
    load,
    load_part,
    load_row,
    maximum,
    minimum,
    pointer,
    power_of_two,
    prefetch,
    rows_at,
    scatter,
    select,
    sqrt,
    store,
    store_part,
    store_row,
    take_ticket,
    turn_few_in,
    turn_few_out,
    turn_in,
    turn_onto,
    turn_out,
)

LINE = 64
"""Bytes of a cache line."""

MAX_SWEEPS = 6
"""QR sweeps allowed for each eigenvalue; two are used. A block that needs more is solved by `eigh`."""

# Columns of the segment table: for each of these its address and the byte strides of [major, minor, element],
X, GRAD, M, V, LARGEST = range(0, 20, 4)
STRIDED = 5
# the addresses of what lies in tiles,
BASIS, EIGENVALUES = 20, 21
# how many blocks lie side by side on the minor axis, coordinates in each, and blocks in all.
MINOR, LENGTH, BLOCKS = 22, 23, 24
TABLE = 25
# Columns of the coefficient table.
SIGN, COUPLED, SHRINK = (NAMES.index(f"descent.{name}") for name in ("sign", "coupled", "shrink"))
BETA1, DECAY, WEIGHT = (NAMES.index(name) for name in ("first.beta", "second.decay", "second.weight"))
LR, CORRECTION, DAMPING = (NAMES.index(f"spectrum.{name}") for name in ("lr", "correction", "damping"))
LOWER, UPPER, RESOLUTION = (NAMES.index(f"spectrum.{name}") for name in ("lower", "upper", "resolution"))
TERMS = len(NAMES)


@jit
def locate(
    table: Any, starts: Any, block: int, where: Any, steps: Any, lengths: Any, owners: Any, blank: Any
) -> tuple[int, int]:
    """Addresses of each lane's block, from `block` on; a lane past its segment's end gets a block of zeros at `blank`.

    Returns how many lanes lie side by side in memory, and then the rest do too: all of them, or those up to the end of
    a line, or 0 if there is no such order. And for how many tiles from here on `move_on_` finds the next addresses.
    """
    L = LANES
    segment = np.searchsorted(starts, block, side="right") - 1
    within, minors = block - starts[segment], table[segment, MINOR]
    major = within // minors
    minor = within - major * minors
    if minor + L <= minors:  # a tile within one line of one segment: almost all are
        for role in range(STRIDED):
            stride = table[segment, 4 * role + 2]
            address = table[segment, 4 * role] + major * table[segment, 4 * role + 1] + minor * stride
            for lane in range(L):
                where[role, lane] = address
                address += stride
        for lane in range(L):
            lengths[lane] = table[segment, LENGTH]
            owners[lane] = segment
            for role in range(3):
                steps[role, lane] = table[segment, 4 * role + 3]
        return L if is_dense(table, segment, blank.itemsize) else 0, (minors - minor) // L
    beside, pieces = 0, 1
    for lane in range(L):
        inside = block + lane < starts[segment] + table[segment, BLOCKS]
        if lane > 0 and ((inside and minor == 0) or inside != (lengths[lane - 1] > 0)):
            beside, pieces = lane, pieces + 1
        if not is_dense(table, segment, blank.itemsize):
            pieces = L
        for role in range(STRIDED):
            column = 4 * role
            address = table[segment, column] + major * table[segment, column + 1] + minor * table[segment, column + 2]
            where[role, lane] = address if inside else blank.ctypes.data
        for role in range(3):
            steps[role, lane] = table[segment, 4 * role + 3]
        lengths[lane] = table[segment, LENGTH] if inside else 0
        owners[lane] = segment
        minor += 1
        if minor == table[segment, MINOR]:
            minor = 0
            major += 1
        if block + lane + 1 == starts[segment + 1] and segment + 2 < starts.size:
            segment += 1
            major = minor = 0
    return beside if pieces == 2 else 0, 1


@jit
def is_dense(table: Any, segment: int, size: int) -> bool:
    """Whether neighbours on the minor axis are neighbours in memory, in x, grad and m."""
    dense = table[segment, X + 2] == size and table[segment, GRAD + 2] == size
    return bool(dense and (table[segment, M] == 0 or table[segment, M + 2] == size))


@jit
def move_on_(table: Any, segment: int, where: Any) -> None:
    """The addresses of the next tile on the same line."""
    for role in range(STRIDED):
        stride = where.shape[1] * table[segment, 4 * role + 2]
        for lane in range(where.shape[1]):
            where[role, lane] += stride


@jit
def fetch_(n: int, rows: Any, where: Any, steps: Any, lengths: Any, beside: int, spare: Any) -> None:
    """Coordinates of each lane's block into n rows; missing ones are zero."""
    L = where.size
    zero = broadcast(rows.dtype.type(0))
    for i in range(n):
        if beside == L:
            store(rows, i * L, load_row(where[0] + i * steps[0], rows) if i < lengths[0] else zero)
        elif beside > 0:
            row = zero
            if i < lengths[0]:
                row = load_part(where[0] + i * steps[0], 0, beside, row)
            if i < lengths[beside]:
                row = load_part(where[beside] + i * steps[beside] - beside * rows.itemsize, beside, L, row)
            store(rows, i * L, row)
        else:
            for lane in range(L):
                inside = i < lengths[lane]
                nowhere = rows.ctypes.data + i * L * rows.itemsize  # the row itself, zero until it is filled
                spare[lane] = where[lane] + i * steps[lane] if inside else nowhere
            store(rows, i * L, zero)
            store(rows, i * L, gather(spare, 0, rows))


@jit
def put_(n: int, rows: Any, where: Any, steps: Any, lengths: Any, beside: int, spare: Any) -> None:
    """The inverse of `fetch_`; missing coordinates are dropped."""
    L = where.size
    for i in range(n):
        if beside == L:
            if i < lengths[0]:
                store_row(where[0] + i * steps[0], load(rows, i * L))
        elif beside > 0:
            row = load(rows, i * L)
            if i < lengths[0]:
                store_part(where[0] + i * steps[0], 0, beside, row)
            if i < lengths[beside]:
                store_part(where[beside] + i * steps[beside] - beside * rows.itemsize, beside, L, row)
        else:
            for lane in range(L):
                inside = i < lengths[lane]
                spare[lane] = where[lane] + i * steps[lane] if inside else spare[L:].ctypes.data
            scatter(spare, 0, load(rows, i * L))


@jit
def lift_(addresses: Any, count: int, rows: Any, L: int) -> None:
    """`count` consecutive numbers of each lane into as many rows. The last square of 16 overlaps the one before."""
    if count < TURN:
        turn_few_in(addresses, count, rows)
        return
    for i in range(0, count, TURN):
        i = min(i, count - TURN)
        turn_in(addresses, i * rows.itemsize, rows, i * L)


@jit
def lower_(addresses: Any, count: int, rows: Any, L: int) -> None:
    """The inverse of `lift_`."""
    if count < TURN:
        turn_few_out(addresses, count, rows)
        return
    for i in range(0, count, TURN):
        i = min(i, count - TURN)
        turn_out(addresses, i * rows.itemsize, rows, i * L)


@jit
def expect(address: int) -> int:
    """Prefetch the two cache lines from an address on; returns the address after them."""
    prefetch(address)
    prefetch(address + LINE)
    return address + 2 * LINE


@jit
def add_square_(n: int, g: Any, weight: Any, addresses: Any, decays: Any, rows: Any, ahead: int, L: int) -> int:
    """V ← decay V + weight g gᵀ where it lies, 16 entries at a time; returns the next address to expect.

    Between refreshes nothing else is done with V, so it is not worth taking apart into lanes.
    """
    filled, offset = 0, 0
    for i in range(n):
        weighted = weight * load(g, i * L)
        for j in range(i + 1):
            store(rows, filled * L, weighted * load(g, j * L))
            filled += 1
            if filled == TURN:
                turn_onto(addresses, offset, filled, rows, decays)
                offset += filled * rows.itemsize
                filled = 0
            ahead = expect(ahead)
    if filled > 0:
        turn_onto(addresses, offset, filled, rows, decays)
    return ahead


@jit
def turn_(n: int, basis: Any, g: Any, y: Any, d: Any, e: Any, decay: Any, weight: Any, ahead: int, L: int) -> None:
    """e = Uᵀ y, and d ← decay d + weight (Uᵀ g)², the diagonal of Uᵀ V U. Two columns at once: one waits for itself."""
    zero = broadcast(basis.dtype.type(0))
    for j in range(0, n, 2):
        k = min(j + 1, n - 1)
        g_j, g_k, y_j, y_k = zero, zero, zero, zero
        for i in range(n):
            entry, other = load(basis, (i * n + j) * L), load(basis, (i * n + k) * L)
            gradient, average = load(g, i * L), load(y, i * L)
            g_j, y_j = fma(entry, gradient, g_j), fma(entry, average, y_j)
            g_k, y_k = fma(other, gradient, g_k), fma(other, average, y_k)
            ahead = expect(ahead)
        value_j = fma(weight * g_j, g_j, decay * load(d, j * L))
        value_k = fma(weight * g_k, g_k, decay * load(d, k * L))
        store(d, j * L, value_j)
        store(d, k * L, value_k)
        store(e, j * L, y_j)
        store(e, k * L, y_k)


@jit
def turn_back_(n: int, basis: Any, e: Any, y: Any, ahead: int, L: int) -> None:
    """y = U e."""
    zero = broadcast(basis.dtype.type(0))
    for i in range(0, n, 2):
        k = min(i + 1, n - 1)
        total, other = zero, zero
        for j in range(n):
            entry = load(e, j * L)
            total = fma(load(basis, (i * n + j) * L), entry, total)
            other = fma(load(basis, (k * n + j) * L), entry, other)
            ahead = expect(ahead)
        store(y, i * L, total)
        store(y, k * L, other)


@jit
def effective_(n: int, d: Any, y: Any, terms: Any, L: int) -> None:
    """y ← s(λ) y with s = clip(lr / (√(λ/correction) + damping), lower, upper), λ no less than resolution · λ_max."""
    f = d.dtype.type
    largest = broadcast(f(0))
    for i in range(n):
        largest = maximum(load(d, i * L), largest)
    floor = load(terms, RESOLUTION * L) * largest
    lr, damping = load(terms, LR * L), load(terms, DAMPING * L)
    lower, upper = load(terms, LOWER * L), load(terms, UPPER * L)
    unbias = broadcast(f(1)) / load(terms, CORRECTION * L)
    for i in range(n):
        s = lr / (sqrt(maximum(load(d, i * L), floor) * unbias) + damping)
        store(y, i * L, load(y, i * L) * minimum(maximum(s, lower), upper))


@jit
def amsgrad_(n: int, d: Any, addresses: Any, rows: Any, keep: Any, L: int) -> None:
    """Σ̂ ← max(Σ̂, Σ), both ascending; d ← Σ̂ in the order of d. Lanes outside `keep` leave Σ̂ as it is."""
    f = d.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    ranks, largest, merged = rows[: n * L], rows[n * L : 2 * n * L], rows[2 * n * L : 3 * n * L]
    lift_(addresses, n, largest, L)
    for i in range(n):
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
        store(largest, position * L, select(keep, total, load(largest, position * L)))
    lower_(addresses, n, largest, L)
    for i in range(n):
        rank = load(ranks, i * L)
        value = zero
        for position in range(n):
            value = select(rank == broadcast(f(position)), load(merged, position * L), value)
        store(d, i * L, value)


@jit
def aligned(memory: Any) -> Any:
    """From the first cache line on: a row of lanes that straddles lines takes twice as long to load."""
    return memory[(-memory.ctypes.data % 64) // memory.itemsize :]


@jit
def scratch_length(n: int, L: int) -> int:
    """Numbers of scratch that `advance` needs."""
    return (max(n * (n + 1) // 2, TURN) + 12 * n + TERMS) * L


@jit
def fill_(terms: Any, coefficients: Any, owners: Any) -> None:
    """Each lane's coefficients, from the segment that owns it."""
    L = owners.size
    for lane in range(L):
        for term in range(TERMS):
            terms[term * L + lane] = coefficients[owners[lane], term]


@jit
def advance(
    n: int, table: Any, coefficients: Any, starts: Any, tile: int, end: int, scratch: Any, wide: Any, log: Any,
    most: int, kept: bool, failed: Any,
) -> bool:  # fmt: skip
    """Take the step for tiles [tile, end) of blocks of n; see the module's head.

    `kept` uses each block's stored basis instead of finding it. Blocks that did not converge within `most` sweeps have
    their moments updated and their x shrunk, but not moved, and are marked in `failed`. Returns whether there are any.
    """
    f = scratch.dtype.type
    L = LANES
    zero, one = broadcast(f(0)), broadcast(f(1))
    tiny = broadcast(f(1.1754944e-38) if scratch.itemsize == 4 else f(2.2250738585072014e-308))
    triangle = n * (n + 1) // 2
    a, rest = scratch[: max(triangle, TURN) * L], scratch[max(triangle, TURN) * L :]
    x, g, m, d = _four(rest, n * L)
    e, y, h, _ = _four(rest[4 * n * L :], n * L)
    free, sorting, terms = rest[7 * n * L : 9 * n * L], rest[9 * n * L : 12 * n * L], rest[12 * n * L :]
    decays = terms[DECAY * L : (DECAY + 1) * L]
    blank = np.zeros(triangle, scratch.dtype)
    where = np.zeros((STRIDED, L), dtype=np.int64)
    steps = np.zeros((3, L), dtype=np.int64)
    lengths = np.zeros(L, dtype=np.int64)
    owners = np.zeros(L, dtype=np.int64)
    spare = np.zeros(L + 1, dtype=np.int64)
    ends = np.zeros(most, dtype=np.int64)
    has_m, has_largest, has_basis = table[0, M] != 0, table[0, LARGEST] != 0, table[0, BASIS] != 0
    unknown = broadcast(f(np.nan))
    filled = -1  # the one segment whose coefficients the lanes hold
    beside, run = 0, 0
    failures = False
    while tile < end:
        if run > 1:
            move_on_(table, owners[0], where)
            run -= 1
        else:
            beside, run = locate(table, starts, tile * L, where, steps, lengths, owners, blank)
        if filled < 0 or owners[0] != filled or owners[L - 1] != filled:
            fill_(terms, coefficients, owners)
            filled = owners[0] if owners[0] == owners[L - 1] else -1
        fetch_(n, x, where[0], steps[0], lengths, beside, spare)
        fetch_(n, g, where[1], steps[1], lengths, beside, spare)
        if has_m:
            fetch_(n, m, where[2], steps[2], lengths, beside, spare)
        place = (tile * L - starts[owners[0]]) // L
        basis = rows_at(table[owners[0], BASIS] + place * n * n * L * scratch.itemsize, n * n, scratch)
        eigenvalues = rows_at(table[owners[0], EIGENVALUES] + place * n * L * scratch.itemsize, n, scratch)
        # What the next tile needs follows this one's in memory, almost always. It is asked for piece by piece, between
        # the sums: all at once would fill the processor's few slots for lines on their way, and stall.
        next_v = where[3, 0] + L * triangle * scratch.itemsize
        next_eigenvalues = eigenvalues.ctypes.data + L * n * scratch.itemsize
        ahead = basis.ctypes.data + L * n * n * scratch.itemsize if kept else next_v

        sign, coupled, beta1 = load(terms, SIGN * L), load(terms, COUPLED * L), load(terms, BETA1 * L)
        for i in range(n):
            gradient = fma(coupled, load(x, i * L), sign * load(g, i * L))
            store(g, i * L, gradient)
            average = gradient
            if has_m:
                average = fma(beta1, load(m, i * L) - gradient, gradient)
                store(m, i * L, average)
            store(y, i * L, average)
            for role in range(3):
                expect(where[role, 0] + i * steps[role, 0] + L * scratch.itemsize)
            if kept:
                expect(next_eigenvalues + 2 * i * LINE)
        if has_m:
            put_(n, m, where[2], steps[2], lengths, beside, spare)
        decay, weight = load(terms, DECAY * L), load(terms, WEIGHT * L)
        check = zero  # 0 · ∞ and 0 · NaN are NaN
        if kept:
            ahead = add_square_(n, g, weight, where[3], decays, a, ahead, L)
            turn_(n, basis, g, y, eigenvalues, e, decay, weight, ahead, L)
            for i in range(n):
                store(d, i * L, load(eigenvalues, i * L))
                check = fma(load(d, i * L), zero, check)
            finite = check == zero
            solved = finite
            if has_largest:
                amsgrad_(n, d, where[4], sorting, finite, L)
            effective_(n, d, e, terms, L)
            turn_back_(n, basis, e, y, next_v, L)
        else:
            lift_(where[3], triangle, a, L)
            largest = zero
            row = 0
            for i in range(n):
                weighted = weight * load(g, i * L)
                for j in range(i + 1):
                    entry = fma(weighted, load(g, j * L), decay * load(a, row))
                    store(a, row, entry)
                    row += L
                    ahead = expect(ahead)
                entry = load(a, row - L)  # on the diagonal: a bad entry off it has one there
                largest = maximum(entry, largest)
                check = fma(entry, zero, check)
            lower_(where[3], triangle, a, L)
            finite = check == zero
            solved = finite
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
                value = load(d, i * L) * scale
                store(d, i * L, value)
                if has_basis:
                    store(eigenvalues, i * L, select(finite, value, unknown))
            if has_largest:
                amsgrad_(n, d, where[4], sorting, solved, L)
            effective_(n, d, y, terms, L)
            if has_basis:
                rotations_(n, basis, log, ends, sweeps, L)
                reverse_(n, basis, ascending, n, L)
                reflect_(n, a, h, basis, L)
                turn_back_(n, basis, y, e, next_v, L)
                y, e = e, y
            else:
                undiagonalise_(y, log, ends, sweeps, L)
                reverse_(n, y, ascending, 1, L)
                if n > 2:
                    unreduce_(n, a, h, y, L)
            if not every(solved):
                store(free, 0, select(solved | ~finite, zero, one))
                for lane in range(L):
                    if free[lane] != 0 and lengths[lane] > 0:
                        failed[tile * L + lane] = 1
                        failures = True

        shrink = load(terms, SHRINK * L)
        for i in range(n):
            move = select(solved, load(y, i * L), select(finite, zero, unknown))
            store(x, i * L, fma(shrink, load(x, i * L), -move))
        put_(n, x, where[0], steps[0], lengths, beside, spare)
        tile += 1
    return failures


@jit
def advance_ones(table: Any, coefficients: Any, starts: Any, tile: int, end: int, scratch: Any) -> None:
    """`advance` for blocks of 1, where V is its own eigenvalue: a diagonal method, at the price of one.

    Tiles that lie side by side in memory, as almost all do, are run through without looking up each one's place.
    """
    L, size = LANES, scratch.itemsize
    terms, lanes = scratch[: TERMS * L], scratch[TERMS * L : (TERMS + STRIDED) * L]
    blank = np.zeros(1, scratch.dtype)
    where = np.zeros((STRIDED, L), dtype=np.int64)
    steps = np.zeros((3, L), dtype=np.int64)
    lengths = np.zeros(L, dtype=np.int64)
    owners = np.zeros(L, dtype=np.int64)
    has = table[0, : 4 * STRIDED : 4] != 0
    while tile < end:
        lanes_beside, run = locate(table, starts, tile * L, where, steps, lengths, owners, blank)
        segment, beside = owners[0], lanes_beside == L
        for role in range(3, STRIDED):
            beside = beside and (not has[role] or table[segment, 4 * role + 2] == size)
        fill_(terms, coefficients, owners)
        run = min(run, end - tile) if beside else 1
        for _ in range(run):
            for role in range(STRIDED):
                if has[role] and beside:
                    store(lanes, role * L, load_row(where[role, 0], lanes))
                elif has[role]:
                    store(lanes, role * L, gather(where[role], 0, lanes))
            step_ones_(lanes, has, terms, L)
            for role in range(STRIDED):
                if has[role] and role != 1 and beside:
                    store_row(where[role, 0], load(lanes, role * L))
                elif has[role] and role != 1:
                    scatter(where[role], 0, load(lanes, role * L))
                where[role, 0] += L * size
            if table[segment, BASIS] != 0:
                offset = (tile * L - starts[segment]) * size
                store_row(table[segment, BASIS] + offset, broadcast(scratch.dtype.type(1)))
                store_row(table[segment, EIGENVALUES] + offset, load(lanes, 3 * L))
            tile += 1


@jit
def step_ones_(lanes: Any, has: Any, terms: Any, L: int) -> None:
    """The step for one tile of blocks of 1: a row of lanes for each tensor of a segment, in their order."""
    f = lanes.dtype.type
    zero = broadcast(f(0))
    x = load(lanes, 0)
    g = fma(load(terms, COUPLED * L), x, load(terms, SIGN * L) * load(lanes, L))
    m = g
    if has[2]:
        m = fma(load(terms, BETA1 * L), load(lanes, 2 * L) - g, g)
    second_moment = fma(load(terms, WEIGHT * L) * g, g, load(terms, DECAY * L) * load(lanes, 3 * L))
    finite = second_moment * zero == zero
    store(lanes, 2 * L, m)
    store(lanes, 3 * L, second_moment)
    adapted = second_moment
    if has[4]:
        adapted = select(finite, maximum(second_moment, load(lanes, 4 * L)), load(lanes, 4 * L))
    store(lanes, 4 * L, adapted)
    store(lanes, 0, m)
    effective_(1, lanes[4 * L :], lanes, terms, L)
    move = select(finite, load(lanes, 0), broadcast(f(np.nan)))
    store(lanes, 0, fma(load(terms, SHRINK * L), x, -move))


# Entries of an order: what a thread needs to know, as int64. All threads take from the first and write to the second.
TICKET, FAILURES, SIZE, SEGMENTS, CHUNKS, SWEEPS, KEPT = range(7)
TABLE_AT, COEFFICIENTS_AT, STARTS_AT, CHUNKS_AT, FAILED_AT = range(7, 12)
ORDER = 12


def worker(real: Any) -> Callable[[Any], None]:
    """The function that each thread runs, for one float type: take the next chunk of tiles until none is left."""

    def work(data: Any) -> None:
        order = numba.carray(data, (ORDER,), np.int64)
        n, segments, most = order[SIZE], order[SEGMENTS], order[SWEEPS]
        table = numba.carray(pointer(order[TABLE_AT]), (segments, TABLE), np.int64)
        coefficients = numba.carray(pointer(order[COEFFICIENTS_AT]), (segments, TERMS), real)
        starts = numba.carray(pointer(order[STARTS_AT]), (segments + 1,), np.int64)
        failed = numba.carray(pointer(order[FAILED_AT]), (starts[segments],), np.uint8)
        chunks = numba.carray(pointer(order[CHUNKS_AT]), (order[CHUNKS] + 1,), np.int64)
        L = LANES
        scratch = aligned(np.empty(scratch_length(n, L) + L, real))
        log = aligned(np.empty(log_length(n, most, L) + L, real))
        wide = aligned(np.empty(wide_length(n, L) + L, np.float64))
        kept = order[KEPT] != 0
        while True:
            chunk = take_ticket(order, TICKET)
            if chunk >= order[CHUNKS]:
                return
            first, last = chunks[chunk], chunks[chunk + 1]
            if n == 1:
                advance_ones(table, coefficients, starts, first, last, scratch)
            elif advance(n, table, coefficients, starts, first, last, scratch, wide, log, most, kept, failed):
                order[FAILURES] = 1

    return work
