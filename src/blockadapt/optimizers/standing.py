"""Units of which nothing has changed since the last step, asked about and moved all at once.

With many small tensors a step spends its time on Python, not on blocks. So what a step asks of each of them alike is
asked here in a few passes over flat lists, each of which runs in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockadapt.kernels import Batch, Coefficients, Place, Segment, Tally
from blockadapt.moments import statistics_dtype
from blockadapt.optimizers.storage import State
from blockadapt.optimizers.unit import COUNTS, Unit
from blockadapt.optimizers.update import Update

_grad, _dtype = attrgetter("grad"), attrgetter("dtype")
_segment: Callable[[Any], Segment] = partial(tuple.__new__, Segment)


class Kind(NamedTuple):
    """What decides a unit's coefficients and whether its basis is due: equal for almost all units of a group.

    Attributes:
        group: The index of its param group.
        step: The number of the step to take.
        dtype: That of its statistics.
        n: Its largest block.
    """

    group: int
    step: int
    dtype: torch.dtype
    n: int


Plan = tuple[bool, Coefficients, Tally | None]
"""What a segment has besides its place and its gradient."""


class Standing:
    """Units as the last step left them: those that move where they lie, in flat lists, and the others.

    Args:
        units: All units of the last step.
        state: The optimizer's.

    Attributes:
        others: Those that have to be copied to be moved, or that are shared out.
        first: The first of those in flat lists, for each param group.
    """

    def __init__(self, units: Sequence[Unit], state: Mapping[Tensor, State]) -> None:
        self._units = list(units)
        members = [unit for unit in units if _stands(unit)]
        self.others = [unit for unit in units if unit not in {*members}]
        self.first = {unit.index: unit for unit in reversed(members)}
        self._owners = [unit.owner for unit in members]
        self._kept = {(unit.index, tuple(unit.known.kept)) for unit in members if unit.known is not None}
        states = [state[owner] for owner in self._owners]
        self._names = [*chain.from_iterable(states)]
        self._entries = [*chain.from_iterable(map(dict.values, states))]
        self._ids = [*map(id, self._entries)]
        self._counters = [held["step"] for held in states]
        statistics = [t for name, t in zip(self._names, self._entries, strict=True) if name not in COUNTS]
        self._lie = Lie([*self._owners, *statistics])
        self._dtypes, self._strides = [*map(_dtype, self._owners)], shared(map(Tensor.stride, self._owners))
        self._kinds = shared((unit.index, statistics_dtype(unit.owner), max(unit.cut.sizes)) for unit in members)
        self._batches = _by_batch(members)

    def steps(
        self, units: Sequence[Unit], kept: Callable[[int], list[str] | None], state: Mapping[Tensor, State]
    ) -> list[int] | None:
        """How many steps each has taken, if these are the units and nothing of them has changed; else None.

        `kept` gives what units of a group keep, and None where only a device counts their steps.
        """
        if units != self._units or any(kept(group) != [*names] for group, names in self._kept):
            return None
        states: list[Any] = [*map(state.get, self._owners)]
        if {*map(type, states)} - {dict} or [*chain.from_iterable(states)] != self._names:
            return None
        if [*map(id, chain.from_iterable(map(dict.values, states)))] != self._ids or not self._lie.holds():
            return None
        try:
            counts = [*map(Tensor.item, self._counters)]
        except RuntimeError:  # no longer one number
            return None
        return None if min(counts, default=0) < 0 else counts  # type: ignore[return-value]

    def kinds(self, steps: Sequence[int]) -> dict[tuple[Any, int], Kind]:
        """The kinds of units after so many steps, by what tells them apart here."""
        return {
            (kind, taken): Kind(kind[0], taken + 1, *kind[1:])
            for kind, taken in {*zip(self._kinds, steps, strict=True)}
        }

    def add_to(self, update: Update, steps: Sequence[int], plans: Mapping[Any, Plan]) -> bool:
        """Put all members into an update, or none of them where a gradient has to be copied first.

        `plans` has that of each of the `kinds`.
        """
        grads = [*map(_grad, self._owners)]
        if [*map(_dtype, grads)] != self._dtypes or [*map(Tensor.stride, grads)] != self._strides:
            return False
        if any(map(Tensor.is_neg, grads)) or any(map(Tensor._is_zerotensor, grads)):
            return False
        if len(plans) == 1:
            (plan,) = plans.values()
            for batch, places, taken in self._batches:
                update.batches[batch] = [*map(_segment, zip(places, taken(grads), *map(repeat, plan), strict=False))]
        else:
            chosen = [plans[key] for key in zip(self._kinds, steps, strict=True)]
            for batch, places, taken in self._batches:
                segments = zip(places, taken(grads), taken(chosen), strict=True)
                update.batches[batch] = [Segment(place, grad, *plan) for place, grad, plan in segments]
        update.counters += self._counters
        update.moved += self._owners
        return True


class Lie:
    """Where tensors lie and how they are to be read: addresses, dtypes, strides, counts, and no sign that waits.

    Together these tell of another shape too, for what is contiguous, as state is. Parameters' shapes are asked for
    where their cut is (`Units`). A count is read in a third of the time.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        chunks = [tensors[i : i + _CHUNK] for i in range(0, len(tensors), _CHUNK)]
        self._chunks = [
            (
                some,
                [*map(Tensor.data_ptr, some)],
                [*map(_dtype, some)],
                shared(map(Tensor.stride, some)),
                [*map(Tensor.numel, some)],
            )
            for some in chunks
        ]

    def holds(self) -> bool:
        """Whether nothing of it has changed."""
        for some, addresses, dtypes, strides, counts in self._chunks:
            if [*map(Tensor.data_ptr, some)] != addresses or [*map(_dtype, some)] != dtypes:
                return False
            if [*map(Tensor.stride, some)] != strides or [*map(Tensor.numel, some)] != counts:
                return False
            if any(map(Tensor.is_neg, some)):
                return False
        return True


_CHUNK = 128
"""Tensors that stay in the processor's cache from one pass over them to the next."""


def shared(values: Iterable[Any]) -> list[Any]:
    """The same values, equal ones as one object: they are compared at every step, and there may be few of them."""
    known: dict[Any, Any] = {}
    return [known.setdefault(value, value) for value in values]


def _stands(unit: Unit) -> bool:
    """Whether a unit is known, moves where it lies, and has its steps counted by the host."""
    known = unit.known
    return known is not None and not known.capturable and bool(unit.places) and unit.share is None


def _by_batch(units: Sequence[Unit]) -> list[tuple[Batch, list[Place], Callable[[Sequence[Any]], Iterable[Any]]]]:
    """For each batch its places, and what takes the entry for each place out of a list over units."""
    placed: dict[Batch, list[tuple[int, Place]]] = {}
    for i, unit in enumerate(units):
        for place in unit.places or ():
            if place.num_blocks:
                placed.setdefault(place.batch, []).append((i, place))
    return [(batch, [place for _, place in pairs], _taken([i for i, _ in pairs])) for batch, pairs in placed.items()]


def _taken(positions: Sequence[int]) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """What takes the entries at these positions out of a list."""
    return itemgetter(*positions) if len(positions) > 1 else lambda entries: [entries[i] for i in positions]
