"""Lays out the memory that one thread works in, for blocks of n and a bound on QR sweeps.

Rows have one number a lane; a row of float32 is two cache lines. `triangle` is n(n+1)/2.

    rows of the blocks' own type          int64                       numbers of float64
    ┌─────────────┬──────────────────┐    ┌─────────┬──────────────┐    ┌──────────┬────────┐
    │ a           │ max(triangle, 16)│    │ where   │ TENSORS × 32 │    │ matrix   │ n × n  │
    │ x g m       │ n each           │    │ steps   │ TENSORS × 32 │    │ vectors  │ n × n  │
    │ d e         │ n each           │    │ lengths │ 32           │    └──────────┴────────┘
    │ y           │ n                │    │ owners  │ 32           │    one block, for Jacobi
    │ h           │ n                │    │ spare   │ 32 + 1       │
    │ u q         │ n each           │    │ kept    │ 32           │    rows of float64
    │ ranks       │ n                │    │ ends    │ sweeps       │    ┌───────┬───┐
    │ largest     │ n                │    │ ahead   │ (n + 4) n *  │    │ sums  │ 2 │
    │ merged      │ n                │    │ waiting │ 2 × 32       │    │ aside │ 2 │
    │ basis       │ n (n − 1)/2      │    └─────────┴──────────────┘    └───────┴───┘
    │ eigenvalues │ n                │    numbers of the blocks' type
    │ columns     │ n × n            │    ┌───────┬──────────┐
    │ terms       │ TERMS            │    │ blank │ triangle │
    │ log         │ see below        │    └───────┴──────────┘
    └─────────────┴──────────────────┘

    a              packed V, then T's reflections in its columns      ranks, largest, merged   AMSGrad's Σ̂
    d, e           T's diagonal and what is beside it; Λ in d         terms   each lane's coefficients
    y              m, then Uᵀm, then the step                         log     cosine and sine of each rotation
    h              1/h of each reflection; u, q belong to one         ends    the last row of each sweep
    waiting        the numbers of blocks that are put off             log     as rows: 2 (n − 1) sweeps, or 6 n if that
                                                                              is more, for T and two L D Lᵀ
    where, steps   addresses of each lane's block, byte strides       blank   a block of zeros, for lanes without one
    sums           Σ f(λ) y² and Σ y² of each lane; no room where nobody measures
    aside          the same while Jacobi's method solves a single lane
    ahead          what the next tile needs of memory: pairs of lines (*; twice as many in float64)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from blockadapt.kernels.cpu.jit import jit
from blockadapt.kernels.cpu.simd import LANES, SQUARE, array_at, pointer, rows_at
from blockadapt.kernels.cpu.tables import TENSORS, TERMS

LINE = 64
"""The bytes of a cache line."""

PAIR = 2 * LINE
"""The bytes that are asked for ahead at once."""


class Lie(NamedTuple):
    """Says where the blocks of a tile lie, lane by lane."""

    where: Any
    steps: Any
    lengths: Any
    owners: Any
    spare: Any
    kept: Any
    blank: Any


class Scratch(NamedTuple):
    """Holds each array, or the byte where it begins."""

    a: Any
    x: Any
    g: Any
    m: Any
    d: Any
    e: Any
    y: Any
    h: Any
    u: Any
    q: Any
    ranks: Any
    largest: Any
    merged: Any
    basis: Any
    eigenvalues: Any
    columns: Any
    terms: Any
    log: Any
    lie: Any
    ends: Any
    ahead: Any
    waiting: Any
    matrix: Any
    vectors: Any
    sums: Any
    aside: Any
    end: Any


@jit
def offsets(n: int, sweeps: int, itemsize: int) -> Scratch:
    """Say at which byte each array begins, and all of them end: each on a cache line.

    It calls no compiled function: `.py_func` says how much memory to get.
    """
    triangle, sweeps = n * (n + 1) // 2, max(sweeps, 1)  # blocks of 2 take one
    row, integers = LANES * itemsize, LANES * 8
    a = 0
    x = a + max(triangle, SQUARE) * row
    g, m = x + n * row, x + 2 * n * row
    d, e = m + n * row, m + 2 * n * row
    y, h = e + n * row, e + 2 * n * row
    u, q = h + n * row, h + 2 * n * row
    ranks, largest, merged = q + n * row, q + 2 * n * row, q + 3 * n * row
    basis, eigenvalues = merged + n * row, merged + (n + n * (n - 1) // 2) * row
    columns = eigenvalues + n * row
    terms = columns + n * n * row
    where = terms + TERMS * row
    steps = where + len(TENSORS) * integers
    lengths = steps + len(TENSORS) * integers
    owners, spare = lengths + integers, lengths + 2 * integers
    kept = spare + 2 * integers
    blank = kept + integers
    ends = blank + (triangle * itemsize + LINE - 1) // LINE * LINE
    ahead = ends + (8 * sweeps + LINE - 1) // LINE * LINE
    waiting = ahead + (8 * (n + 4) * n * row // PAIR + LINE - 1) // LINE * LINE
    matrix = waiting + 2 * integers
    vectors = matrix + (8 * n * n + LINE - 1) // LINE * LINE
    log = vectors + (8 * n * n + LINE - 1) // LINE * LINE
    sums = log + max(2 * (n - 1) * sweeps, 6 * n) * row
    aside = sums + 2 * LANES * 8
    end = aside + 2 * LANES * 8
    lie = Lie(where, steps, lengths, owners, spare, kept, blank)
    return Scratch(
        a, x, g, m, d, e, y, h, u, q, ranks, largest, merged, basis, eigenvalues, columns, terms, log, lie, ends,
        ahead, waiting, matrix, vectors, sums, aside, end,
    )  # fmt: skip


@jit
def scratch_at(address: int, n: int, sweeps: int, like: Any, measured: bool) -> Scratch:
    """View the arrays at an address. `like` is any array of the blocks' type."""
    triangle, sweeps = n * (n + 1) // 2, max(sweeps, 1)
    counted = 2 * LANES if measured else 0
    at = offsets(n, sweeps, like.itemsize)
    lie = Lie(
        where=carray(pointer(address + at.lie.where), (len(TENSORS), LANES), np.int64),
        steps=carray(pointer(address + at.lie.steps), (len(TENSORS), LANES), np.int64),
        lengths=carray(pointer(address + at.lie.lengths), (LANES,), np.int64),
        owners=carray(pointer(address + at.lie.owners), (LANES,), np.int64),
        spare=carray(pointer(address + at.lie.spare), (LANES + 1,), np.int64),
        kept=carray(pointer(address + at.lie.kept), (LANES,), np.int64),
        blank=array_at(address + at.lie.blank, triangle, like),
    )
    return Scratch(
        a=rows_at(address + at.a, max(triangle, SQUARE), like),
        x=rows_at(address + at.x, n, like),
        g=rows_at(address + at.g, n, like),
        m=rows_at(address + at.m, n, like),
        d=rows_at(address + at.d, n, like),
        e=rows_at(address + at.e, n, like),
        y=rows_at(address + at.y, n, like),
        h=rows_at(address + at.h, n, like),
        u=rows_at(address + at.u, n, like),
        q=rows_at(address + at.q, n, like),
        ranks=rows_at(address + at.ranks, n, like),
        largest=rows_at(address + at.largest, n, like),
        merged=rows_at(address + at.merged, n, like),
        basis=rows_at(address + at.basis, n * (n - 1) // 2, like),
        eigenvalues=rows_at(address + at.eigenvalues, n, like),
        columns=rows_at(address + at.columns, n * n, like),
        terms=rows_at(address + at.terms, TERMS, like),
        log=rows_at(address + at.log, max(2 * (n - 1) * sweeps, 6 * n), like),
        lie=lie,
        ends=carray(pointer(address + at.ends), (sweeps,), np.int64),
        ahead=carray(pointer(address + at.ahead), ((n + 4) * n * LANES * like.itemsize // PAIR,), np.int64),
        waiting=carray(pointer(address + at.waiting), (2 * LANES,), np.int64),
        matrix=carray(pointer(address + at.matrix), (n, n), np.float64),
        vectors=carray(pointer(address + at.vectors), (n, n), np.float64),
        sums=doubles(address + at.sums, counted),
        aside=doubles(address + at.aside, counted),
        end=address + at.end,
    )


@jit
def doubles(address: int, count: int) -> Any:
    """View `count` float64 numbers at an address."""
    return carray(pointer(address), (count,), np.float64)
