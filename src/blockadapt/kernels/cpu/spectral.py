"""Makes a spectral function's formula for lanes a constant of compiled code.

Numba takes a compiled function that is passed as an argument for an address, which cannot be kept on disk. A `Formula`
is an argument without a value: its type says which function to call, so each formula gets a step compiled for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.core.imputils import lower_constant
from numba.extending import models, overload, register_model, typeof_impl

from blockadapt.kernels.cpu.jit import jit
from blockadapt.kernels.cpu.simd import sqrt


class Formula:
    """Computes f(λ, lr, damping) on rows of lanes, by a plain function in the vocabulary of `simd`."""

    def __init__(self, function: Callable[[Any, Any, Any], Any]) -> None:
        self.py_func = function  # where Numba's functions have it too
        self.compiled = jit(function)


class _FormulaType(types.Type):
    def __init__(self, formula: Formula) -> None:
        self.formula = formula
        super().__init__(name=f"Formula({formula.py_func.__module__}.{formula.py_func.__qualname__}, {id(formula)})")


def evaluate(formula: Any, eigenvalue: Any, lr: Any, damping: Any) -> Any:
    """Compute f at these eigenvalues."""
    return formula.py_func(eigenvalue, lr, damping)


@typeof_impl.register(Formula)
def _typeof(value: Formula, context: Any) -> _FormulaType:
    return _FormulaType(value)


register_model(_FormulaType)(models.OpaqueModel)


@lower_constant(_FormulaType)
def _constant(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


@overload(evaluate)
def _evaluate(formula: Any, eigenvalue: Any, lr: Any, damping: Any) -> Any:
    function = formula.formula.compiled

    def call(formula: Any, eigenvalue: Any, lr: Any, damping: Any) -> Any:
        return function(eigenvalue, lr, damping)

    return call


def is_inverse_root(formula: Any) -> bool:
    """Say whether f is the paper's, which need not be evaluated at eigenvalues; compiled code has it as a constant."""
    return bool(formula.py_func is inverse_root)


@overload(is_inverse_root)
def _is_inverse_root(formula: Any) -> Any:
    known = formula.formula.py_func is inverse_root

    def say(formula: Any) -> bool:
        return known

    return say


def inverse_root(eigenvalue: Any, lr: Any, damping: Any) -> Any:
    """Compute f(λ) = α / (√λ + δ), the paper's."""
    return lr / (sqrt(eigenvalue) + damping)


INVERSE_ROOT = Formula(inverse_root)
