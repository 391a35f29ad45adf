"""Applies 1/(√T + δ) to a vector without eigenvalues, where a block is conditioned well enough; float32 only.

The inverse root is an integral of fractions, and a sum of few of them (Hale, Higham and Trefethen 2008, method 3):

    1/(√λ + δ) = 2/π ∫ τ/((λ + τ)(δ² + τ)) d√τ ≈ Σ_j c_j/(λ + τ_j) − ρ/(λ − δ²)        c_j = w_j τ_j/(δ² + τ_j)

ρ = δ − Σ w_j δ²/(δ² + τ_j) is what the sum leaves over, exactly, where the fractions do not reach δ². It is next to
nothing where they do. So (√T + δ)⁻¹ y is a sum of solutions of (T + τ_j) z = y, each by L D Lᵀ. That is a chain of 2n
short links, and all chains run side by side, where QR has one chain of n² rotations. Each system is positive definite
(the last one may be negative definite), and terms that are large have one sign, so nothing cancels.

T is scaled by a power of two so that its trace, and with it λ, is below 2. A lane takes part if no eigenvalue is below
`FRACTIONS_LEAST` then: noise could make T + τ_j indefinite where one is far smaller. The QR iteration, with its floor
under small eigenvalues, is there for the others. Letters as in `eigensolver`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockadapt.kernels.cpu.ahead import ask, ask_rest
from blockadapt.kernels.cpu.jit import inlined
from blockadapt.kernels.cpu.simd import (
    absolute,
    all_lanes,
    broadcast,
    fma,
    load,
    maximum,
    power_of_two,
    reciprocal,
    select,
    sqrt,
    store,
)
from blockadapt.kernels.cpu.tables import TERM
from blockadapt.kernels.cpu.thresholds import thresholds
from blockadapt.kernels.thresholds import FRACTIONS_LEAST, FRACTIONS_MOST, FRACTIONS_RANGE, FRACTIONS_SMALLEST
from blockadapt.spectrum import UNBOUNDED

COUNT = 15
"""The number of fractions: the sum is off by at most 6e-7 of itself. With 14 it is off by 2e-6, with 16 by 2e-7."""


def fractions(count: int, smallest: float, most: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Find w and τ with Σ w_j/(λ + τ_j) ≈ 1/√λ for λ from `smallest` to `most`.

    τ_j = smallest · sc²(y_j), at the middles y_j of `count` equal parts of the quarter period; sn, cn and dn come from
    the arithmetic-geometric mean (Abramowitz and Stegun, 16.4).
    """
    parameter = smallest / most
    means, halves, other = [1.0], [np.sqrt(1 - parameter)], np.sqrt(parameter)
    while halves[-1] > 1e-15:
        mean, half = (means[-1] + other) / 2, (means[-1] - other) / 2
        other = np.sqrt(means[-1] * other)
        means.append(mean)
        halves.append(half)
    quarter = np.pi / 2 / means[-1]
    angle = 2.0 ** (len(means) - 1) * means[-1] * quarter * (np.arange(count) + 0.5) / count
    for mean, half in zip(means[:0:-1], halves[:0:-1], strict=True):
        angle = (angle + np.arcsin(half / mean * np.sin(angle))) / 2
    sn, cn = np.sin(angle), np.cos(angle)
    weights = 2 * quarter * np.sqrt(smallest) / (np.pi * count) * np.sqrt(cn**2 + parameter * sn**2) / cn**2
    return weights, smallest * (sn / cn) ** 2


WEIGHTS, SHIFTS = (each.astype(np.float32) for each in fractions(COUNT, FRACTIONS_SMALLEST, FRACTIONS_MOST))


@inlined
def inverse_root_(n: int, s: Any, scale: Any, finite: Any, noted: int, L: int) -> Any:
    """Set q ← lr (√(T scale / correction) + δ)⁻¹ y in lanes where that can be; d, e and y stay.

    Returns these lanes, and how many lines are left to ask for: all or none.
    """
    f = s.d.dtype.type
    zero, one = broadcast(f(0)), broadcast(f(1))
    trace = zero
    for i in range(n):
        trace = trace + load(s.d, i * L)
    inverse = one / power_of_two(maximum(trace, one))
    root = sqrt(load(s.terms, TERM.spectrum.correction * L) / scale * inverse)
    damping, lr = load(s.terms, TERM.spectrum.damping * L) * root, load(s.terms, TERM.spectrum.lr * L) * root
    square = damping * damping
    done = finite & is_plain(s.terms, L) & (square <= broadcast(f(FRACTIONS_RANGE)))
    done = done & (broadcast(f(1 / FRACTIONS_RANGE)) <= scale) & (scale <= broadcast(f(FRACTIONS_RANGE)))
    done = scaled_(n, s.d, s.e, inverse, done, s.log, L)
    if all_lanes(~done):
        return done, noted
    for i in range(n):
        store(s.q, i * L, zero)
    outside = (square < broadcast(f(FRACTIONS_SMALLEST))) | (broadcast(f(FRACTIONS_MOST)) < square)
    left = damping
    for j in range(COUNT):
        left = fma(-square * f(WEIGHTS[j]), reciprocal(square + f(SHIFTS[j])), left)
    asked = 0
    for j in range(0, COUNT, 2):
        t0, t1 = broadcast(f(SHIFTS[j])), select(outside, -square, zero)
        c0, c1 = f(WEIGHTS[j]) * t0 * reciprocal(square + t0), select(outside, -left, zero)
        if j + 1 < COUNT:
            t1 = broadcast(f(SHIFTS[j + 1]))
            c1 = f(WEIGHTS[j + 1]) * t1 * reciprocal(square + t1)
        add_two_(n, s.log, s.y, s.q, t0, c0 * lr, t1, c1 * lr, s.ahead, noted, asked, L)
        asked += n - 1
    ask_rest(s.ahead, noted, asked)
    return done, 0


@inlined
def is_plain(terms: Any, L: int) -> Any:
    """Say in which lanes no clip is at work, and no resolution above the eigenvalues that are taken here."""
    f = terms.dtype.type
    lower, upper = load(terms, TERM.spectrum.lower * L), load(terms, TERM.spectrum.upper * L)
    fine = load(terms, TERM.spectrum.resolution * L) <= broadcast(f(FRACTIONS_LEAST / 2))
    return fine & (lower <= broadcast(f(0))) & (broadcast(f(UNBOUNDED)) <= upper)


@inlined
def scaled_(n: int, d: Any, e: Any, inverse: Any, done: Any, rows: Any, L: int) -> Any:
    """Put T · inverse into `rows`, n of its diagonal and n of what is beside it.

    Returns in which of the lanes `done` no eigenvalue is below the least: T without it has positive pivots.
    """
    f = d.dtype.type
    zero, least = broadcast(f(0)), broadcast(f(FRACTIONS_LEAST))
    floor = broadcast(f(thresholds(d).coupling))
    here = load(d, 0) * inverse
    store(rows, 0, here)
    pivot = here - least
    for i in range(1, n):
        done = done & (zero < pivot)
        here, off = load(d, i * L) * inverse, load(e, (i - 1) * L) * inverse
        off = select(floor < absolute(off), off, zero)  # or its square would be denormal
        store(rows, i * L, here)
        store(rows, (n + i) * L, off)
        pivot = here - least - off * off * reciprocal(pivot)
    return done & (zero < pivot)


@inlined
def add_two_(
    n: int,
    rows: Any,
    y: Any,
    total: Any,
    t0: Any,
    c0: Any,
    t1: Any,
    c1: Any,
    ahead: Any,
    noted: int,
    asked: int,
    L: int,
) -> None:
    """Add c₀ (T + t₀)⁻¹ y + c₁ (T + t₁)⁻¹ y, by T + t = L D Lᵀ. `rows` holds T; L and D⁻¹ L⁻¹ y come after it."""
    here, z = load(rows, 0), load(y, 0)
    r0, r1, z0, z1 = reciprocal(here + t0), reciprocal(here + t1), z, z
    at = 2 * n * L
    for i in range(1, n):
        store(rows, at, z0 * r0)
        store(rows, at + L, z1 * r1)
        here, off, z = load(rows, i * L), load(rows, (n + i) * L), load(y, i * L)
        l0, l1 = off * r0, off * r1
        store(rows, at + 2 * L, l0)
        store(rows, at + 3 * L, l1)
        at += 4 * L
        r0, r1 = reciprocal(fma(-off, l0, here + t0)), reciprocal(fma(-off, l1, here + t1))
        z0, z1 = fma(-l0, z0, z), fma(-l1, z1, z)
        ask(ahead, noted, asked + i - 1)
    x0, x1 = z0 * r0, z1 * r1
    store(total, (n - 1) * L, fma(c0, x0, fma(c1, x1, load(total, (n - 1) * L))))
    for i in range(n - 2, -1, -1):
        at -= 4 * L
        x0 = fma(-load(rows, at + 2 * L), x0, load(rows, at))
        x1 = fma(-load(rows, at + 3 * L), x1, load(rows, at + L))
        store(total, i * L, fma(c0, x0, fma(c1, x1, load(total, i * L))))
