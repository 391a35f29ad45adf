"""What the stages of an eigensolver are given, and what they leave, by lane: for tests of one stage at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockadapt.moments import unpack
from support.blocks import blocks_of

Array = np.ndarray[Any, Any]


def matrices(kind: str, n: int, lanes: int) -> Array:
    """A block for each lane, [lanes, n, n], with its largest entry in [1, 2) as kernels scale it; exact in float32."""
    V = unpack(blocks_of(kind, lanes, n)[0], n).numpy()
    largest = np.maximum(V.diagonal(axis1=1, axis2=2).max(-1), 1e-300)
    return (V / np.exp2(np.floor(np.log2(largest)))[:, None, None]).astype(np.float32).astype(np.float64)


def vectors(n: int, lanes: int) -> Array:
    """[lanes, n], exact in float32."""
    return np.random.default_rng(n).standard_normal((lanes, n)).astype(np.float32).astype(np.float64)


def to_rows(blocks: Array, real: Any) -> Array:
    """[lanes, …] numbers of each lane as rows of lanes, one after another."""
    return np.ascontiguousarray(blocks.reshape(len(blocks), -1).T).astype(real).reshape(-1)


def from_rows(rows: Array, *shape: int) -> Array:
    """The inverse of `to_rows`, in float64: [lanes, *shape]."""
    return rows.reshape(np.prod(shape), -1).T.reshape(-1, *shape).astype(np.float64)


def packed_rows(V: Array, real: Any) -> Array:
    """The lower triangles, as rows of lanes."""
    return to_rows(V[(slice(None), *np.tril_indices(V.shape[1]))], real)


def tridiagonal_matrix(d: Array, e: Array) -> Array:
    """[lanes, n, n] from diagonals [lanes, n] and [lanes, n − 1]."""
    lanes, n = d.shape
    T = np.zeros((lanes, n, n))
    T[:, range(n), range(n)] = d
    T[:, range(n - 1), range(1, n)] = T[:, range(1, n), range(n - 1)] = e
    return T


def reflections(a: Array, h: Array, n: int) -> Array:
    """H [lanes, n, n], multiplied out of what tridiagonal reduction leaves in a and h."""
    triangle, inverse = from_rows(a, n * (n + 1) // 2), from_rows(h, n)
    lanes = len(inverse)
    H = np.broadcast_to(np.eye(n), (lanes, n, n)).copy()
    for k in range(n - 2):
        u = np.zeros((lanes, n))
        for i in range(k + 1, n):
            u[:, i] = triangle[:, i * (i + 1) // 2 + k]
        H -= (H @ u[:, :, None]) * u[:, None, :] * inverse[:, k, None, None]
    return H


def tolerance(real: Any, n: int) -> float:
    """How far a stage may be off, where its largest numbers are about 1."""
    return float(8 * n * np.finfo(real).eps)
