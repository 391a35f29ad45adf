"""One step for 32 blocks at a time: out of memory into lanes, through the update, and back.

For each tile, in one pass over memory:

    1  read x, g, m; update m
    2  update V where it lies, and go on with the copy in cache
    3  y = Uᵀ m, by solving the eigenproblem (`eigensolver`) or with the basis that was kept
    4  y ← s(Λ) y, any function of the eigenvalues
    5  x ← x − U y

Nothing here allocates and nothing can fail: all memory is the thread's scratch (`scratch`), and a block that the QR
sweeps do not solve is solved by Jacobi's method. Letters as in `eigensolver`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from blockadapt.kernels.cpu.eigensolver import (
    apply_reflections_,
    apply_rotations_,
    diagonalise_,
    diagonalise_2x2_in_float64_,
    form_rotations_,
    reflect_basis_,
    reverse_,
    small_end_first,
    tridiagonalise_in_float64_,
)
from blockadapt.kernels.cpu.jacobi import jacobi_, unpack_
from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.scratch import LINE, scratch_at
from blockadapt.kernels.cpu.simd import (
    LANES,
    SQUARE,
    absolute,
    all_lanes,
    array_at,
    broadcast,
    fma,
    gather,
    load,
    load_row,
    maximum,
    minimum,
    pointer,
    power_of_two,
    scatter,
    select,
    store,
    store_row,
    take_ticket,
    transpose_onto,
)
from blockadapt.kernels.cpu.spectral import INVERSE_ROOT, Form, evaluate
from blockadapt.kernels.cpu.tables import (
    ADDRESS,
    BASIS,
    COORDINATES,
    EIGENVALUES,
    ENTRIES,
    ENTRY,
    EXTENT,
    GRAD,
    LARGEST,
    MINOR,
    STRIDED,
    TENSORS,
    TERM,
    TERMS,
    M,
    Tables,
    V,
    X,
)
from blockadapt.kernels.cpu.thresholds import thresholds
from blockadapt.kernels.cpu.tile_io import (
    expect,
    fetch_,
    from_lanes_,
    kept_tile,
    locate,
    move_on_,
    put_,
    to_lanes_,
)

# The spectrum ------------------------------------------------------------------------------------------------------


@jit
def effective_(n: int, d: Any, y: Any, terms: Any, form: Any, L: int) -> None:
    """y ← s(λ) y with s = clip(f(λ / correction), lower, upper), λ no less than resolution · λ_max."""
    f = d.dtype.type
    largest = broadcast(f(0))
    for i in range(n):
        largest = maximum(load(d, i * L), largest)
    floor = load(terms, TERM.spectrum.resolution * L) * largest
    lr, damping = load(terms, TERM.spectrum.lr * L), load(terms, TERM.spectrum.damping * L)
    lower, upper = load(terms, TERM.spectrum.lower * L), load(terms, TERM.spectrum.upper * L)
    unbias = broadcast(f(1)) / load(terms, TERM.spectrum.correction * L)
    for i in range(n):
        s = evaluate(form, maximum(load(d, i * L), floor) * unbias, lr, damping)
        store(y, i * L, load(y, i * L) * minimum(maximum(s, lower), upper))


@jit
def amsgrad_(n: int, d: Any, addresses: Any, ranks: Any, largest: Any, merged: Any, keep: Any, L: int) -> None:
    """Σ̂ ← max(Σ̂, Σ), both ascending; d ← Σ̂ in the order of d. Lanes outside `keep` leave Σ̂ as it is.

    Equal eigenvalues rank in their own order, so that each has a rank of its own.
    """
    f = d.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    to_lanes_(addresses, n, largest, L)
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
    from_lanes_(addresses, n, largest, L)
    for i in range(n):
        rank = load(ranks, i * L)
        value = zero
        for position in range(n):
            value = select(rank == broadcast(f(position)), load(merged, position * L), value)
        store(d, i * L, value)


# One tile, piece by piece -----------------------------------------------------------------------------------------


@jit
def fill_(terms: Any, coefficients: Any, owners: Any) -> None:
    """Each lane's coefficients, from the segment that owns it."""
    for lane in range(LANES):
        for term in range(TERMS):
            terms[term * LANES + lane] = coefficients[owners[lane], term]


@inlined
def average_(n: int, s: Any, has_m: bool, expected: int, L: int) -> None:
    """g ← sign g + coupled x, m ← β₁ m + (1 − β₁) g, and y = m, or g where there is no m.

    The next tile's coordinates are asked for meanwhile, and what lies at `expected` if that is not 0.
    """
    terms, lie = s.terms, s.lie
    sign, coupled = load(terms, TERM.descent.sign * L), load(terms, TERM.descent.coupled * L)
    beta1 = load(terms, TERM.first.beta * L)
    for i in range(n):
        gradient = fma(coupled, load(s.x, i * L), sign * load(s.g, i * L))
        store(s.g, i * L, gradient)
        average = gradient
        if has_m:
            average = fma(beta1, load(s.m, i * L) - gradient, gradient)
            store(s.m, i * L, average)
        store(s.y, i * L, average)
        for role in range(COORDINATES):
            expect(lie.where[role, 0] + i * lie.steps[role, 0] + L * s.x.itemsize)
        if expected != 0:
            expect(expected + 2 * i * LINE)


@inlined
def update_second_moment_(n: int, s: Any, ahead: int, L: int) -> Any:
    """a = V ← decay V + weight g gᵀ, also where V lies; returns which lanes are finite, and their largest entry."""
    zero = broadcast(s.a.dtype.type(0))
    decay, weight = load(s.terms, TERM.second.decay * L), load(s.terms, TERM.second.weight * L)
    triangle = n * (n + 1) // 2
    to_lanes_(s.lie.where[V], triangle, s.a, L)
    largest = zero
    check = zero  # 0 · ∞ and 0 · NaN are NaN
    row = 0
    for i in range(n):
        weighted = weight * load(s.g, i * L)
        for j in range(i + 1):
            entry = fma(weighted, load(s.g, j * L), decay * load(s.a, row))
            store(s.a, row, entry)
            row += L
            ahead = expect(ahead)
        entry = load(s.a, row - L)  # on the diagonal: a bad entry off it has one there
        largest = maximum(entry, largest)
        check = fma(entry, zero, check)
    from_lanes_(s.lie.where[V], triangle, s.a, L)
    return check == zero, largest


@inlined
def scale_(n: int, a: Any, finite: Any, largest: Any, L: int) -> Any:
    """a ← a / scale with the largest entry in [1, 2), a power of two; returns scale. Lanes not finite become zero."""
    f = a.dtype.type
    zero, one, limits = broadcast(f(0)), broadcast(f(1)), thresholds(a)
    scale = power_of_two(maximum(select(finite, largest, one), broadcast(f(limits.least_normal))))
    inverse = one / scale
    least = broadcast(f(limits.entry))
    for i in range(n * (n + 1) // 2):
        entry = load(a, i * L) * inverse
        store(a, i * L, select(finite & (least < absolute(entry)), entry, zero))
    return scale


@inlined
def solve_(n: int, s: Any, most: int, L: int) -> Any:
    """Λ into d and y ← Uᵀ y, from a; returns the number of sweeps and which lanes have T reversed.

    A lane whose e is not zero afterwards has not converged.
    """
    zero = broadcast(s.a.dtype.type(0))
    if n == 2:
        diagonalise_2x2_in_float64_(s.a, s.d, s.e, s.y, s.log, s.wide, L)
        s.ends[0] = 1
        return 1, zero < zero
    tridiagonalise_in_float64_(n, s.a, s.h, s.d, s.e, s.y, s.u, s.q, s.wide, L)
    reversed_ = small_end_first(n, s.d, s.e, L)
    reverse_(n, s.d, reversed_, 1, L)
    reverse_(n - 1, s.e, reversed_, 1, L)
    reverse_(n, s.y, reversed_, 1, L)
    return diagonalise_(n, s.d, s.e, s.y, s.log, s.ends, most, L), reversed_


@inlined
def step_in_new_basis_(
    n: int, s: Any, basis: Any, eigenvalues: Any, has: Any, most: int, form: Any, ahead: int, next_v: int, L: int
) -> Any:
    """Update V, solve it, y ← U s(Λ) Uᵀ y, and keep U and Λ where they are kept.

    Returns which lanes are finite, and which have converged.
    """
    f = s.a.dtype.type
    zero, unknown = broadcast(f(0)), broadcast(f(np.nan))
    finite, largest = update_second_moment_(n, s, ahead, L)
    scale = scale_(n, s.a, finite, largest, L)
    sweeps, reversed_ = solve_(n, s, most, L)
    solved = finite
    for i in range(n - 1):
        solved = solved & (load(s.e, i * L) == zero)
    for i in range(n):
        value = load(s.d, i * L) * scale
        store(s.d, i * L, value)
        if has[BASIS] != 0:
            store(eigenvalues, i * L, select(finite, value, unknown))
    if has[LARGEST] != 0:
        amsgrad_(n, s.d, s.lie.where[LARGEST], s.ranks, s.largest, s.merged, solved, L)
    effective_(n, s.d, s.y, s.terms, form, L)
    if has[BASIS] != 0:
        form_rotations_(n, basis, s.log, s.ends, sweeps, L)
        reverse_(n, basis, reversed_, n, L)
        reflect_basis_(n, s.a, s.h, basis, L)
        from_eigenbasis_(n, basis, s.y, s.e, next_v, L)
        for i in range(n):
            store(s.y, i * L, load(s.e, i * L))
    else:
        apply_rotations_(s.y, s.log, s.ends, sweeps, L)
        reverse_(n, s.y, reversed_, 1, L)
        if n > 2:
            apply_reflections_(n, s.a, s.h, s.y, L)
    return finite, solved


@jit
def step_by_jacobi_(n: int, lane: int, s: Any, basis: Any, eigenvalues: Any, has: Any, form: Any, L: int) -> None:
    """`step_in_new_basis_` for one lane, whose V is updated already. Its other lanes keep their y."""
    f = s.a.dtype.type
    scale = unpack_(n, array_at(s.lie.where[V, lane], n * (n + 1) // 2, s.a), s.matrix)
    jacobi_(n, s.matrix, s.vectors)
    average = s.m if has[M] != 0 else s.g
    for j in range(n):
        total = 0.0
        for i in range(n):
            total += s.vectors[i, j] * average[i * L + lane]
        s.e[j * L + lane] = f(total)
        s.d[j * L + lane] = f(s.matrix[j, j] * scale)
        if has[BASIS] != 0:
            eigenvalues[j * L + lane] = f(s.matrix[j, j] * scale)
            for i in range(n):
                basis[(i * n + j) * L + lane] = f(s.vectors[i, j])
    if has[LARGEST] != 0:
        store(s.q, 0, broadcast(f(0)))
        s.q[lane] = f(1)
        this = load(s.q, 0) == broadcast(f(1))
        amsgrad_(n, s.d, s.lie.where[LARGEST], s.ranks, s.largest, s.merged, this, L)
    effective_(n, s.d, s.e, s.terms, form, L)
    for i in range(n):
        total = 0.0
        for j in range(n):
            total += s.vectors[i, j] * s.e[j * L + lane]
        s.y[i * L + lane] = f(total)


@inlined
def step_in_kept_basis_(
    n: int, s: Any, basis: Any, eigenvalues: Any, has: Any, form: Any, ahead: int, next_v: int, L: int
) -> Any:
    """Update V where it lies and Λ = diag(Uᵀ V U), and y ← U s(Λ) Uᵀ y; returns which lanes are finite."""
    zero = broadcast(s.a.dtype.type(0))
    ahead = add_square_(n, s.g, s.terms, s.lie.where[V], s.a, ahead, L)
    to_eigenbasis_(n, basis, s.g, s.y, eigenvalues, s.e, s.terms, ahead, L)
    check = zero
    for i in range(n):
        store(s.d, i * L, load(eigenvalues, i * L))
        check = fma(load(s.d, i * L), zero, check)
    finite = check == zero
    if has[LARGEST] != 0:
        amsgrad_(n, s.d, s.lie.where[LARGEST], s.ranks, s.largest, s.merged, finite, L)
    effective_(n, s.d, s.e, s.terms, form, L)
    from_eigenbasis_(n, basis, s.e, s.y, next_v, L)
    return finite


@jit
def add_square_(n: int, g: Any, terms: Any, addresses: Any, rows: Any, ahead: int, L: int) -> int:
    """V ← decay V + weight g gᵀ where it lies, 16 entries at a time; returns the next address to expect.

    Between refreshes nothing else is done with V, so it is not worth taking apart into lanes.
    """
    weight, decays = load(terms, TERM.second.weight * L), terms[TERM.second.decay * L :]
    filled, offset = 0, 0
    for i in range(n):
        weighted = weight * load(g, i * L)
        for j in range(i + 1):
            store(rows, filled * L, weighted * load(g, j * L))
            filled += 1
            if filled == SQUARE:
                transpose_onto(addresses, offset, filled, rows, decays)
                offset += filled * rows.itemsize
                filled = 0
            ahead = expect(ahead)
    if filled > 0:
        transpose_onto(addresses, offset, filled, rows, decays)
    return ahead


@jit
def to_eigenbasis_(n: int, basis: Any, g: Any, y: Any, d: Any, e: Any, terms: Any, ahead: int, L: int) -> None:
    """e = Uᵀ y, and d ← decay d + weight (Uᵀ g)², the diagonal of Uᵀ V U. Two columns at once: one waits for itself."""
    zero = broadcast(basis.dtype.type(0))
    decay, weight = load(terms, TERM.second.decay * L), load(terms, TERM.second.weight * L)
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
def from_eigenbasis_(n: int, basis: Any, e: Any, y: Any, ahead: int, L: int) -> None:
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


@inlined
def move_(n: int, s: Any, finite: Any, L: int) -> None:
    """x ← shrink x − y; NaN in lanes that are not finite."""
    unknown = broadcast(s.x.dtype.type(np.nan))
    shrink = load(s.terms, TERM.descent.shrink * L)
    for i in range(n):
        move = select(finite, load(s.y, i * L), unknown)
        store(s.x, i * L, fma(shrink, load(s.x, i * L), -move))


# Tiles and chunks -------------------------------------------------------------------------------------------------


@jit
def advance(n: int, tables: Any, first: int, last: int, s: Any, most: int, kept: bool, form: Any) -> int:
    """Take the step for tiles [first, last) of blocks of n; see the module's head.

    `kept` uses each block's kept basis instead of finding it. Returns how many blocks Jacobi's method has solved.
    """
    L = LANES
    has = tables.tensors[0, :, ADDRESS]
    lie, size = s.lie, s.x.itemsize
    zero, one = broadcast(s.x.dtype.type(0)), broadcast(s.x.dtype.type(1))
    filled = -1  # the one segment whose coefficients the lanes hold
    contiguous, run, by_jacobi = 0, 0, 0
    for tile in range(first, last):
        if run > 1:
            move_on_(tables, lie)
            run -= 1
        else:
            contiguous, run = locate(tables, tile * L, lie)
        if filled < 0 or lie.owners[0] != filled or lie.owners[L - 1] != filled:
            fill_(s.terms, tables.coefficients, lie.owners)
            filled = lie.owners[0] if lie.owners[0] == lie.owners[L - 1] else -1
        fetch_(n, s.x, lie.where[X], lie.steps[X], lie.lengths, contiguous, lie.spare)
        fetch_(n, s.g, lie.where[GRAD], lie.steps[GRAD], lie.lengths, contiguous, lie.spare)
        if has[M] != 0:
            fetch_(n, s.m, lie.where[M], lie.steps[M], lie.lengths, contiguous, lie.spare)
        basis, eigenvalues = kept_tile(n, tables, tile, lie, s.x)
        # What the next tile needs follows this one's in memory, almost always. It is asked for piece by piece, between
        # the sums: all at once would fill the processor's few slots for lines on their way, and stall.
        next_v = lie.where[V, 0] + L * n * (n + 1) // 2 * size
        next_basis = basis.ctypes.data + L * n * n * size
        next_eigenvalues = eigenvalues.ctypes.data + L * n * size
        average_(n, s, has[M] != 0, next_eigenvalues if kept else 0, L)
        if has[M] != 0:
            put_(n, s.m, lie.where[M], lie.steps[M], lie.lengths, contiguous, lie.spare)
        if kept:
            finite = step_in_kept_basis_(n, s, basis, eigenvalues, has, form, next_basis, next_v, L)
        else:
            finite, solved = step_in_new_basis_(n, s, basis, eigenvalues, has, most, form, next_v, next_v, L)
            if not all_lanes(solved | ~finite):
                store(s.u, 0, select(solved | ~finite, zero, one))
                for lane in range(L):
                    if s.u[lane] != 0:
                        step_by_jacobi_(n, lane, s, basis, eigenvalues, has, form, L)
                        by_jacobi += 1
        move_(n, s, finite, L)
        put_(n, s.x, lie.where[X], lie.steps[X], lie.lengths, contiguous, lie.spare)
    return by_jacobi


@jit
def advance_ones(tables: Any, first: int, last: int, s: Any, form: Any) -> None:
    """`advance` for blocks of 1, where V is its own eigenvalue: a diagonal method, at the price of one.

    Tiles that are contiguous in memory, as almost all are, are run through without looking up each one's place.
    """
    L, size, lie, lanes = LANES, s.x.itemsize, s.lie, s.a
    tensors = tables.tensors
    has = tensors[0, :, ADDRESS]
    tile = first
    while tile < last:
        contiguous_lanes, run = locate(tables, tile * L, lie)
        segment, contiguous = lie.owners[0], contiguous_lanes == L
        for role in range(COORDINATES, STRIDED):
            contiguous = contiguous and (has[role] == 0 or tensors[segment, role, MINOR] == size)
        fill_(s.terms, tables.coefficients, lie.owners)
        run = min(run, last - tile) if contiguous else 1
        for _ in range(run):
            for role in range(STRIDED):
                if has[role] != 0 and contiguous:
                    store(lanes, role * L, load_row(lie.where[role, 0], lanes))
                elif has[role] != 0:
                    store(lanes, role * L, gather(lie.where[role], 0, lanes))
            step_ones_(lanes, has, s.terms, form, L)
            for role in range(STRIDED):
                if has[role] != 0 and role != GRAD and contiguous:
                    store_row(lie.where[role, 0], load(lanes, role * L))
                elif has[role] != 0 and role != GRAD:
                    scatter(lie.where[role], 0, load(lanes, role * L))
                lie.where[role, 0] += L * size
            if has[BASIS] != 0:
                offset = (tile * L - tables.starts[segment]) * size
                store_row(tensors[segment, BASIS, ADDRESS] + offset, broadcast(lanes.dtype.type(1)))
                store_row(tensors[segment, EIGENVALUES, ADDRESS] + offset, load(lanes, V * L))
            tile += 1


@inlined
def step_ones_(lanes: Any, has: Any, terms: Any, form: Any, L: int) -> None:
    """The step for one tile of blocks of 1: a row of lanes for each tensor that lies by block, in their order."""
    f = lanes.dtype.type
    zero = broadcast(f(0))
    x = load(lanes, X * L)
    gradient = load(terms, TERM.descent.sign * L) * load(lanes, GRAD * L)
    g = fma(load(terms, TERM.descent.coupled * L), x, gradient)
    m = g
    if has[M] != 0:
        m = fma(load(terms, TERM.first.beta * L), load(lanes, M * L) - g, g)
    weighted = load(terms, TERM.second.weight * L) * g
    second_moment = fma(weighted, g, load(terms, TERM.second.decay * L) * load(lanes, V * L))
    finite = second_moment * zero == zero
    store(lanes, M * L, m)
    store(lanes, V * L, second_moment)
    adapted = second_moment
    if has[LARGEST] != 0:
        adapted = select(finite, maximum(second_moment, load(lanes, LARGEST * L)), load(lanes, LARGEST * L))
    store(lanes, LARGEST * L, adapted)
    store(lanes, X * L, m)
    effective_(1, lanes[LARGEST * L :], lanes[X * L :], terms, form, L)
    move = select(finite, load(lanes, X * L), broadcast(f(np.nan)))
    store(lanes, X * L, fma(load(terms, TERM.descent.shrink * L), x, -move))


@jit
def carry_out(entries: Any, coefficients: Any, form: Any) -> None:
    """What each thread does with a work list: take the next chunk of tiles until none is left."""
    n, segments, most, kept = entries[ENTRY.n], entries[ENTRY.segments], entries[ENTRY.sweeps], entries[ENTRY.kept] != 0
    tables = Tables(
        tensors=carray(pointer(entries[ENTRY.tensors_at]), (segments, len(TENSORS), 4), np.int64),
        extents=carray(pointer(entries[ENTRY.extents_at]), (segments, len(EXTENT)), np.int64),
        coefficients=coefficients,
        starts=carray(pointer(entries[ENTRY.starts_at]), (segments + 1,), np.int64),
    )
    chunks = carray(pointer(entries[ENTRY.chunks_at]), (entries[ENTRY.chunks] + 1,), np.int64)
    thread = take_ticket(entries, ENTRY.workers)
    s = scratch_at(entries[ENTRY.scratch_at] + thread * entries[ENTRY.scratch_bytes], n, most, coefficients)
    s.lie.blank[:] = 0
    while True:
        chunk = take_ticket(entries, ENTRY.ticket)
        if chunk >= entries[ENTRY.chunks]:
            return
        if n == 1:
            advance_ones(tables, chunks[chunk], chunks[chunk + 1], s, form)
        else:
            for _ in range(advance(n, tables, chunks[chunk], chunks[chunk + 1], s, most, kept, form)):
                take_ticket(entries, ENTRY.by_jacobi)


def worker(real: Any, form: Form = INVERSE_ROOT) -> Callable[[Any], None]:
    """The C function that each thread runs, for one float type and spectral function."""

    def work(data: Any) -> None:
        entries = carray(data, (ENTRIES,), np.int64)
        shape = entries[ENTRY.segments], TERMS
        carry_out(entries, carray(pointer(entries[ENTRY.coefficients_at]), shape, real), form)

    return work
