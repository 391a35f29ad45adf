"""Judges the options of a param group, and the parameters that it lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from blockadapt.moments import statistics_dtype, takes_numbers
from blockadapt.optimizers import checkpoint
from blockadapt.optimizers.ranks import are_sharded, is_flattened, is_sharded, require_placements
from blockadapt.optimizers.unit import Group, describe
from blockadapt.partition import require_grouping, spans
from blockadapt.spectrum import Estimate, SpectrumClip
from blockadapt.terms import term_of
from blockadapt.validation import (
    Described,
    is_on_host,
    is_plain,
    refusal,
    require,
    require_beta,
    require_bool,
    require_choice,
    require_integer,
    require_lr,
    require_number,
)

_SCHEDULERS_OWN = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
_NOT_OPTIONS = ("params", "param_names", "peak_lr", *_SCHEDULERS_OWN, "differentiable", checkpoint.FORMAT_KEY)
_FAMILY_OPTIONS = ("betas", "alpha", "beta1", "momentum", "beta1_decay", "amsgrad", "backend", "process_group")
"""Options that some optimizers of the family have in their param groups, and others do not."""


def require_listed_once(owner: str, param_group: Group) -> None:
    """Raise at a parameter that a new group lists twice: torch only warns."""
    params = param_group.get("params") if isinstance(param_group, dict) else None
    if isinstance(params, (Tensor, set)) or not isinstance(params, Iterable):
        return  # torch has its own words for these
    param_group["params"] = params = list(params)
    bare = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in params]
    _require_once(owner, [(f"entry {position}", param) for position, param in enumerate(bare)])


def require_lists(owner: str, groups: Iterable[Any]) -> None:
    """Raise unless every param group has a list of parameters; what that holds is looked at when it is cut.

    Raises:
        ValueError: One has none.
    """
    for index, group in enumerate(groups):
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, (list, tuple)):
            value = Described(f"{type(params).__name__} in group {index}")
            raise ValueError(refusal(owner, "params", "a list in every param group", value))


def require_params(owner: str, groups: Iterable[Group]) -> None:
    """Raise unless what these groups list are tensors, and no two of them the same."""
    places = [
        (f"entry {i} of group {index}", p) for index, group in enumerate(groups) for i, p in enumerate(group["params"])
    ]
    for where, param in places:
        value = Described(f"{type(param).__name__} as {where}")
        require(isinstance(param, Tensor), owner, "params", "tensors", value)
    _require_once(owner, places)


def _require_once(owner: str, places: Iterable[tuple[str, Any]]) -> None:
    """Raise at a parameter that is listed in a second place: its blocks would be moved twice."""
    listed: set[int] = set()
    for where, param in places:
        value = Described(f"{where} a second time")
        require(id(param) not in listed, owner, "params", "each parameter once", value)
        listed.add(id(param))


def require_lr_of(owner: str, group: Group) -> None:
    """Raise unless the lr of a group is one, and lies where a step can read it."""
    lr = group["lr"]
    require_lr(owner, lr)
    if isinstance(lr, Tensor) and not is_on_host(lr):
        beside = all(param.device.type == lr.device.type for param in group["params"])
        require(beside, owner, "lr", "on the host or with its group's parameters", Described(f"one on {lr.device}"))


def require_kept(owner: str, group: Group) -> None:
    """Raise unless what steps themselves keep in a group is theirs: they change it, so it is looked at each time."""
    require_integer(owner, "skipped_steps", group["skipped_steps"], least=0)
    if group["clip"] is not None and group["clip"].final_lr == "auto":
        Estimate.of(owner, group["estimate"])


def require_options(owner: str, defaults: Mapping[str, Any], group: Group) -> None:
    """Raise unless every option of this group is valid by itself, but for lr and what only some optimizers have.

    Raises:
        TypeError: A key is an option that only others of the family have, or a slip in an option's name.
    """
    for name in sorted({*defaults, "peak_lr"} - {"differentiable"}):
        require(name in group, owner, name, "an option of every param group", Described("a group without it"))
    for name in [name for name in group if name not in {*defaults, *_NOT_OPTIONS}]:
        # Other keys are the user's own; a slip in an option's name must not become one.
        nearest = difflib.get_close_matches(name, defaults, n=1, cutoff=0.8)
        if nearest or name in _FAMILY_OPTIONS:
            meant = f", did you mean `{nearest[0]}`?" if nearest and name not in _FAMILY_OPTIONS else "."
            raise TypeError(f"{owner}: `{name}` is not an option of a param group{meant}")
    require_number(owner, "eps", group["eps"], above=0)
    require_number(owner, "weight_decay", group["weight_decay"], least=0)
    require_lr(owner, group["peak_lr"], "peak_lr")
    clip = group["clip"]
    require(clip is None or isinstance(clip, SpectrumClip), owner, "clip", "a SpectrumClip or None", clip)
    given = clip is not None and clip.final_lr != "auto"
    rule = "> 0 where `clip` has a `final_lr`, because its bounds follow lr / peak_lr"
    peak_lr = term_of(group["peak_lr"]) if given else 1.0
    require(isinstance(peak_lr, Tensor) or peak_lr > 0, owner, "lr", rule, group["peak_lr"])
    Estimate.of(owner, group["estimate"])
    require_integer(owner, "refresh_every", group["refresh_every"], least=1)
    for name in ("amsgrad", "bias_correction", "maximize"):
        if name in defaults:
            require_bool(owner, name, group[name])
    if "momentum" in defaults and group["momentum"] is not None:
        require_beta(owner, "momentum", group["momentum"])
    if "beta1_decay" in defaults:
        require_number(owner, "beta1_decay", group["beta1_decay"], above=0, most=1)
    require_choice(owner, "on_nonfinite", group["on_nonfinite"], ("raise", "skip", "propagate"))
    require_bool(owner, "capturable", group["capturable"])


def require_capturable(owner: str, group: Group, process_group: Any) -> None:
    """Raise unless a step of this group is the same for the host each time."""
    where = "where `capturable` is True, because"
    every, on_nonfinite = group["refresh_every"], group["on_nonfinite"]
    require(every == 1, owner, "refresh_every", f"1 {where} a captured step is the same each time", every)
    rule = f"'propagate' {where} to look at gradients is to wait for the device"
    require(on_nonfinite == "propagate", owner, "on_nonfinite", rule, on_nonfinite)
    measures = group["clip"] is not None and group["clip"].final_lr == "auto"
    rule = f"one with a number for `final_lr` {where} to measure is to wait for the device"
    require(not measures, owner, "clip", rule, group["clip"])
    alone = process_group is None and not are_sharded(group["params"])
    rule = "False with a `process_group` or DTensors, because processes wait for each other"
    require(alone, owner, "capturable", rule, True)


def require_cut(owner: str, group: Group, process_group: Any) -> None:
    """Raise unless this group's parameters can be cut as its options say."""
    for position, param in enumerate(group["params"]):
        rule = "initialized, because blocks are cut from their shapes: let a lazy module see a batch first"
        require(not is_lazy(param), owner, "params", rule, Described(type(param).__name__))
        rule = "real floating-point tensors of 16 bits or more"
        require(takes_numbers(param), owner, "params", rule, param.dtype)
        nested = Described("a nested tensor") if param.is_nested else param.layout
        require(nested is torch.strided, owner, "params", "dense tensors", nested)
        rule = "whole, or sharded by `fully_shard` (FSDP2), because blocks are cut from a parameter's own shape"
        flat = Described("one that FullyShardedDataParallel (FSDP1) has flattened")
        require(not is_flattened(param), owner, "params", rule, flat)
        if is_sharded(param):
            _require_sharded(owner, group, position, process_group)
        else:
            require(is_plain(param), owner, "params", "plain tensors", Described(type(param).__name__))
    require_grouping(owner, group["grouping"], group["block_size"], group["params"])
    if spans(group["grouping"]):
        kinds = {(statistics_dtype(p), p.device) for p in group["params"]}
        rule = "on one device and of one precision where blocks span them"
        value = Described(" and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)))
        require(len(kinds) <= 1, owner, "params", rule, value)


def _require_sharded(owner: str, group: Group, position: int, process_group: Any) -> None:
    """Raise unless a DTensor can be cut where it is sharded."""
    require(process_group is None, owner, "params", "plain tensors with a `process_group`", Described("DTensor"))
    require_placements(owner, group["params"][position], describe(group, None, position))
    rule = "one that cuts each parameter by itself where parameters are DTensors"
    require(not spans(group["grouping"]), owner, "grouping", rule, group["grouping"])
