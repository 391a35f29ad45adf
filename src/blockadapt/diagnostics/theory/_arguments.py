"""Gives one range to every name that a function of the theory may take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from blockadapt.validation import require_integer, require_number

_POSITIVE, _NOT_NEGATIVE, _BETA = {"above": 0.0}, {"least": 0.0}, {"least": 0.0, "below": 1.0}
_RULES: dict[str, dict[str, float]] = {
    **dict.fromkeys(("smoothness", "gradient_bound", "eps", "lr", "first_gradient", "batch_size"), _POSITIVE),
    **dict.fromkeys(("step_bound", "first_norm", "initial_gap", "variance", "early_gradients"), _NOT_NEGATIVE),
    **dict.fromkeys(("coordinate_bound", "momentum", "gradient"), _NOT_NEGATIVE),
    **dict.fromkeys(("beta1", "beta2"), _BETA),
    "beta1_decay": {"above": 0.0, "most": 1.0},
    "condition": {"least": 1.0},
}
_COUNTS = ("steps", "dimension")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function refuse an argument outside of the range that its name stands for."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        given: dict[str, Any] = signature.bind(*args, **kwargs).arguments
        for name, value in given.items():
            if name in _COUNTS:
                require_integer(function.__name__, name, value, least=1)
            elif name in _RULES:
                require_number(function.__name__, name, value, **_RULES[name])
        return function(*args, **kwargs)

    return call
