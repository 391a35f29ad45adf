"""Units: what keeps its blocks together, one parameter, or all parameters of a group whose blocks span them.

Everything that walks through an optimizer's blocks walks through its units: a step, a checkpoint, a plan, diagnostics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from blockadapt.kernels import Place
from blockadapt.partition import Cut, IndexGroups, index_groups, partition, resolve
from blockadapt.spectrum import SpectrumClip

Group = dict[str, Any]


@dataclass(eq=False)
class Unit:
    """One parameter, or all parameters of a param group whose blocks span them.

    Attributes:
        group: Its param group.
        index: The group's position in the optimizer.
        position: The owner's position in the group.
        params: Its parameters, the owner first.
        cut: Its blocks.
        places: Where they lie, kept while nothing moves; None before the first step and where they are gathered.
        known: What `places` depends on, as it was when they were made.
    """

    group: Group
    index: int
    position: int
    params: Sequence[Tensor]
    cut: Cut
    places: list[Place] | None = field(default=None, repr=False)
    known: object = field(default=None, repr=False)

    @property
    def owner(self) -> Tensor:
        """The parameter that keeps the state of the blocks."""
        return self.params[0]

    @property
    def spans(self) -> bool:
        """Whether blocks may hold coordinates of several parameters."""
        return isinstance(self.cut, IndexGroups)

    @property
    def key(self) -> str:
        """Group and position of the owner, as in "0.2"."""
        return f"{self.index}.{self.position}"

    @property
    def name(self) -> str:
        """What people call it: the parameter's name, or that of the first and the last."""
        names = self.group.get("param_names") or [f"{self.index}.{i}" for i in range(len(self.group["params"]))]
        last = self.position + len(self.params) - 1
        return names[self.position] if last == self.position else f"{names[self.position]} … {names[last]}"

    @property
    def grouping(self) -> str:
        """The grouping that it got: `"auto"` decided, and what has no name of its own called explicit."""
        grouping = self.group["grouping"]
        if isinstance(grouping, IndexGroups):
            return "explicit"
        return grouping if self.spans else resolve(grouping, self.owner.shape)

    def is_moved(self) -> bool:
        """Whether any of it has a gradient."""
        return any(param.grad is not None for param in self.params)

    def forget_places(self) -> None:
        """Let go of the places: views keep the memory of what was freed."""
        self.places = self.known = None


def units_of(group: Group, index: int) -> Iterator[Unit]:
    """The units of one param group."""
    params = group["params"]
    spanning = index_groups(group["grouping"], params)
    if spanning is not None:
        if params:
            yield Unit(group, index, 0, tuple(params), spanning)
        return
    for position, param in enumerate(params):
        cut = partition(tuple(param.shape), group["grouping"], group["block_size"])
        yield Unit(group, index, position, (param,), cut)


def is_closed(group: Group, step: int) -> bool:
    """Whether the clip's interval has closed, so that blocks keep nothing."""
    clip: SpectrumClip | None = group["clip"]
    return clip is not None and clip.is_closed(step)


def describe(group: Group, index: int, position: int) -> str:
    """A parameter as messages call it."""
    if "param_names" in group:
        return repr(group["param_names"][position])
    return f"parameter {position} of group {index} (shape {tuple(group['params'][position].shape)})"


class Units:
    """The units of an optimizer, made once, and made again for a group whose parameters or grouping have changed.

    Args:
        require_options: Raises unless a group's options are valid by themselves.
        require_cut: Raises unless a group's parameters can be cut as its options say.
    """

    def __init__(self, require_options: Callable[[Group], None], require_cut: Callable[[Group], None]) -> None:
        self._require_options = require_options
        self._require_cut = require_cut
        self._known: list[_Known] = []

    def of(self, groups: Sequence[Group]) -> list[Unit]:
        """All units, in the order of the param groups.

        Raises:
            ValueError: An option that was set since is not valid, or does not fit the group's parameters.
        """
        before = [*self._known, *[_Known()] * len(groups)]
        self._known = [self._group(index, group, before[index]) for index, group in enumerate(groups)]
        return [unit for known in self._known for unit in known.units]

    def _group(self, index: int, group: Group, known: _Known) -> _Known:
        options, cutting = _options(group), _cutting(group)
        if not _are_equal(known.options, options):
            self._require_options(group)
        units = known.units
        if not _are_equal(known.cutting, cutting):
            self._require_cut(group)
            units = list(units_of(group, index))
        return _Known(options, cutting, units)


class _Known(NamedTuple):
    """A group as it was when it was last looked at."""

    options: list[Any] | None = None
    cutting: list[Any] | None = None
    units: Sequence[Unit] = ()


def _options(group: Group) -> list[Any]:
    """Every option but lr, which is looked at in each step; in a container of its own, for lists change in place."""
    return [list(value) if isinstance(value, list) else value for name, value in group.items() if name not in _APART]


_APART = ("params", "param_names", "lr", "skipped_steps")


def _cutting(group: Group) -> list[Any]:
    """All that decides how a group is cut. Parameters and the group count by identity, and units keep them alive."""
    params = group["params"]
    return [id(group), group["grouping"], group["block_size"], [*map(id, params)], [param.shape for param in params]]


def _are_equal(before: list[Any] | None, now: list[Any]) -> bool:
    try:
        return bool(before == now)
    except Exception:  # values that cannot be compared, such as arrays, count as changed
        return False
