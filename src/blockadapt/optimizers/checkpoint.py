"""States that leave and come back: as plain data, in full precision, and only if they fit."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockadapt.moments import statistics_dtype
from blockadapt.partition import IndexGroups, index_groups
from blockadapt.spectrum import SpectrumClip

if TYPE_CHECKING:
    from blockadapt.optimizers.base import BlockOptimizer


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group whose options are numbers, strings, lists and dicts only."""
    group = dict(group)
    if isinstance(group["clip"], SpectrumClip):
        group["clip"] = asdict(group["clip"])
    if isinstance(group["grouping"], IndexGroups):
        group["grouping"] = [list(block) for block in group["grouping"].groups]
    return {name: _plain_number(value) for name, value in group.items()}


def _plain_number(value: Any) -> Any:
    """Python's own number for NumPy's, also in a pair."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain_number, value))
    return value.item() if isinstance(value, numbers.Real) and hasattr(value, "item") else value


def _restored(group: Mapping[str, Any]) -> dict[str, Any]:
    group = dict(group)
    if isinstance(group.get("clip"), dict):
        group["clip"] = SpectrumClip(**group["clip"])
    if isinstance(group.get("grouping"), list):
        group["grouping"] = IndexGroups(group["grouping"])
    return group


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


def fitted(optimizer: BlockOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict made ready for this optimizer: options restored, tensors copied to where they are used.

    Raises:
        ValueError: It does not fit, with the reason.
    """
    owner = f"{type(optimizer).__name__}.load_state_dict"
    if not {"state", "param_groups"} <= {*state_dict}:
        raise ValueError(
            f"{owner}: `state_dict` must be an optimizer's, with 'state' and 'param_groups', "
            f"got one with {sorted(map(str, state_dict))}."
        )
    saved_groups = [_restored(group) for group in state_dict["param_groups"]]
    _require_same_groups(owner, optimizer, saved_groups)
    state = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        try:
            optimizer._require_group({**saved, "params": group["params"]})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{owner}: the saved options do not fit this model. {error}") from None
        expected = optimizer._expected_state(saved, group["params"], [state.get(key) for key in saved["params"]])
        absent = [key for key in saved["params"] if key not in state]
        if index_groups(saved["grouping"], group["params"]) and 0 < len(absent) < len(saved["params"]):
            raise ValueError(f"{owner}: parameter {absent[0]} has no state, and shares blocks with others that have.")
        for key, param, shapes in zip(saved["params"], group["params"], expected, strict=True):
            if key in state:
                state[key] = dict(_entries(owner, key, param, state[key], shapes))
    return {**state_dict, "param_groups": saved_groups, "state": state}


def _require_same_groups(owner: str, optimizer: BlockOptimizer, saved_groups: list[dict[str, Any]]) -> None:
    counts = [len(group["params"]) for group in optimizer.param_groups]
    saved_counts = [len(group["params"]) for group in saved_groups]
    if counts != saved_counts:
        raise ValueError(
            f"{owner}: the state has groups of {saved_counts} parameters, the optimizer has groups of {counts}."
        )
    for index, saved in enumerate(saved_groups):
        missing = sorted({*optimizer.defaults, "base_lr"} - {*saved} - {"differentiable"})
        if missing:
            raise ValueError(
                f"{owner}: param group {index} of the state has no {', '.join(f'`{name}`' for name in missing)}; "
                f"another optimizer or version wrote it."
            )


def _entries(
    owner: str, key: Any, param: Tensor, entries: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Any]]:
    """Each state tensor, checked against the shape it must have, copied to the statistics' dtype and device."""
    if {*entries} != {*shapes}:
        raise ValueError(
            f"{owner}: the state of parameter {key} has {sorted(entries)}, where {sorted(shapes)} is needed."
        )
    for name, value in entries.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != shapes[name]:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{owner}: `{name}` of parameter {key} must have shape {shapes[name]} for a parameter of shape "
                f"{tuple(param.shape)}, got {found}."
            )
        if name == "step":
            yield name, _Shielded(value.detach().to(dtype=torch.int64, device="cpu", copy=True))
        else:
            yield name, _Shielded(value.detach().to(dtype=statistics_dtype(param), device=param.device, copy=True))
