"""The effective spectrum: what becomes of the eigenvalues, and y with them."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.jit import jit
from blockadapt.kernels.cpu.simd import broadcast, load, maximum, minimum, select, store
from blockadapt.kernels.cpu.spectral import evaluate
from blockadapt.kernels.cpu.tables import TERM
from blockadapt.kernels.cpu.tile_io import from_lanes_, to_lanes_


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
