"""Makes a spectral function's formula for lanes a constant of compiled code.

Numba takes a compiled function that is passed as an argument for an address, which cannot be kept on disk. A `Form` is
an argument without a value: its type says which function to call, so each form gets a step compiled for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.core.imputils import lower_constant
from numba.extending import models, overload, register_model, typeof_impl

from blockadapt.kernels.cpu.jit import jit
from blockadapt.kernels.cpu.simd import sqrt


class Form:
    """Computes f(λ, lr, damping) on rows of lanes, by a plain function in the vocabulary of `simd`."""

    def __init__(self, function: Callable[[Any, Any, Any], Any]) -> None:
        self.py_func = function  # where Numba's functions have it too
        self.compiled = jit(function)


class _FormType(types.Type):
    def __init__(self, form: Form) -> None:
        self.form = form
        super().__init__(name=f"Form({form.py_func.__module__}.{form.py_func.__qualname__}, {id(form)})")


def evaluate(form: Any, eigenvalue: Any, lr: Any, damping: Any) -> Any:
    """Compute f at these eigenvalues."""
    return form.py_func(eigenvalue, lr, damping)


@typeof_impl.register(Form)
def _typeof(value: Form, context: Any) -> _FormType:
    return _FormType(value)


register_model(_FormType)(models.OpaqueModel)


@lower_constant(_FormType)
def _constant(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


@overload(evaluate)
def _evaluate(form: Any, eigenvalue: Any, lr: Any, damping: Any) -> Any:
    function = form.form.compiled

    def call(form: Any, eigenvalue: Any, lr: Any, damping: Any) -> Any:
        return function(eigenvalue, lr, damping)

    return call


def inverse_root(eigenvalue: Any, lr: Any, damping: Any) -> Any:
    """Compute f(λ) = α / (√λ + δ), the paper's."""
    return lr / (sqrt(eigenvalue) + damping)


INVERSE_ROOT = Form(inverse_root)
