"""Solves one block as a textbook does: NumPy, float64, no lanes. `eigensolver` is tested against it.

    T = Hᵀ V H      `tridiagonalise`, Householder reflections
    Λ = Rᵀ T R      `diagonalise`, implicit QR with Wilkinson's shift
    V = U Λ Uᵀ      `decompose`, U = H R

Golub and Van Loan, Matrix Computations, algorithms 8.3.1 to 8.3.3.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ROUNDOFF = float(np.finfo(np.float64).eps)


def decompose(V: Array) -> tuple[Array, Array]:
    """Find Λ, in no order, and U, with V = U Λ Uᵀ."""
    T, H = tridiagonalise(V)
    eigenvalues, R = diagonalise(T)
    return eigenvalues, H @ R


def tridiagonalise(V: Array) -> tuple[Array, Array]:
    """Find T and H with T = Hᵀ V H: reflection k takes column k to (…, β, 0, …, 0) below its diagonal."""
    n = len(V)
    T, H = V.astype(np.float64), np.eye(n)
    for k in range(n - 2):
        column = T[k + 1 :, k]
        if not column[1:].any():
            continue  # tridiagonal here already
        beta = -math.copysign(float(np.linalg.norm(column)), column[0])  # so that nothing cancels in u
        u = column.copy()
        u[0] -= beta
        reflection = np.eye(n)
        reflection[k + 1 :, k + 1 :] -= 2 * np.outer(u, u) / (u @ u)
        T, H = reflection @ T @ reflection, H @ reflection
    return T, H


def diagonalise(T: Array) -> tuple[Array, Array]:
    """Find Λ and R with Λ = Rᵀ T R. Each sweep works on the last rows of T that are coupled by more than ε‖T‖."""
    n = len(T)
    T, R = T.astype(np.float64), np.eye(n)
    negligible = ROUNDOFF * np.abs(T).max()
    while True:
        coupled = [i for i in range(n - 1) if abs(T[i + 1, i]) > negligible]
        if not coupled:
            return T.diagonal().copy(), R
        last = coupled[-1] + 1
        first = coupled[-1]
        while first - 1 in coupled:
            first -= 1
        _sweep_(T, R, first, last)


def wilkinson_shift(above: float, off: float, here: float) -> float:
    """Compute the eigenvalue of [[above, off], [off, here]] that is nearer to `here`."""
    gap = (above - here) / 2
    return here - off * off / (gap + math.copysign(math.hypot(gap, off), gap))


def _sweep_(T: Array, R: Array, first: int, last: int) -> None:
    """Make one implicit QR step on rows first … last: a rotation makes a bulge, and the others chase it off the end."""
    shift = wilkinson_shift(T[last - 1, last - 1], T[last, last - 1], T[last, last])
    target, bulge = T[first, first] - shift, T[first + 1, first]
    for k in range(first, last):
        length = math.hypot(target, bulge)
        c, s = (target / length, bulge / length) if length else (1.0, 0.0)
        rotation = np.array([[c, -s], [s, c]])
        T[:, k : k + 2] = T[:, k : k + 2] @ rotation
        T[k : k + 2] = rotation.T @ T[k : k + 2]
        R[:, k : k + 2] = R[:, k : k + 2] @ rotation
        if k + 1 < last:
            target, bulge = T[k + 1, k], T[k + 2, k]
