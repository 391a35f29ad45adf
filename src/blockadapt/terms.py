"""Computes with the numbers of a step, which the host knows or only the device does.

A number that the host knows is a float. One that lies on a device, such as a step counter under `capturable=True`, is a
float64 tensor there, and whatever is computed from it stays there too. The formulas are the same for both.
"""

from __future__ import annotations

import math

from torch import Tensor

from blockadapt.validation import is_on_host

Term = float | Tensor
"""A number of a step. A tensor holds one number, or one for each of several parameters."""


def term_of(value: float | Tensor) -> Term:
    """Make an option a term: the host reads it, unless it would have to wait for a device."""
    if isinstance(value, Tensor) and not is_on_host(value):
        return value.detach().reshape(()).double()
    return float(value.item() if isinstance(value, Tensor) else value)  # torch warns of a float with a gradient


def power(base: float, exponent: Term) -> Term:
    """Compute `base` to the power of `exponent`."""
    return 1.0 if base == 1 else base**exponent


def root(value: Term) -> Term:
    """Compute the square root of a number."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def at_most(value: Term, most: float) -> Term:
    """Take the lesser of a number and a bound."""
    return value.clamp(max=most) if isinstance(value, Tensor) else min(value, most)
