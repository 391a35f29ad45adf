"""The thresholds of `kernels.thresholds` for compiled code, and those that only the CPU kernel has."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.jit import jit
from blockadapt.kernels.thresholds import FLOAT32, FLOAT64, Thresholds

JACOBI_COUPLING = 1e-17
"""Jacobi's method leaves couplings below this where the largest entry is 1: they move an eigenvalue by their square."""

JACOBI_SWEEPS = 60
"""More than Jacobi's method ever takes: it converges quadratically, blocks of 64 in ten sweeps."""

MAX_SWEEPS = 6
"""QR sweeps allowed for each eigenvalue; two are used. A block that needs more is solved by Jacobi's method."""


@jit
def thresholds(like: Any) -> Thresholds:
    """Those of this array's type."""
    return FLOAT32 if like.itemsize == 4 else FLOAT64
