"""Applies the effective spectrum: what becomes of the eigenvalues, and of y with them."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.simd import (
    broadcast,
    fma,
    load,
    maximum,
    minimum,
    power_of_two,
    select,
    store,
    total,
    widen,
)
from blockadapt.kernels.cpu.spectral import evaluate
from blockadapt.kernels.cpu.tables import TERM
from blockadapt.kernels.cpu.thresholds import thresholds
from blockadapt.kernels.cpu.tile_io import from_lanes_, to_lanes_


@jit
def effective_(n: int, d: Any, y: Any, terms: Any, sums: Any, formula: Any, L: int) -> None:
    """Set y ← s(λ) y with s = clip(f(λ / correction), lower, upper), λ no less than resolution · λ_max.

    Where there is room for `sums`, each lane's Σ f(λ) y² and Σ y² go there, see `contract.Tally`. They are summed in
    units of λ_max, so that no square is lost, and are float64 in the end.
    """
    f = d.dtype.type
    largest = broadcast(f(0))
    for i in range(n):
        largest = maximum(load(d, i * L), largest)
    floor = load(terms, TERM.spectrum.resolution * L) * largest
    lr, damping = load(terms, TERM.spectrum.lr * L), load(terms, TERM.spectrum.damping * L)
    lower, upper = load(terms, TERM.spectrum.lower * L), load(terms, TERM.spectrum.upper * L)
    unbias = broadcast(f(1)) / load(terms, TERM.spectrum.correction * L)
    if sums.size == 0:
        for i in range(n):
            s = evaluate(formula, maximum(load(d, i * L), floor) * unbias, lr, damping)
            store(y, i * L, load(y, i * L) * minimum(maximum(s, lower), upper))
        return
    along, square = broadcast(f(0)), broadcast(f(0))
    unit = power_of_two(maximum(largest, broadcast(f(thresholds(d).least_normal))))
    inverse = broadcast(f(1)) / unit
    for i in range(n):
        s = evaluate(formula, maximum(load(d, i * L), floor) * unbias, lr, damping)
        row = load(y, i * L)
        power = row * inverse * row
        along, square = fma(s, power, along), square + power
        store(y, i * L, row * minimum(maximum(s, lower), upper))
    store(sums, 0, widen(along) * widen(unit))
    store(sums, L, widen(square) * widen(unit))


@inlined
def tally_(tables: Any, tile: int, sums: Any, L: int) -> None:
    """Add up what the lanes of a tile have measured, if anybody measures.

    Each tile has a place of its own for it, so threads change no bit.
    """
    if sums.size != 0:
        tables.sums[0, tile] = total(load(sums, 0))
        tables.sums[1, tile] = total(load(sums, L))


@jit
def amsgrad_(n: int, d: Any, addresses: Any, ranks: Any, largest: Any, merged: Any, keep: Any, L: int) -> None:
    """Set Σ̂ ← max(Σ̂, Σ), both ascending, and d ← Σ̂ in the order of d. Lanes outside `keep` leave Σ̂ as it is.

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
