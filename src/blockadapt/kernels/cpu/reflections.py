"""Keeps a basis as reflections, see `kernels.reflections`: U = H₀ H₁ … Hₙ₋₂, H_k = I − τ w wᵀ, w = (0, …, 1, v_k).

Letters: v rows of lanes [n(n−1)/2], those of v₀ first; u rows of U [n·n]; t the n − 1 rows of τ.
"""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.ahead import ask
from blockadapt.kernels.cpu.jit import jit
from blockadapt.kernels.cpu.simd import absolute, broadcast, fma, load, select, sqrt, store
from blockadapt.kernels.cpu.tridiagonal import four_columns


@jit
def factor_(n: int, u: Any, v: Any, L: int) -> None:
    """Find v of U, up to the signs of its columns: each column in turn is taken to ±e_k. It leaves u destroyed."""
    f = u.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    at = 0
    for k in range(n - 1):
        head, below = load(u, (k * n + k) * L), zero
        for i in range(k + 1, n):
            entry = load(u, (i * n + k) * L)
            below = fma(entry, entry, below)
        norm = sqrt(fma(head, head, below))  # 1, but for rounding
        first = select(head < zero, head - norm, head + norm)
        inverse, minus_tau = one / first, -(absolute(first) / norm)
        for i in range(k + 1, n):
            store(v, at + (i - k - 1) * L, load(u, (i * n + k) * L) * inverse)
        for column in range(k + 1, n, 4):
            j0, j1, j2, j3 = four_columns(column, n, L)
            row = k * n * L
            p0, p1, p2, p3 = load(u, row + j0), load(u, row + j1), load(u, row + j2), load(u, row + j3)
            for i in range(k + 1, n):
                entry, row = load(v, at + (i - k - 1) * L), i * n * L
                p0, p1 = fma(entry, load(u, row + j0), p0), fma(entry, load(u, row + j1), p1)
                p2, p3 = fma(entry, load(u, row + j2), p2), fma(entry, load(u, row + j3), p3)
            p0, p1, p2, p3 = p0 * minus_tau, p1 * minus_tau, p2 * minus_tau, p3 * minus_tau
            for i in range(k + 1, n):
                entry, row = load(v, at + (i - k - 1) * L), i * n * L
                u0, u1, u2, u3 = load(u, row + j0), load(u, row + j1), load(u, row + j2), load(u, row + j3)
                store(u, row + j0, fma(p0, entry, u0))
                store(u, row + j1, fma(p1, entry, u1))
                store(u, row + j2, fma(p2, entry, u2))
                store(u, row + j3, fma(p3, entry, u3))
        at += (n - 1 - k) * L


@jit
def factor_lane_(n: int, lane: int, vectors: Any, v: Any, L: int) -> None:
    """Do what `factor_` does for one lane, of `vectors` [n, n] in float64."""
    at = 0
    for k in range(n - 1):
        below = 0.0
        for i in range(k + 1, n):
            below += vectors[i, k] * vectors[i, k]
        head = vectors[k, k]
        norm = (head * head + below) ** 0.5
        first = head - norm if head < 0 else head + norm
        for i in range(k + 1, n):
            vectors[i, k] /= first
            v[(at + i - k - 1) * L + lane] = v.dtype.type(vectors[i, k])
        for j in range(k + 1, n):
            inner = vectors[k, j]
            for i in range(k + 1, n):
                inner += vectors[i, k] * vectors[i, j]
            inner *= abs(first) / norm
            for i in range(k + 1, n):
                vectors[i, j] -= inner * vectors[i, k]
        at += n - 1 - k


@jit
def to_eigenbasis_(n: int, v: Any, g: Any, y: Any, t: Any, ahead: Any, noted: int, asked: int, L: int) -> int:
    """Set g ← Uᵀ g and y ← Uᵀ y, and write τ into t; returns how many pairs have been asked for then, see `ahead`.

    One pass over a reflection applies it and projects onto the next one.
    """
    one, two = broadcast(v.dtype.type(1)), broadcast(v.dtype.type(2))
    g_along, y_along, square = load(g, 0), load(y, 0), one
    for i in range(1, n):
        entry = load(v, (i - 1) * L)
        g_along, y_along = fma(entry, load(g, i * L), g_along), fma(entry, load(y, i * L), y_along)
        square = fma(entry, entry, square)
        ask(ahead, noted, asked)
        asked += 1
    this = 0
    for k in range(n - 1):
        tau = two / square
        store(t, k * L, tau)
        g_move, y_move = -(tau * g_along), -(tau * y_along)
        store(g, k * L, load(g, k * L) + g_move)
        store(y, k * L, load(y, k * L) + y_move)
        entry, head = load(v, this), (k + 1) * L
        g_along, y_along, square = fma(g_move, entry, load(g, head)), fma(y_move, entry, load(y, head)), one
        store(g, head, g_along)
        store(y, head, y_along)
        after = this + (n - 1 - k) * L
        for i in range(k + 2, n):
            entry, following = load(v, this + (i - k - 1) * L), load(v, after + (i - k - 2) * L)
            g_entry, y_entry = fma(g_move, entry, load(g, i * L)), fma(y_move, entry, load(y, i * L))
            store(g, i * L, g_entry)
            store(y, i * L, y_entry)
            g_along, y_along = fma(following, g_entry, g_along), fma(following, y_entry, y_along)
            square = fma(following, following, square)
            ask(ahead, noted, asked)
            asked += 1
        this = after
    return asked


@jit
def from_eigenbasis_(n: int, v: Any, y: Any, t: Any, ahead: Any, noted: int, asked: int, L: int) -> int:
    """Set y ← U y, with the τ in t. It goes as `to_eigenbasis_` does, the last reflection first."""
    this = (n * (n - 1) // 2 - 1) * L
    along = fma(load(v, this), load(y, (n - 1) * L), load(y, (n - 2) * L))
    for k in range(n - 2, -1, -1):
        move = -(load(t, k * L) * along)
        before = this - (n - k) * L
        entry = load(y, k * L) + move
        store(y, k * L, entry)
        if k == 0:
            for i in range(1, n):
                store(y, i * L, fma(move, load(v, this + (i - 1) * L), load(y, i * L)))
        else:
            along = fma(load(v, before), entry, load(y, (k - 1) * L))
            for i in range(k + 1, n):
                entry = fma(move, load(v, this + (i - k - 1) * L), load(y, i * L))
                store(y, i * L, entry)
                along = fma(load(v, before + (i - k) * L), entry, along)
                ask(ahead, noted, asked)
                asked += 1
        this = before
    return asked
