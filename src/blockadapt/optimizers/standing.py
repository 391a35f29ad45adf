"""Asks about and moves, all at once, the units of which nothing has changed since the last step.

With many small tensors a step spends its time on Python, not on blocks. So what a step asks of each of them alike is
asked here in a few passes over flat lists, each of which runs in C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, eq, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockadapt.kernels import Batch, Place
from blockadapt.kernels.segments import Places, Recipe, Segments
from blockadapt.moments import statistics_dtype
from blockadapt.optimizers.storage import LAST_STEP, State
from blockadapt.optimizers.unit import Unit
from blockadapt.optimizers.update import Update
from blockadapt.optimizers.whereabouts import Whereabouts, is_same_memory, shared

_grad, _form = attrgetter("grad"), attrgetter("dtype", "layout", "device")


class Kind(NamedTuple):
    """Holds what decides a unit's coefficients and whether its basis is due: equal for almost all units of a group.

    Attributes:
        group: The index of its param group.
        step: The number of the step to take.
        dtype: That of its statistics.
        n: Its largest block.
        kept: The names of what it keeps.
        processes: See `Unit`. They decide in which tally it counts.
    """

    group: int
    step: int
    dtype: torch.dtype
    n: int
    kept: tuple[str, ...]
    processes: Any


class Standing:
    """Keeps units as the last step left them: those that move where they lie, in flat lists, and the others.

    Args:
        units: All units of the last step.
        state: The optimizer's.

    Attributes:
        units: All of them.
        others: Those that have to be converted to be moved, or whose blocks span parameters.
        are_shared: Whether any of them has rows in other processes.
        first: The first of those in flat lists, for each param group and its processes.
    """

    def __init__(self, units: Sequence[Unit], state: Mapping[Tensor, State]) -> None:
        self.units = list(units)
        members = [unit for unit in units if _stands(unit) and type(state[unit.owner]) is dict]
        standing = {*members}
        self.others = [unit for unit in units if unit not in standing]
        self._kinds = shared(map(_kind, members))
        self.first = {(kind[0], kind[-1]): unit for kind, unit in reversed([*zip(self._kinds, members, strict=True)])}
        self._owners = [unit.owner for unit in members]
        self._moved = [unit.local(unit.owner) for unit in members]
        self._shares = [(i, unit.share, unit.owner) for i, unit in enumerate(members) if unit.share is not None]
        self.are_shared = any(unit.share is not None for unit in units)
        self._states = states = [state[owner] for owner in self._owners]
        self._names = [*chain.from_iterable(states)]
        self._entries = [*chain.from_iterable(map(dict.values, states))]
        self._held = [*state, *state.values(), *self._entries]
        self._identities = [*map(id, self._held)]
        self._counters = [held["step"].numpy() for held in states]  # they are read and set in a fraction of the time
        entries = [t for name, t in zip(self._names, self._entries, strict=True) if name != "cut"]
        self._whereabouts = Whereabouts([*self._moved, *entries])
        self._forms, self._sizes, self._strides = (
            shared(map(ask, self._moved)) for ask in (_form, Tensor.size, Tensor.stride)
        )
        self._batches = _by_batch(members)
        self._closed = [i for i, unit in enumerate(members) if _is_closed(unit)]
        self._xs = {i: self._moved[i].detach() for i in self._closed}
        counted = {i for i in self._closed if members[i].share is None}
        self._uncounted = [owner for i, owner in enumerate(self._owners) if i not in counted]

    def steps(self, state: Mapping[Tensor, State]) -> list[int] | None:
        """Count the steps that each has taken, if nothing of them has changed; else None."""
        entries = chain.from_iterable(map(dict.values, self._states))
        if [*map(id, chain(state, state.values(), entries))] != self._identities:
            return None
        if not all(is_same_memory(share.local(owner), self._moved[i]) for i, share, owner in self._shares):
            return None
        if [*chain.from_iterable(self._states)] != self._names or not self._whereabouts.holds():
            return None
        steps: list[int] = [*map(np.ndarray.item, self._counters)]
        return steps if min(steps, default=0) >= 0 and max(steps, default=0) < LAST_STEP else None

    def kinds(self, steps: Sequence[int]) -> dict[tuple[Any, int], Kind]:
        """Give the kinds of units that have taken these numbers of steps, by what tells them apart here."""
        return {
            (kind, taken): Kind(kind[0], taken + 1, *kind[1:])
            for kind, taken in {*zip(self._kinds, steps, strict=True)}
        }

    def gradients(self) -> list[Tensor] | None:
        """Give the gradient of each, if all can be read where they lie, as their parameters do; else None."""
        grads = [*map(_grad, self._owners)]
        for i, share, _ in self._shares:
            grads[i] = share.gradient(grads[i])
        if {*map(type, grads)} - {Tensor} or not all(map(eq, map(_form, grads), self._forms)):
            return None
        if not all(map(eq, map(Tensor.size, grads), self._sizes)):
            return None
        if not all(map(eq, map(Tensor.stride, grads), self._strides)):
            return None
        if any(map(Tensor.is_neg, grads)) or any(map(Tensor._is_zerotensor, grads)):
            return None
        return grads

    def add_to(
        self, update: Update, grads: Sequence[Tensor], steps: Sequence[int], recipes: Mapping[Any, Recipe]
    ) -> None:
        """Put all members into an update, with these gradients and the recipe of each of the `kinds`."""
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
        update.counted.append((self._counters, [taken + 1 for taken in steps]))
        update.moved += self._uncounted  # torch counts the versions of what it moves itself


def _stands(unit: Unit) -> bool:
    """Tell whether a unit is known, moves where its local part lies, and has its steps counted by the host."""
    known = unit.known
    if known is None or known.capturable:
        return False
    return bool(unit.places) or (_is_closed(unit) and unit.owner.dtype == statistics_dtype(unit.owner))


def _is_closed(unit: Unit) -> bool:
    """Tell whether the blocks of a unit of one parameter keep nothing."""
    return unit.known is not None and "second_moment" not in unit.known.kept and not unit.spans


def _kind(unit: Unit) -> tuple[Any, ...]:
    """Tell a unit's `Kind`, without the step."""
    kept = unit.known.kept if unit.known is not None else ()
    return unit.index, statistics_dtype(unit.owner), max(unit.cut.sizes, default=1), tuple(kept), unit.processes


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
