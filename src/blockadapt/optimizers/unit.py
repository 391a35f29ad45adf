"""Defines units, which keep blocks together: one parameter, or all parameters of a group whose blocks span them.

Everything that walks through an optimizer's blocks walks through its units: a step, a checkpoint, a plan, diagnostics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq, itemgetter
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from blockadapt.kernels import Place
from blockadapt.optimizers.whereabouts import Whereabouts, is_same_memory
from blockadapt.partition import Cut, IndexGroups, Partition, index_groups, partition, resolve, spans
from blockadapt.spectrum import SpectrumClip
from blockadapt.terms import Term

Group = dict[str, Any]

COUNTS = ("step", "cut")
"""Integers in the state: the steps taken, and the fingerprint of the cut that the blocks' state belongs to."""


class Known(NamedTuple):
    """Holds what a step has found in order, for every step asks whether it still is.

    Attributes:
        kept: The names of what a step needs to find there.
        capturable: Whether the steps are counted where the parameter lies.
        entries: Names and tensors of the state of each parameter.
        moved: What of its parameters is moved here.
        whereabouts: Of that, and of what else a step writes.
    """

    kept: Sequence[str]
    capturable: bool
    entries: Sequence[Mapping[str, Tensor]]
    moved: Sequence[Tensor]
    whereabouts: Whereabouts

    @classmethod
    def of(
        cls,
        kept: Sequence[str],
        capturable: bool,
        moved: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
    ) -> Known:
        """Note all of it as it is now."""
        written = [t for state in states for name, t in state.items() if name != "cut"]
        return cls(kept, capturable, [dict(state) for state in states], moved, Whereabouts([*moved, *written]))

    def holds(self, kept: Sequence[str], capturable: bool, states: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether nothing of it has changed."""
        if kept != self.kept or capturable is not self.capturable:
            return False
        for state, entries in zip(states, self.entries, strict=True):
            if len(state) != len(entries):
                return False
            for name, tensor in entries.items():
                if state.get(name) is not tensor:
                    return False
        return self.whereabouts.holds()


class Share(Protocol):
    """Says what of a unit lies in this process, where that is not simply all of it."""

    @property
    def rows(self) -> tuple[int, int] | None:
        """Name the rows [first, last) of its parameter's first axis; None for all of it."""
        ...

    @property
    def processes(self) -> Any:
        """Give the process group whose processes hold other rows; None if all rows lie here."""
        ...

    def local(self, param: Tensor) -> Tensor:
        """Return these rows of a parameter, in the memory where they are moved."""
        ...

    def gradient(self, grad: Tensor) -> Tensor:
        """Return these rows of its gradient."""
        ...

    def spread(self, name: str, local: Tensor) -> Tensor:
        """Make a state tensor of these rows, or of the blocks in them, a part of that of all processes."""
        ...

    def taken(self, name: str, spread: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Undo `spread`; also out of a plain tensor that holds all of it. `shape` is that of the result."""
        ...


@dataclass(eq=False)
class Unit:
    """Is one parameter, or all parameters of a param group whose blocks span them.

    Attributes:
        group: Its param group.
        index: The group's position in the optimizer.
        position: The owner's position in the group.
        params: Its parameters, the owner first.
        cut: Its blocks that lie in this process.
        share: What of it lies in this process; None if all of it does, in plain tensors.
        places: Where they lie, kept while nothing moves; None before the first step and where they are gathered.
        tables: Where explicit blocks have their coordinates, for each size, on the parameters' device; likewise.
        known: What `places` and all checks of the state depend on, as it was after the last step.
    """

    group: Group
    index: int
    position: int
    params: Sequence[Tensor]
    cut: Cut
    share: Share | None = None
    places: list[Place] | None = field(default=None, repr=False)
    tables: list[Tensor] | None = field(default=None, repr=False)
    known: Known | None = field(default=None, repr=False)

    @property
    def owner(self) -> Tensor:
        """Return the parameter that keeps the state of the blocks."""
        return self.params[0]

    @property
    def spans(self) -> bool:
        """Tell whether blocks may hold coordinates of several parameters."""
        return isinstance(self.cut, IndexGroups)

    @property
    def key(self) -> str:
        """Give group and position of the owner, as in "0.2"."""
        return f"{self.index}.{self.position}"

    @property
    def name(self) -> str:
        """Say what people call it: the parameter's name, or that of the first and the last."""
        names = dict(enumerate(self.group.get("param_names") or ()))  # what was put into the list later has none
        ends = dict.fromkeys([self.position, self.position + len(self.params) - 1])
        return " … ".join(names.get(i, f"{self.index}.{i}") for i in ends)

    @property
    def grouping(self) -> str:
        """Tell the grouping that it got: `"auto"` decided, and what has no name of its own called explicit."""
        grouping = self.group["grouping"]
        if isinstance(grouping, IndexGroups):
            return "explicit"
        return grouping if self.spans else resolve(grouping, self.owner.shape)

    @property
    def whole(self) -> Cut:
        """Return its blocks, wherever they lie."""
        return (isinstance(self.cut, Partition) and self.cut.whole) or self.cut

    @property
    def processes(self) -> Any:
        """Give the process group whose processes hold other rows of it; None if all rows lie here."""
        return None if self.share is None else self.share.processes

    def local(self, param: Tensor) -> Tensor:
        """Return what of a parameter is moved here, as a plain tensor."""
        return param if self.share is None else self.share.local(param)

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return its gradient, as a plain tensor."""
        grad = param.grad
        return grad if self.share is None or grad is None else self.share.gradient(grad)

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """Tell the shape of what lies here of a parameter."""
        rows = self.share.rows if self.share is not None else None
        return tuple(param.shape) if rows is None else (rows[1] - rows[0], *param.shape[1:])

    def is_moved(self) -> bool:
        """Tell whether any of its parameters has a gradient."""
        return self.owner.grad is not None or any(param.grad is not None for param in self.params[1:])

    def is_known(self, kept: Sequence[str], capturable: bool, states: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether all is as the last step left it."""
        if self.known is None or not self.known.holds(kept, capturable, states):
            return False
        if self.share is None:
            return True
        return all(map(is_same_memory, map(self.local, self.params), self.known.moved))

    def forget(self) -> None:
        """Let go of the places, and look at everything again: views keep the memory of what was freed."""
        self.places = self.tables = self.known = None


def units_of(group: Group, index: int) -> Iterator[Unit]:
    """Cut one param group into its units.

    Yields:
        Each unit, in the order of the parameters.
    """
    params = group["params"]
    spanning = params and spans(group["grouping"])
    together = [(0, tuple(params))] if spanning else [(i, (param,)) for i, param in enumerate(params)]
    for position, members in together:
        yield Unit(group, index, position, members, _cut(group, members))


def _cut(group: Group, params: Sequence[Tensor]) -> Cut:
    """Cut these parameters: all of them together where blocks may span them, else the only one."""
    if spans(group["grouping"]):
        return index_groups(group["grouping"], params)
    return partition(tuple(params[0].shape), group["grouping"], group["block_size"])


def is_closed(group: Group, step: Term) -> bool:
    """Tell whether the clip's interval has closed, so that blocks keep nothing. It cannot before α* is known.

    Under `capturable` it never does: the host does not know the step, and a captured step is the same each time.
    """
    clip: SpectrumClip | None = group["clip"]
    if clip is None or group["capturable"] or isinstance(step, Tensor):
        return False
    known = clip.final_lr != "auto" or group["estimate"][1] > 0
    return known and step > 0 and clip.is_closed(int(step))


def describe(group: Group, index: int | None, position: int) -> str:
    """Call a parameter as messages do; `index` is None where a group is not in an optimizer yet."""
    names = group.get("param_names") or ()
    if position < len(names):  # a parameter that was put into the list later has none
        return repr(names[position])
    where = "its group" if index is None else f"group {index}"
    return f"parameter {position} of {where} (shape {tuple(group['params'][position].shape)})"


class Units:
    """Makes the units of an optimizer once, and again for a group whose parameters or grouping have changed.

    Args:
        require_options: Raises unless a group's options are valid by themselves.
        require_cut: Raises unless a group's parameters can be cut as its options say.
        require_params: Raises unless what all groups list can be cut at all, and none of it twice.
        share_out: Says of units what of them lies in this process, given all units as they were last.
    """

    def __init__(
        self,
        require_options: Callable[[Group], None],
        require_cut: Callable[[Group], None],
        require_params: Callable[[Sequence[Group]], None],
        share_out: Callable[[Sequence[Unit], Sequence[Unit]], None],
    ) -> None:
        self._require_options = require_options
        self._require_cut = require_cut
        self._require_params = require_params
        self._share_out = share_out
        self._known: list[_Group] = []

    def of(self, groups: Sequence[Group]) -> list[Unit]:
        """Return all units, in the order of the param groups.

        Raises:
            ValueError: An option that was set since is not valid, or does not fit the group's parameters.
        """
        if len(groups) == len(self._known) and all(map(_Group.holds, self._known, groups)):
            return _units(self._known)
        before = [*self._known, *[_Group()] * len(groups)]
        known = [self._with_options(group, before[index]) for index, group in enumerate(groups)]
        others = [index for index, group in enumerate(groups) if not known[index].is_cut(group)]
        if others:
            self._require_params(groups)
            for index in others:
                known[index] = self._cut(index, groups[index], known[index])
            self._share_out(_units([known[index] for index in others]), _units(before))
        self._known = known
        return _units(known)

    def follow(self, last: Units) -> None:
        """Leave what is cut as it was in these where it lay. Nothing else of them is kept."""
        self._known = [_Group(units=group.units) for group in last._known]
        for unit in _units(self._known):
            unit.forget()

    def anew(self, groups: Sequence[Group]) -> list[Unit]:
        """Make the units that these groups would have in place of the present ones."""
        units = [unit for index, group in enumerate(groups) for unit in units_of(group, index)]
        self._share_out(units, _units(self._known))
        return units

    def _with_options(self, group: Group, known: _Group) -> _Group:
        if known.options is not None and known.options.hold(group):
            return known
        self._require_options(group)
        return known._replace(options=_Options.of(group))

    def _cut(self, index: int, group: Group, known: _Group) -> _Group:
        self._require_cut(group)
        units = list(units_of(group, index))
        return known._replace(cutting=_cutting(group), shapes=[param.shape for param in group["params"]], units=units)


class _Group(NamedTuple):
    """Remembers a group as it was when it was last looked at."""

    options: _Options | None = None
    cutting: list[Any] | None = None
    shapes: Sequence[tuple[int, ...]] = ()
    units: Sequence[Unit] = ()

    def holds(self, group: Group) -> bool:
        """Tell whether nothing has changed since of its options, nor of what decides how it is cut."""
        return self.options is not None and self.options.hold(group) and self.is_cut(group)

    def is_cut(self, group: Group) -> bool:
        """Tell whether all that decides how the group is cut is unchanged."""
        as_before = _are_equal(self.cutting, _cutting(group))
        return as_before and all(map(eq, map(Tensor.size, group["params"]), self.shapes))


def _units(groups: Sequence[_Group]) -> list[Unit]:
    return [unit for group in groups for unit in group.units]


class _Options(NamedTuple):
    """Remembers the options of a group that not each step looks at, with their types, for 1.0 is equal to 1."""

    names: list[str]
    of_group: Callable[[Group], tuple[Any, ...]]
    types: list[type]
    values: list[Any]

    @classmethod
    def of(cls, group: Group) -> _Options:
        """Note the options of a group; lists change in place, so theirs are copies."""
        of_group = itemgetter(*[name for name in group if name not in _APART])
        values = of_group(group)
        copies = [[*value] if isinstance(value, list) else value for value in values]
        return cls([*group], of_group, [*map(type, values)], copies)

    def hold(self, group: Group) -> bool:
        """Tell whether no option of the group has changed."""
        if [*group] != self.names:
            return False
        values = [*self.of_group(group)]
        return [*map(type, values)] == self.types and _are_equal(self.values, values)


_APART = ("params", "param_names", "lr", "skipped_steps", "estimate")


def _cutting(group: Group) -> list[Any]:
    """Tell all that decides how a group is cut, but for shapes.

    Parameters and the group count by identity, and units keep them alive.
    """
    size = group["block_size"]
    return [id(group), group["grouping"], type(size), size, [*map(id, group["params"])]]


def _are_equal(before: list[Any] | None, now: list[Any]) -> bool:
    try:
        return bool(before == now)
    except Exception:  # values that cannot be compared, such as arrays, count as changed
        return False
