"""Checks arguments. Every message reads: ``Owner: `argument` must be <rule>, got <value>.``"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NO_DISPATCH = Tensor.__torch_dispatch__


class Described(str):
    """Holds a value that is told in words rather than by its repr."""

    __slots__ = ()

    __repr__ = str.__str__


def refusal(owner: str, argument: str, rule: str, value: object) -> str:
    """Return the one sentence that says what was wrong."""
    return f"{owner}: `{argument}` must be {rule}, got {value!r}."


def require(ok: bool, owner: str, argument: str, rule: str, value: object) -> None:
    """Raise unless `ok`.

    Raises:
        ValueError: With the one sentence.
    """
    if not ok:
        raise ValueError(refusal(owner, argument, rule, value))


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor's numbers lie where its strides say, or would lie there if it had any (FakeTensor).

    A sparse tensor, or another subclass that dispatches by itself, keeps them elsewhere.
    """
    return (_is_alone(tensor) or not has_numbers(tensor)) and tensor.layout is torch.strided


def lies_in_memory(tensor: Tensor, device: torch.device) -> bool:
    """Tell whether the numbers that torch sees are those at `data_ptr`: no wrapper, no lazy sign, no other device."""
    plain = _is_alone(tensor) and tensor.layout is torch.strided
    return plain and (tensor.is_cpu if device.type == "cpu" else tensor.device == device) and not tensor.is_neg()


def _is_alone(tensor: Tensor) -> bool:
    """Tell whether no subclass dispatches for it."""
    return type(tensor).__torch_dispatch__ is _NO_DISPATCH


def has_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor has memory with numbers in it: not on the device "meta", and no FakeTensor."""
    if _is_alone(tensor):
        return not tensor.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor)


def is_on_host(tensor: Tensor) -> bool:
    """Tell whether the host reads a tensor's numbers: on the CPU, and on devices without float64, which it needs."""
    return tensor.device.type in ("cpu", "mps") and has_numbers(tensor)


def is_number(value: object) -> bool:
    """Tell whether a value is a real scalar, NumPy's too; bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Tell whether a real scalar is finite as a float, which an int or a fraction may be too large for."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


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
    """Raise unless `value` is a finite number in the given interval. Each step asks, so words wait for a need.

    Raises:
        ValueError: It is not.
    """
    ok = type(value) is float or is_number(value)  # most are floats, and an abstract class takes long to ask
    if not (ok and is_finite(value) and least <= value <= most and above < value < below):
        raise ValueError(refusal(owner, argument, _interval(least, above, below, most), value))


def _interval(least: float, above: float, below: float, most: float) -> str:
    left = f"[{least:g}" if math.isfinite(least) else f"({above:g}" if math.isfinite(above) else "(-inf"
    right = f"{most:g}]" if math.isfinite(most) else f"{below:g})"
    if right == "inf)":
        return {"[0": "a finite number >= 0", "(0": "a finite number > 0"}.get(
            left, f"a finite number in {left}, {right}"
        )
    return f"in {left}, {right}"


def require_beta(owner: str, argument: str, value: Any) -> None:
    """Raise unless `value` is a decay rate, which lies in [0, 1)."""
    require_number(owner, argument, value, least=0, below=1)


def require_lr(owner: str, value: Any, argument: str = "lr") -> None:
    """Raise unless `value` is a learning rate: a number or one-element tensor, finite and not negative.

    One that lies on a device is taken at its word: to look at it would be to wait for the device.
    """
    if isinstance(value, Tensor):
        require(value.numel() == 1, owner, argument, "a number or a one-element tensor", tuple(value.shape))
        if not is_on_host(value):
            return
        value = value.item()
    require_number(owner, argument, value, least=0)


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
