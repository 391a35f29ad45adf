"""Count the arithmetic of the uncompiled kernel: an operation on a row of lanes is one for each of its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockadapt.kernels.cpu import simd
from support.uncompiled import MODULES

ARITHMETIC = (np.add, np.subtract, np.multiply, np.divide, np.sqrt)

Array = np.ndarray[Any, Any]


class Counted(Array):
    """A row that counts the sums, differences, products, quotients and roots in which it takes part."""

    operations = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Counted.operations += ufunc in ARITHMETIC
        return _counted(getattr(ufunc, method)(*(_plain(value) for value in inputs), **options))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return _counted(function(*(_plain(value) for value in args), **options))


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Counted) else value


def _counted(value: Any) -> Any:
    return value.view(Counted) if isinstance(value, np.ndarray) else value


@pytest.fixture
def counted(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row that the uncompiled kernel loads or makes counts from now on."""
    for name in ("load", "load_row", "gather", "broadcast"):
        function = getattr(simd, name)
        for module in MODULES:
            if getattr(module, name, None) is function:
                monkeypatch.setattr(module, name, lambda *args, function=function: _counted(function(*args)))
    monkeypatch.setattr(Counted, "operations", 0)
