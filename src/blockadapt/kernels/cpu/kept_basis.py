"""Takes a step between refreshes: y ← U s(Λ) Uᵀ y with the basis that was kept."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.ahead import ask, ask_rest
from blockadapt.kernels.cpu.effective import amsgrad_, effective_
from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.reflections import from_eigenbasis_, to_eigenbasis_
from blockadapt.kernels.cpu.simd import SQUARE, broadcast, fma, load, store, transpose_onto
from blockadapt.kernels.cpu.tables import LARGEST, TERM, V


@inlined
def step_in_kept_basis_(
    n: int, s: Any, basis: Any, eigenvalues: Any, has: Any, formula: Any, noted: int, L: int
) -> Any:
    """Update V where it lies and Λ = diag(Uᵀ V U), and set y ← U s(Λ) Uᵀ y; returns which lanes are finite.

    Since U stays, Λ follows V by λ ← decay λ + weight (Uᵀ g)².
    """
    zero = broadcast(s.a.dtype.type(0))
    decay, weight = load(s.terms, TERM.second.decay * L), load(s.terms, TERM.second.weight * L)
    asked = add_square_(n, s.g, s.terms, s.lie.where[V], s.a, s.ahead, noted, L)
    asked = to_eigenbasis_(n, basis, s.g, s.y, s.h, s.ahead, noted, asked, L)
    check = zero
    for i in range(n):
        gradient = load(s.g, i * L)
        value = fma(weight * gradient, gradient, decay * load(eigenvalues, i * L))
        store(eigenvalues, i * L, value)
        store(s.d, i * L, value)
        check = fma(value, zero, check)
    finite = check == zero
    if has[LARGEST] != 0:
        amsgrad_(n, s.d, s.lie.where[LARGEST], s.ranks, s.largest, s.merged, finite, L)
    effective_(n, s.d, s.y, s.terms, s.sums, formula, L)
    asked = from_eigenbasis_(n, basis, s.y, s.h, s.ahead, noted, asked, L)
    ask_rest(s.ahead, noted, asked)
    return finite


@jit
def add_square_(n: int, g: Any, terms: Any, addresses: Any, rows: Any, ahead: Any, noted: int, L: int) -> int:
    """Set V ← decay V + weight g gᵀ where it lies, 16 entries at a time; returns how many pairs it has asked for.

    Between refreshes nothing else is done with V, so it is not worth taking apart into lanes.
    """
    weight, decays = load(terms, TERM.second.weight * L), terms[TERM.second.decay * L :]
    filled, offset, asked = 0, 0, 0
    for i in range(n):
        weighted = weight * load(g, i * L)
        for j in range(i + 1):
            store(rows, filled * L, weighted * load(g, j * L))
            filled += 1
            if filled == SQUARE:
                transpose_onto(addresses, offset, filled, rows, decays)
                offset += filled * rows.itemsize
                filled = 0
            ask(ahead, noted, asked)
            asked += 1
    if filled > 0:
        transpose_onto(addresses, offset, filled, rows, decays)
    return asked
