"""Argument checks. Every message reads: ``Owner: `argument` must be <rule>, got <value>.``"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Described(str):
    """A value that is told in words rather than by its repr."""

    __slots__ = ()

    __repr__ = str.__str__


def refusal(owner: str, argument: str, rule: str, value: object) -> str:
    """The one sentence that says what was wrong."""
    return f"{owner}: `{argument}` must be {rule}, got {value!r}."


def require(ok: bool, owner: str, argument: str, rule: str, value: object) -> None:
    """Raise ValueError with the one sentence unless `ok`."""
    if not ok:
        raise ValueError(refusal(owner, argument, rule, value))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie where its strides say.

    A sparse tensor, or a subclass that dispatches by itself, keeps them elsewhere.
    """
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided


def is_number(value: object) -> bool:
    """A real scalar, NumPy's too; not bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require_number(
    owner: str,
    argument: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Raise unless `value` is a finite number in the given interval."""
    ok = is_number(value) and math.isfinite(value) and least <= value <= most and above < value < below
    require(ok, owner, argument, _interval(least, above, below, most), value)


def _interval(least: float, above: float, below: float, most: float) -> str:
    left = f"[{least:g}" if math.isfinite(least) else f"({above:g}" if math.isfinite(above) else "(-inf"
    right = f"{most:g}]" if math.isfinite(most) else f"{below:g})"
    if right == "inf)":
        return {"[0": "a finite number >= 0", "(0": "a finite number > 0"}.get(
            left, f"a finite number in {left}, {right}"
        )
    return f"in {left}, {right}"


def require_beta(owner: str, argument: str, value: Any) -> None:
    """A decay rate lies in [0, 1)."""
    require_number(owner, argument, value, least=0, below=1)


def require_lr(owner: str, value: Any) -> None:
    """A learning rate is a number or a one-element tensor, finite and not negative."""
    if isinstance(value, Tensor):
        require(value.numel() == 1, owner, "lr", "a number or a one-element tensor", tuple(value.shape))
        value = value.item()
    require_number(owner, "lr", value, least=0)


def require_integer(owner: str, argument: str, value: Any, *, least: int, most: int | None = None) -> None:
    """Raise unless `value` is an int in [least, most]."""
    rule = f"an integer >= {least}" if most is None else f"an integer in [{least}, {most}]"
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most)
    require(ok, owner, argument, rule, value)


def require_bool(owner: str, argument: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    require(isinstance(value, bool), owner, argument, "True or False", value)


def require_choice(owner: str, argument: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    rule = "one of " + ", ".join(repr(choice) for choice in choices)
    require(isinstance(value, str) and value in choices, owner, argument, rule, value)
