"""Keeps what a compiled kernel knows of the blocks that it moves from step to step, while they stay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from blockadapt.kernels.contract import Batch, Place
from blockadapt.kernels.safety import GradientAddresses, check_place, reach_bytes
from blockadapt.kernels.segments import Places, Segments


class WorkList:
    """Holds the step of blocks that are alike. A kernel's own adds what its compiled code reads.

    It holds the places weakly, so that their memory is free as soon as nobody else wants it.

    Args:
        owner: Whose it is, for messages.
        batch: What the blocks have in common.
        places: Where they lie.

    Raises:
        ValueError: A tensor of a place is not what compiled code takes it for.
    """

    def __init__(self, owner: str, batch: Batch, places: Sequence[Place]) -> None:
        for place in places:
            check_place(owner, place, batch)
        self._batch = batch
        self._places = [weakref.ref(place) for place in places]
        self._seen: Callable[[], Places | None] = lambda: None
        self._offsets = np.array([place.offset * place.x.itemsize for place in places], dtype=np.int64)
        self._addresses = GradientAddresses(owner, batch, [*map(reach_bytes, places)])
        self._seen_addresses: list[int] = []
        self._begins = self._offsets

    def fits(self, places: Places) -> bool:
        """Say whether it was made for these places. Those that it has seen before are not looked at again."""
        if self._seen() is places:
            return True
        if len(places) != len(self._places):
            return False
        if any(known() is not place for known, place in zip(self._places, places, strict=True)):
            return False
        self._seen = weakref.ref(places)
        return True

    def gradients_at(self, grads: Sequence[Tensor]) -> np.ndarray:
        """Say at which address the part of each gradient begins that its place needs; the same array while none moves.

        Raises:
            ValueError: A gradient is not in plain memory of the batch's device, of its dtype and large enough.
        """
        addresses = self._addresses.of(grads)
        if addresses is not self._seen_addresses:
            self._seen_addresses, self._begins = addresses, np.array(addresses, dtype=np.int64) + self._offsets
        return self._begins


class WorkLists:
    """Keeps one work list for each kind of step, and makes another when the blocks lie elsewhere."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Any] = {}

    def __reduce__(self) -> Any:
        """Copy and pickle them as none: they hold addresses, which are of this process and of these tensors."""
        return WorkLists, ()

    def of(self, batch: Batch, segments: Segments, make: Callable[..., Any]) -> Any:
        """Find the work list of these segments, which are alike, or make it: `make(batch, places, refresh, tally)`."""
        places, recipe = segments.places, segments.recipes[0]
        key = batch, places[0].keeps, recipe.refresh, recipe.tally
        found = self._known.get(key)
        if found is None or not found.fits(places):
            found = self._known[key] = make(batch, places, recipe.refresh, recipe.tally)
        return found
