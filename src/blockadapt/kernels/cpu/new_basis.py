"""Takes a step that solves V anew: y ← U s(Λ) Uᵀ y with the eigenvectors of this step's V.

There are three ways from T = Hᵀ V H to the step, and what a block gets does not depend on its neighbours:

    partial fractions   where (√V + δ)⁻¹ m is all that is asked for, and the block is conditioned well
    QR                  else: at once, or later if only few lanes of a tile need it
    Jacobi's method     where the QR sweeps do not suffice

Letters as in `eigensolver`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockadapt.kernels.cpu.ahead import ask_rest
from blockadapt.kernels.cpu.effective import amsgrad_, effective_
from blockadapt.kernels.cpu.eigensolver import (
    apply_rotations_,
    diagonalise_,
    diagonalise_2x2_,
    form_rotations_,
    reverse_,
    small_end_first,
)
from blockadapt.kernels.cpu.jacobi import jacobi_, unpack_
from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.partial_fractions import inverse_root_
from blockadapt.kernels.cpu.reflections import factor_, factor_lane_
from blockadapt.kernels.cpu.simd import (
    absolute,
    all_lanes,
    array_at,
    broadcast,
    fma,
    load,
    maximum,
    power_of_two,
    select,
    store,
    total,
)
from blockadapt.kernels.cpu.spectral import is_inverse_root
from blockadapt.kernels.cpu.tables import BASIS, LARGEST, TERM, M, V
from blockadapt.kernels.cpu.thresholds import thresholds
from blockadapt.kernels.cpu.tile_io import from_lanes_, to_lanes_
from blockadapt.kernels.cpu.tridiagonal import apply_reflections_, reflect_basis_, tridiagonalise_
from blockadapt.kernels.thresholds import FRACTIONS_FEWEST, PUT_OFF


@inlined
def step_in_new_basis_(
    n: int, s: Any, basis: Any, eigenvalues: Any, has: Any, most: int, formula: Any, noted: int, again: bool, L: int
) -> Any:
    """Update V, solve it, set y ← U s(Λ) Uᵀ y, and keep U and Λ where they are kept.

    Returns which lanes are finite, which have converged, and which are put off: their y means nothing. A tile of lanes
    that were put off comes `again`, and is solved by QR.
    """
    zero = broadcast(s.a.dtype.type(0))
    finite, largest = update_second_moment_(n, s, L)
    scale = scale_(n, s.a, finite, largest, L)
    by_fractions = can_be_fractions(n, s, has, formula)
    if by_fractions:
        fill_unseen_(n, s.a, s.y, L)
    if n > 2:
        tridiagonalise_(n, s.a, s.h, s.d, s.e, s.y, s.u, s.q, L)
    done = put_off = zero < zero
    if by_fractions and not again:
        done, noted = inverse_root_(n, s, scale, finite, noted, L)
        if are_few(finite & ~done):
            put_off = finite & ~done
    solved = finite
    if not all_lanes(done | put_off | ~finite):
        solved = take_apart_(n, s, basis, eigenvalues, has, most, formula, scale, finite, done, noted, L)
    for i in range(n):
        store(s.y, i * L, select(done, load(s.q, i * L), load(s.y, i * L)))
    if n > 2:
        apply_reflections_(n, s.a, s.h, s.y, L)
    return finite, solved, put_off


@inlined
def can_be_fractions(n: int, s: Any, has: Any, formula: Any) -> bool:
    """Say whether a step asks for (√V + δ)⁻¹ m and no more, of blocks that are worth it."""
    only_that = has[BASIS] == 0 and has[LARGEST] == 0 and s.sums.size == 0
    return is_inverse_root(formula) and only_that and n >= FRACTIONS_FEWEST and s.a.itemsize == 4


@inlined
def are_few(mask: Any) -> bool:
    """Say whether it is quicker to put these lanes off than to solve their tile by QR."""
    one, zero = broadcast(np.float32(1)), broadcast(np.float32(0))
    return total(select(mask, one, zero)) <= PUT_OFF


@inlined
def fill_unseen_(n: int, a: Any, y: Any, L: int) -> None:
    """Set the diagonal to 1 where it is zero and y is too: that coordinate does not move, whatever its eigenvalue is.

    Coordinates that a short block lacks are so, and those that no gradient has reached yet.
    """
    zero, one = broadcast(a.dtype.type(0)), broadcast(a.dtype.type(1))
    for i in range(n):
        at = (i * (i + 1) // 2 + i) * L
        entry = load(a, at)
        store(a, at, select((entry == zero) & (load(y, i * L) == zero), one, entry))


@inlined
def take_apart_(
    n: int, s: Any, basis: Any, eigenvalues: Any, has: Any, most: int, formula: Any, scale: Any, finite: Any, done: Any,
    noted: int, L: int,
) -> Any:  # fmt: skip
    """Set y ← R s(Λ) Rᵀ y, where T = R Λ Rᵀ, and keep U and Λ where they are kept.

    Lanes that are `done` cost no sweeps. Returns which lanes have converged.
    """
    zero, unknown = broadcast(s.a.dtype.type(0)), broadcast(s.a.dtype.type(np.nan))
    for i in range(n - 1):
        store(s.e, i * L, select(done, zero, load(s.e, i * L)))
    sweeps, reversed_ = diagonal_(n, s, most, noted, L)
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
    effective_(n, s.d, s.y, s.terms, s.sums, formula, L)
    if has[BASIS] != 0:
        form_rotations_(n, s.columns, s.log, s.ends, sweeps, L)
        reverse_(n, s.columns, reversed_, n, L)
        reflect_basis_(n, s.a, s.h, s.columns, L)
        factor_(n, s.columns, basis, L)
    apply_rotations_(s.y, s.log, s.ends, sweeps, L)
    reverse_(n, s.y, reversed_, 1, L)
    return solved


@inlined
def update_second_moment_(n: int, s: Any, L: int) -> Any:
    """Set a = V ← decay V + weight g gᵀ, also where V lies; returns which lanes are finite, and their largest entry."""
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
        entry = load(s.a, row - L)  # on the diagonal: a bad entry off it has one there
        largest = maximum(entry, largest)
        check = fma(entry, zero, check)
    from_lanes_(s.lie.where[V], triangle, s.a, L)
    return check == zero, largest


@inlined
def scale_(n: int, a: Any, finite: Any, largest: Any, L: int) -> Any:
    """Set a ← a / scale, a power of two, with the largest entry in [1, 2), and lanes not finite to 0; returns scale."""
    f = a.dtype.type
    zero, one, limits = broadcast(f(0)), broadcast(f(1)), thresholds(a)
    known = finite & (zero < largest)
    scale = power_of_two(maximum(select(known, largest, one), broadcast(f(limits.least_normal))))
    inverse = one / scale
    least = broadcast(f(limits.entry))
    for i in range(n * (n + 1) // 2):
        entry = load(a, i * L) * inverse
        store(a, i * L, select(finite & (least < absolute(entry)), entry, zero))
    return scale


@inlined
def diagonal_(n: int, s: Any, most: int, noted: int, L: int) -> Any:
    """Find Λ, in d, and y ← Rᵀ y, from T, or from a for blocks of 2.

    Returns the number of sweeps and which lanes have T reversed. A lane whose e is not zero afterwards has not
    converged.
    """
    zero = broadcast(s.a.dtype.type(0))
    if n == 2:
        diagonalise_2x2_(s.a, s.d, s.e, s.y, s.log, L)
        s.ends[0] = 1
        ask_rest(s.ahead, noted, 0)
        return 1, zero < zero
    reversed_ = small_end_first(n, s.d, s.e, L)
    reverse_(n, s.d, reversed_, 1, L)
    reverse_(n - 1, s.e, reversed_, 1, L)
    reverse_(n, s.y, reversed_, 1, L)
    return diagonalise_(n, s.d, s.e, s.y, s.log, s.ends, most, s.ahead, noted, L), reversed_


@jit
def step_by_jacobi_(n: int, lane: int, s: Any, basis: Any, eigenvalues: Any, has: Any, formula: Any, L: int) -> None:
    """Do what `step_in_new_basis_` does for one lane, whose V is updated already. The other lanes keep their y."""
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
    if has[LARGEST] != 0:
        store(s.q, 0, broadcast(f(0)))
        s.q[lane] = f(1)
        this = load(s.q, 0) == broadcast(f(1))
        amsgrad_(n, s.d, s.lie.where[LARGEST], s.ranks, s.largest, s.merged, this, L)
    effective_(n, s.d, s.e, s.terms, s.aside, formula, L)
    for i in range(lane, s.sums.size, L):
        s.sums[i] = s.aside[i]
    for i in range(n):
        total = 0.0
        for j in range(n):
            total += s.vectors[i, j] * s.e[j * L + lane]
        s.y[i * L + lane] = f(total)
    if has[BASIS] != 0:
        factor_lane_(n, lane, s.vectors, basis, L)
