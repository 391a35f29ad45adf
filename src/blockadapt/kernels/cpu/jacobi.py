"""Solves one block by Jacobi's method, if QR sweeps did not: it is slow, and it always converges."""

from __future__ import annotations

import math
from typing import Any

from blockadapt.kernels.cpu.jit import jit
from blockadapt.kernels.thresholds import CPU_JACOBI_COUPLING, CPU_JACOBI_SWEEPS


@jit
def unpack_(n: int, packed: Any, matrix: Any) -> float:
    """Set `matrix` ← V / scale from its packed triangle, with the largest entry in [½, 1); returns scale."""
    largest = 0.0
    for i in range(n):
        largest = max(largest, abs(float(packed[i * (i + 1) // 2 + i])))
    scale = math.ldexp(1.0, math.frexp(largest)[1]) if largest > 0 else 1.0
    for i in range(n):
        for j in range(i + 1):
            matrix[i, j] = matrix[j, i] = float(packed[i * (i + 1) // 2 + j]) / scale
    return scale


@jit
def jacobi_(n: int, matrix: Any, vectors: Any) -> int:
    """Find Λ = Uᵀ A U, on the diagonal of `matrix`, and U, in `vectors`: rotations zero one entry after another.

    Returns the number of sweeps.
    """
    for i in range(n):
        for j in range(n):
            vectors[i, j] = 1.0 if i == j else 0.0
    for sweep in range(CPU_JACOBI_SWEEPS):
        rotations = 0
        for p in range(n - 1):
            for q in range(p + 1, n):
                if abs(matrix[p, q]) > CPU_JACOBI_COUPLING:
                    rotate_(n, p, q, matrix, vectors)
                    rotations += 1
        if rotations == 0:
            return sweep
    return CPU_JACOBI_SWEEPS


@jit
def rotate_(n: int, p: int, q: int, matrix: Any, vectors: Any) -> None:
    """Set A ← Rᵀ A R and U ← U R with the smaller rotation in the plane (p, q) that makes A[p, q] zero."""
    off = matrix[p, q]
    slope = (matrix[q, q] - matrix[p, p]) / (2.0 * off)  # cot 2θ
    t = math.copysign(1.0, slope) / (abs(slope) + math.sqrt(slope * slope + 1.0))
    c = 1.0 / math.sqrt(t * t + 1.0)
    s = t * c
    matrix[p, p] -= t * off
    matrix[q, q] += t * off
    matrix[p, q] = matrix[q, p] = 0.0
    for i in range(n):
        if i not in (p, q):
            at_p, at_q = matrix[i, p], matrix[i, q]
            matrix[i, p] = matrix[p, i] = c * at_p - s * at_q
            matrix[i, q] = matrix[q, i] = s * at_p + c * at_q
        at_p, at_q = vectors[i, p], vectors[i, q]
        vectors[i, p] = c * at_p - s * at_q
        vectors[i, q] = s * at_p + c * at_q
