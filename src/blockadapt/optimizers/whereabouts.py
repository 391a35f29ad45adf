"""Tells whether tensors still lie where a step found them, and are to be read as they were then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

_dtype = attrgetter("dtype")


class Whereabouts:
    """Notes where tensors lie and how they are to be read: addresses, dtypes, strides, counts, and no sign that waits.

    Together these tell of another shape too, for what is contiguous, as state is. Parameters' shapes are asked for
    where their cut is (`Units`). A count is read in a third of the time.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        portions = [tensors[i : i + _PORTION] for i in range(0, len(tensors), _PORTION)]
        self._portions = [
            (
                some,
                [*map(Tensor.data_ptr, some)],
                [*map(_dtype, some)],
                shared(map(Tensor.stride, some)),
                [*map(Tensor.numel, some)],
            )
            for some in portions
        ]

    def holds(self) -> bool:
        """Say whether nothing of it has changed."""
        for some, addresses, dtypes, strides, counts in self._portions:
            if [*map(Tensor.data_ptr, some)] != addresses or [*map(_dtype, some)] != dtypes:
                return False
            if [*map(Tensor.stride, some)] != strides or [*map(Tensor.numel, some)] != counts:
                return False
            if any(map(Tensor.is_neg, some)):
                return False
        return True


_PORTION = 128
"""So many tensors stay in the processor's cache from one pass over them to the next."""


def shared(values: Iterable[Any]) -> list[Any]:
    """Make equal values one object: they are compared at every step, and there may be few of them."""
    known: dict[Any, Any] = {}
    return [known.setdefault(value, value) for value in values]


def is_same_memory(now: Tensor, kept: Tensor) -> bool:
    """Tell whether both are the same memory, read alike: `kept` holds it, so that nothing else lies there.

    FSDP2 makes the tensor of what is local anew in each step, and lets the numbers lie.
    """
    if now is kept:
        return True
    if now.data_ptr() != kept.data_ptr() or now.dtype is not kept.dtype or now.is_neg():
        return False
    return now.shape == kept.shape and now.stride() == kept.stride()
