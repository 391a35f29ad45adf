"""The compiled step as plain Python: its functions with their Python bodies in place of the compiled ones."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import numpy as np
import pytest

from blockadapt.kernels import cpu
from blockadapt.kernels.cpu import work

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.iter_modules(cpu.__path__, f"{cpu.__name__}.")
    if found.name != work.__name__  # it is Python itself, and asks for the Python bodies that it needs
]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put plain Python into every module of the kernel. What is compiled is compiled before, with the compiled ones."""
    for real in (np.float32, np.float64):
        work.worker_for(real, None)
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)
    with np.errstate(all="ignore"):
        yield
