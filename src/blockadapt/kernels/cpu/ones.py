"""Moves blocks of 1, where V is its own eigenvalue: a diagonal method, at the price of one."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockadapt.kernels.cpu.effective import effective_, tally_
from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.simd import (
    LANES,
    broadcast,
    fma,
    gather,
    load,
    load_row,
    maximum,
    scatter,
    select,
    store,
    store_row,
)
from blockadapt.kernels.cpu.tables import (
    ADDRESS,
    COORDINATES,
    GRAD,
    LARGEST,
    MINOR,
    STRIDED,
    TERM,
    M,
    V,
    X,
)
from blockadapt.kernels.cpu.tile_io import fill_, locate


@jit
def advance_ones(tables: Any, first: int, last: int, s: Any, formula: Any) -> None:
    """Take the step for tiles [first, last) of blocks of 1, as `advance` does for larger ones.

    Tiles that are contiguous in memory, as almost all are, are run through without looking up each one's place.
    """
    L, size, lie, lanes = LANES, s.x.itemsize, s.lie, s.a
    tensors = tables.tensors
    has = tensors[0, :, ADDRESS]
    tile = first
    while tile < last:
        contiguous_lanes, run = locate(1, tables, tile * L, lie)
        piece, contiguous = lie.owners[0], contiguous_lanes == L
        for role in range(COORDINATES, STRIDED):
            contiguous = contiguous and (has[role] == 0 or tensors[piece, role, MINOR] == size)
        fill_(s.terms, tables.coefficients, lie.owners)
        run = min(run, last - tile) if contiguous else 1
        for _ in range(run):
            for role in range(STRIDED):
                if has[role] != 0 and contiguous:
                    store(lanes, role * L, load_row(lie.where[role, 0], lanes))
                elif has[role] != 0:
                    store(lanes, role * L, gather(lie.where[role], 0, lanes))
            step_ones_(lanes, has, s.terms, s.sums, formula, L)
            for role in range(STRIDED):
                if has[role] != 0 and role != GRAD and contiguous:
                    store_row(lie.where[role, 0], load(lanes, role * L))
                elif has[role] != 0 and role != GRAD:
                    scatter(lie.where[role], 0, load(lanes, role * L))
                lie.where[role, 0] += L * size
            tally_(tables, tile, s.sums, L)
            tile += 1


@inlined
def step_ones_(lanes: Any, has: Any, terms: Any, sums: Any, formula: Any, L: int) -> None:
    """Take the step for one tile of blocks of 1: each tensor that lies by block has a row of lanes, in their order."""
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
    effective_(1, lanes[LARGEST * L :], lanes[X * L :], terms, sums, formula, L)
    move = select(finite, load(lanes, X * L), broadcast(f(np.nan)))
    store(lanes, X * L, fma(load(terms, TERM.descent.shrink * L), x, -move))
