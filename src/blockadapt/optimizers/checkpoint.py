"""Writes states out and takes them back: as plain data, by block, in full precision, and only if they fit."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from blockadapt.optimizers.storage import (
    WIDTHS,
    State,
    all_in_form,
    from_blocks,
    shapes_of,
    steps_taken,
    to_blocks,
)
from blockadapt.optimizers.unit import COUNTS, Group, Unit, is_closed
from blockadapt.partition import IndexGroups
from blockadapt.spectrum import SpectrumClip
from blockadapt.validation import Described, refusal

FORMAT = 2
"""The layout of a saved state."""

FORMAT_KEY = "blockadapt_format"
"""Where it stands: in every param group, because some tools keep nothing else, and only what they find there before."""


class Loads(Protocol):
    """Names what an optimizer must have so that a state can be loaded into it."""

    param_groups: list[Group]
    defaults: dict[str, Any]
    averages_gradient: ClassVar[bool]

    def keeps_first_moment(self, group: Group) -> bool:
        """Tell whether a group has a first moment."""

    def require_group(self, group: Group) -> None:
        """Raise unless a group's options are valid and fit its parameters."""

    def units_of(self, groups: Sequence[Group]) -> Sequence[Unit]:
        """Make the units of groups with these options."""


# Out ---------------------------------------------------------------------------------------------------------------


def written(owner: str, state_dict: dict[str, Any], units: Sequence[Unit]) -> dict[str, Any]:
    """Turn the state dict of torch's base class into one with plain options, and all that blocks keep by block."""
    state = dict(state_dict["state"])
    for unit in units:
        keys = state_dict["param_groups"][unit.index]["params"][unit.position : unit.position + len(unit.params)]
        if any(name in state.get(keys[0], {}) for name in WIDTHS):
            shapes = shapes_of(unit.shape(unit.owner), unit.cut)
            kept = all_in_form(
                owner, repr(unit.name), state[keys[0]], shapes, unit.owner, unit.cut, unit.group["capturable"]
            )
            state[keys[0]] = {name: to_blocks(name, unit.cut, t) if name in WIDTHS else t for name, t in kept.items()}
        if unit.share is not None:
            for key in [key for key in keys if key in state]:
                state[key] = {
                    name: value if name in COUNTS else unit.share.spread(name, value)
                    for name, value in state[key].items()
                }
    return {**state_dict, "state": state, "param_groups": [_plain(group) for group in state_dict["param_groups"]]}


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group with options that are numbers, strings, lists and dicts only."""
    group = dict(group)
    if isinstance(group["clip"], SpectrumClip):
        group["clip"] = asdict(group["clip"])
    if isinstance(group["grouping"], IndexGroups):
        group["grouping"] = [list(block) for block in group["grouping"].groups]
    return {**{name: _plain_number(value) for name, value in group.items()}, FORMAT_KEY: FORMAT}


def _plain_number(value: Any) -> Any:
    """Return Python's own number for any other, such as NumPy's or a fraction, also in a pair."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain_number, value))
    if type(value) in (bool, int, float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


# In ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shielded:
    """Carries a tensor past `Optimizer.load_state_dict`, which would cast it to the parameter's dtype."""

    tensor: Tensor


def unshield_(state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Take the tensors out again, in place."""
    for entries in state.values():
        for key, value in entries.items():
            if isinstance(value, _Shielded):
                entries[key] = value.tensor


def fitted(owner: str, optimizer: Loads, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Make a state dict ready for this optimizer: options restored, tensors copied to where they are used.

    Raises:
        ValueError: It does not fit, with the reason.
    """
    try:
        return _fitted(owner, optimizer, state_dict)
    except Exception as error:  # whatever damage does: files hold anything
        if isinstance(error, ValueError) and str(error).startswith(owner):
            raise
        found = Described(f"one with damage, at which {type(error).__name__} said: {error}".rstrip("."))
        raise ValueError(refusal(owner, "state_dict", "an optimizer's", found)) from error


def require_mapping(owner: str, state_dict: Any) -> None:
    """Raise at what can be no state dict, whatever hooks make of it.

    Raises:
        ValueError: It is no mapping.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(refusal(owner, "state_dict", _STATE_DICT, Described(f"one with {type(state_dict).__name__}")))


_STATE_DICT = "an optimizer's, with 'state' and 'param_groups'"


def _fitted(owner: str, optimizer: Loads, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    require_mapping(owner, state_dict)
    if not {"state", "param_groups"} <= {*state_dict}:
        found = sorted(map(str, state_dict))
        raise ValueError(refusal(owner, "state_dict", _STATE_DICT, Described(f"one with {found}")))
    saved_groups = [_restored(owner, group) for group in state_dict["param_groups"]]
    _require_same_groups(owner, optimizer, saved_groups)
    state = dict(state_dict["state"])
    listed = {key for saved in saved_groups for key in saved["params"]}
    foreign = [key for key in state if key not in listed]
    if foreign:
        raise ValueError(refusal(owner, "state", "that of the saved parameters", Described(f"one of {foreign[0]!r}")))
    pairs = zip(optimizer.param_groups, saved_groups, strict=True)
    present = [{**saved, "params": group["params"]} for group, saved in pairs]
    try:
        for group in present:
            optimizer.require_group(group)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: the saved options do not fit this model. {error}") from None
    for unit in optimizer.units_of(present):
        keys = saved_groups[unit.index]["params"][unit.position : unit.position + len(unit.params)]
        absent = [key for key in keys if key not in state]
        if 0 < len(absent) < len(keys):
            raise ValueError(f"{owner}: parameter {absent[0]} has no state, and shares blocks with others that have.")
        if not absent:
            for key, param in zip(keys, unit.params, strict=True):
                entries = _entries(owner, f"parameter {key}", optimizer, unit, param, state[key])
                state[key] = {name: _Shielded(tensor) for name, tensor in entries.items()}
    return {**state_dict, "param_groups": saved_groups, "state": state}


def _restored(owner: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group with its options as they were.

    Raises:
        ValueError: It has no format, or one that this version does not read.
    """
    group = dict(group)
    found = group.get(FORMAT_KEY)
    if found != FORMAT:
        rule = f"of format {FORMAT}, which this version reads"
        what = "one without a format; another optimizer or an older version wrote it" if found is None else repr(found)
        raise ValueError(refusal(owner, "state_dict", rule, Described(what)))
    if isinstance(group.get("clip"), dict):
        group["clip"] = SpectrumClip(**group["clip"])
    if isinstance(group.get("grouping"), list):
        group["grouping"] = IndexGroups(group["grouping"])
    return group


def _require_same_groups(owner: str, optimizer: Loads, saved_groups: list[dict[str, Any]]) -> None:
    counts = [len(group["params"]) for group in optimizer.param_groups]
    saved_counts = [len(group["params"]) for group in saved_groups]
    if counts != saved_counts:
        raise ValueError(
            f"{owner}: the state has groups of {saved_counts} parameters, the optimizer has groups of {counts}."
        )
    for index, saved in enumerate(saved_groups):
        missing = sorted({*optimizer.defaults, "peak_lr"} - {*saved} - {"differentiable"})
        if missing:
            raise ValueError(
                f"{owner}: param group {index} of the state has no {', '.join(f'`{name}`' for name in missing)}; "
                f"another optimizer or version wrote it."
            )


def _entries(
    owner: str,
    whose: str,
    optimizer: Loads,
    unit: Unit,
    param: Tensor,
    saved: Any,
) -> State:
    """Return the state of one parameter, each entry checked against what it must be, copied and in the form of memory.

    What an option that was switched on since the last step would add may be missing, and what one that was switched
    off no longer needs may be there: the next step sees to it.

    Raises:
        ValueError: The state is no dict of tensors, misses an entry, or has one that does not fit.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(refusal(owner, "state", f"a dict of tensors (for {whose})", Described(type(saved).__name__)))
    cut = unit.cut if param is unit.owner else None
    shapes = shapes_of(unit.shape(param), cut, tiled=False)
    if unit.share is not None:
        saved = {
            name: unit.share.taken(name, value, shapes[name]) if name in {*shapes} - {*COUNTS} else value
            for name, value in saved.items()
        }
    if not optimizer.keeps_first_moment(unit.group):
        del shapes["exp_avg"]
    entries = all_in_form(owner, whose, saved, shapes, param, unit.cut, unit.group["capturable"])
    blocks = cut is not None and not is_closed(unit.group, steps_taken(entries))
    needed = ["step"] + ["exp_avg"] * optimizer.averages_gradient + ["cut", "second_moment"] * blocks
    absent = [name for name in needed if name not in entries]
    if absent:
        rule = f"a state with {', '.join(needed)} (for {whose})"
        raise ValueError(refusal(owner, "state", rule, Described(f"one without {', '.join(map(repr, absent))}")))
    if int(entries["step"]) < 0:
        raise ValueError(refusal(owner, "step", f"a count of steps (in the state of {whose})", int(entries["step"])))
    if cut is not None:
        entries = {name: from_blocks(name, cut, t) if name in WIDTHS else t for name, t in entries.items()}
    return {name: tensor.clone() if tensor is saved[name] else tensor for name, tensor in entries.items()}
