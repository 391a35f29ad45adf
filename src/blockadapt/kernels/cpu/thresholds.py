"""Gives compiled code the thresholds of its arrays' type."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels.cpu.jit import jit
from blockadapt.kernels.thresholds import FLOAT32, FLOAT64, Thresholds


@jit
def thresholds(like: Any) -> Thresholds:
    """Return those of this array's type."""
    return FLOAT32 if like.itemsize == 4 else FLOAT64
