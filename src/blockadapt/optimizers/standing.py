"""Units of which nothing has changed since the last step, asked about and moved all at once.

With many small tensors a step spends its time on Python, not on blocks. So what a step asks of each of them alike is
asked here in a few passes over flat lists, each of which runs in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockadapt.kernels import Batch, Place
from blockadapt.kernels.segments import Places, Recipe, Segments
from blockadapt.moments import statistics_dtype
from blockadapt.optimizers.storage import State
from blockadapt.optimizers.unit import COUNTS, Unit
from blockadapt.optimizers.update import Update

_grad, _dtype = attrgetter("grad"), attrgetter("dtype")


class Kind(NamedTuple):
    """What decides a unit's coefficients and whether its basis is due: equal for almost all units of a group.

    Attributes:
        group: The index of its param group.
        step: The number of the step to take.
        dtype: That of its statistics.
        n: Its largest block.
        kept: The names of what it keeps.
    """

    group: int
    step: int
    dtype: torch.dtype
    n: int
    kept: tuple[str, ...]


class Standing:
    """Units as the last step left them: those that move where they lie, in flat lists, and the others.

    Args:
        units: All units of the last step.
        state: The optimizer's.

    Attributes:
        others: Those that have to be copied to be moved, whose blocks span parameters, or that are shared out.
        first: The first of those in flat lists, for each param group.
    """

    def __init__(self, units: Sequence[Unit], state: Mapping[Tensor, State]) -> None:
        self._units = list(units)
        members = [unit for unit in units if _stands(unit) and type(state[unit.owner]) is dict]
        standing = {*members}
        self.others = [unit for unit in units if unit not in standing]
        self.first = {unit.index: unit for unit in reversed(members)}
        self._owners = [unit.owner for unit in members]
        self._keys, self._all = [*state], [*state.values()]
        self._states = states = [state[owner] for owner in self._owners]
        self._names = [*chain.from_iterable(states)]
        self._entries = [*chain.from_iterable(map(dict.values, states))]
        self._counters = [held["step"] for held in states]
        statistics = [t for name, t in zip(self._names, self._entries, strict=True) if name not in COUNTS]
        self._whereabouts = Whereabouts([*self._owners, *statistics])
        self._dtypes, self._strides = [*map(_dtype, self._owners)], shared(map(Tensor.stride, self._owners))
        self._kinds = shared(map(_kind, members))
        self._batches = _by_batch(members)
        self._closed = [i for i, unit in enumerate(members) if _is_closed(unit)]
        self._xs = {i: self._owners[i].detach() for i in self._closed}

    def steps(self, units: Sequence[Unit], state: Mapping[Tensor, State]) -> list[int] | None:
        """Count the steps that each has taken, if these are the units and nothing of them has changed; else None."""
        if units != self._units:
            return None
        if not (_agree(is_, state, self._keys) and _agree(is_, state.values(), self._all)):
            return None
        names, entries = chain.from_iterable(self._states), chain.from_iterable(map(dict.values, self._states))
        if not (_agree(eq, names, self._names) and _agree(is_, entries, self._entries) and self._whereabouts.holds()):
            return None
        try:
            counts = [*map(Tensor.item, self._counters)]
        except RuntimeError:  # no longer one number
            return None
        are_counts = {*map(type, counts)} <= {int} and min(counts, default=0) >= 0
        return counts if are_counts else None  # type: ignore[return-value]

    def kinds(self, steps: Sequence[int]) -> dict[tuple[Any, int], Kind]:
        """Give the kinds of units after so many steps, by what tells them apart here."""
        return {
            (kind, taken): Kind(kind[0], taken + 1, *kind[1:])
            for kind, taken in {*zip(self._kinds, steps, strict=True)}
        }

    def add_to(self, update: Update, steps: Sequence[int], recipes: Mapping[Any, Recipe]) -> bool:
        """Put all members into an update, or none of them where a gradient has to be copied first.

        `recipes` has that of each of the `kinds`.
        """
        grads = [*map(_grad, self._owners)]
        if [*map(_dtype, grads)] != self._dtypes or not _agree(eq, map(Tensor.stride, grads), self._strides):
            return False
        if any(map(Tensor.is_neg, grads)) or any(map(Tensor._is_zerotensor, grads)):
            return False
        distinct = [*recipes.values()]
        of_units = [recipes[key] for key in zip(self._kinds, steps, strict=True)] if len(recipes) > 1 else None
        for batch, places, taken in self._batches:
            update.standing[batch] = Segments(places, taken(grads), taken(of_units) if of_units else distinct)
        for recipe in distinct:
            some = [i for i in self._closed if of_units[i] is recipe] if of_units else self._closed
            if not some:
                continue
            ms = [self._states[i]["exp_avg"] for i in some if "exp_avg" in self._states[i]]
            update.scale(recipe.coefficients, [self._xs[i] for i in some], [grads[i] for i in some], ms)
        update.counters += self._counters
        update.moved += self._owners
        return True


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


def _agree(compare: Callable[[Any, Any], bool], now: Iterable[Any], before: Iterable[Any]) -> bool:
    """Whether these are as many, and each compares with its own; no two of `now` need to be there at once."""
    return all(map(compare, chain(now, _END), chain(before, _END)))


_END = (object(),)


def _stands(unit: Unit) -> bool:
    """Whether a unit is known, moves where it lies, and has its steps counted by the host."""
    known = unit.known
    if known is None or known.capturable or unit.share is not None:
        return False
    return bool(unit.places) or (_is_closed(unit) and unit.owner.dtype == statistics_dtype(unit.owner))


def _is_closed(unit: Unit) -> bool:
    """Whether a unit's blocks, which lie in one parameter, keep nothing."""
    return unit.known is not None and "second_moment" not in unit.known.kept and not unit.spans


def _kind(unit: Unit) -> tuple[Any, ...]:
    """Tell a unit's `Kind`, without the step."""
    kept = unit.known.kept if unit.known is not None else ()
    return unit.index, statistics_dtype(unit.owner), max(unit.cut.sizes, default=1), tuple(kept)


def _by_batch(units: Sequence[Unit]) -> list[tuple[Batch, Places, Callable[[Sequence[Any]], Sequence[Any]]]]:
    """Find for each batch its places, and what takes the entry for each place out of a list over units."""
    placed: dict[Batch, list[tuple[int, Place]]] = {}
    for i, unit in enumerate(units):
        for place in unit.places or ():
            if place.num_blocks:
                placed.setdefault(place.batch, []).append((i, place))
    return [
        (batch, Places(place for _, place in pairs), _taken([i for i, _ in pairs])) for batch, pairs in placed.items()
    ]


def _taken(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Make what takes the entries at these positions out of a list."""
    return itemgetter(*positions) if len(positions) > 1 else lambda entries: [entries[i] for i in positions]
