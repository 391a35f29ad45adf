"""The compiled step as plain Python: its functions with their Python bodies in place of the compiled ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from blockadapt.kernels.cpu import (
    effective,
    eigensolver,
    jacobi,
    kept_basis,
    new_basis,
    ones,
    reflections,
    scratch,
    step,
    thresholds,
    tile_io,
    tridiagonal,
    work,
)

MODULES = (
    effective,
    eigensolver,
    jacobi,
    kept_basis,
    new_basis,
    ones,
    reflections,
    scratch,
    step,
    thresholds,
    tile_io,
    tridiagonal,
)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of the step's modules as plain Python. What is compiled is compiled before, with the compiled ones."""
    for real in (np.float32, np.float64):
        work.worker_for(real, None)
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)
    with np.errstate(all="ignore"):
        yield
