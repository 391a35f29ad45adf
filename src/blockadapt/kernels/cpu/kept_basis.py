"""A step between refreshes: y ← U s(Λ) Uᵀ y with the basis that was kept."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.effective import amsgrad_, effective_
from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.simd import SQUARE, broadcast, fma, load, store, transpose_onto
from blockadapt.kernels.cpu.tables import LARGEST, TERM, V
from blockadapt.kernels.cpu.tile_io import expect


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
    effective_(n, s.d, s.e, s.terms, s.sums, form, L)
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
