"""Says what an optimizer keeps from step to step: names, shapes, and the one form in which a kernel is given them.

For each parameter `step` and, where there is a first moment, `exp_avg`. For the blocks of a unit, with its owner, `cut`
and the tensors of `WIDTHS`:

    by block   [num_blocks, width]      where a user may want to look, and in every checkpoint
    by tile    [num_blocks · width]     what only a kernel reads, while it is in memory: `basis`, `eigenvalues`

If blocks have several sizes, a tensor holds all of them end to end, sizes ascending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockadapt.kernels.layout import by_block, write_by_block_
from blockadapt.kernels.reflections import eigenvalues_length, reflections_length
from blockadapt.moments import packed_length, statistics_dtype
from blockadapt.optimizers.unit import COUNTS
from blockadapt.partition import Cut, Partition
from blockadapt.validation import Described, has_numbers, is_plain, refusal

State = dict[str, Any]

WIDTHS: dict[str, Callable[[int], int]] = {
    "second_moment": packed_length,
    "largest": lambda n: n,
    "basis": reflections_length,
    "eigenvalues": eigenvalues_length,
}
"""Numbers a block of n keeps in each of its state tensors."""

_TILED = ("basis", "eigenvalues")

Shape = tuple[int, ...]


LAST_STEP = 2**63 - 1
"""A counter is int64, so no step has a higher number."""


def block_state_names(amsgrad: bool, refresh_every: int) -> list[str]:
    """Name the state tensors that blocks keep under these options."""
    return ["second_moment"] + ["largest"] * amsgrad + ["basis", "eigenvalues"] * (refresh_every > 1)


def steps_taken(state: Mapping[str, Any]) -> int:
    """Count the steps taken so far; 0 for an empty state."""
    return int(state["step"]) if "step" in state else 0


# Shapes ------------------------------------------------------------------------------------------------------------


def _part_shapes(name: str, cut: Cut, tiled: bool) -> list[Shape]:
    shapes = [(count, WIDTHS[name](n)) for n, count in cut.parts]
    return [(math.prod(shape),) for shape in shapes] if tiled and name in _TILED else shapes  # type: ignore[return-value]


def _end_to_end(state: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """View parts of these shapes that lie end to end in a tensor."""
    flat = state.view(-1).split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


def state_shape(name: str, cut: Cut, tiled: bool = True) -> Shape:
    """Give the shape of a state tensor for all blocks of a cut: in memory, or, if not `tiled`, by block."""
    shapes = _part_shapes(name, cut, tiled)
    if len(cut.sizes) == 1:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return (sum(map(math.prod, shapes)),)


def shapes_of(shape: Shape, cut: Cut | None, tiled: bool = True) -> dict[str, Shape]:
    """List every entry that the state of a parameter may have; those of blocks only with a `cut`."""
    shapes: dict[str, Shape] = {"step": (), "exp_avg": shape}
    if cut is not None:
        shapes["cut"] = (len(cut.fingerprint),)
        shapes |= {name: state_shape(name, cut, tiled) for name in WIDTHS}
    return shapes


# One form ----------------------------------------------------------------------------------------------------------


def counter_device(param: Tensor, capturable: bool) -> torch.device:
    """Say where the steps of a parameter are counted: with it if a step may be captured, else on the host."""
    return param.device if capturable else torch.device("cpu")


def are_whole(counts: Tensor) -> bool:
    """Tell whether all numbers of a tensor are counts that int64 holds, and none is lost by a cast to it."""
    if counts.dtype == torch.uint64 and has_numbers(counts):
        return bool((counts.to(torch.int64) >= 0).all())  # 2⁶³ and more come out negative
    if not counts.is_floating_point() or not has_numbers(counts):
        return True
    return bool((counts.abs() < 2.0**63).all()) and counts.equal(counts.trunc())


def in_form(
    owner: str, whose: str, name: str, value: Any, shape: Shape, param: Tensor, capturable: bool = False
) -> Tensor:
    """Bring a state entry into the form that is expected: itself if it is so already, else a copy with its numbers.

    Statistics are contiguous, of the parameter's statistics dtype and on its device; counts are int64 on the CPU, that
    of steps on its `counter_device`.

    Raises:
        ValueError: It is no tensor of this shape, or not of real numbers, or a count that is not whole.
    """
    rule = f"a plain tensor of shape {shape} (in the state of {whose})"
    if not isinstance(value, Tensor) or not is_plain(value) or tuple(value.shape) != shape:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) and is_plain(value) else type(value).__name__
        raise ValueError(refusal(owner, name, rule, Described(found)))
    if value.is_complex() or value.dtype == torch.bool or value.is_quantized:
        raise ValueError(refusal(owner, name, f"of real numbers (in the state of {whose})", value.dtype))
    dtype, device = statistics_dtype(param), param.device
    if name in COUNTS:
        if not are_whole(value):
            raise ValueError(refusal(owner, name, f"of whole numbers (in the state of {whose})", value.tolist()))
        dtype, device = torch.int64, counter_device(param, capturable and name == "step")
    if not has_numbers(value) and has_numbers(param):
        raise ValueError(refusal(owner, name, f"one with numbers (in the state of {whose})", value.device))
    in_place = value.dtype == dtype and value.device == device and value.is_contiguous() and not value.is_neg()
    writable = not value.requires_grad and (torch.is_inference_mode_enabled() or not value.is_inference())
    if in_place and writable and torch._debug_has_internal_overlap(value) == 0:
        return value
    return value.detach().to(dtype=dtype, device=device, copy=True, memory_format=torch.contiguous_format).resolve_neg()


def all_in_form(
    owner: str,
    whose: str,
    entries: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    param: Tensor,
    cut: Cut,
    capturable: bool,
) -> State:
    """Return the state of a parameter, each entry `in_form`.

    Raises:
        ValueError: An entry is none that the optimizer keeps, does not fit, or is of blocks that were cut otherwise.
    """
    foreign = [name for name in entries if name not in shapes]
    if foreign:
        rule = f"a state with nothing but {', '.join(shapes)} (for {whose})"
        raise ValueError(refusal(owner, "state", rule, Described(", ".join(map(repr, foreign)))))
    state: State = {}
    for name in shapes:
        if name in entries:
            state[name] = in_form(owner, whose, name, entries[name], shapes[name], param, capturable)
            if name == "cut":
                _require_same_cut(owner, whose, state[name], cut)
    return state


def _require_same_cut(owner: str, whose: str, fingerprint: Tensor, cut: Cut) -> None:
    """Refuse a state whose blocks were cut otherwise than the options say now.

    Raises:
        ValueError: They were.
    """
    if has_numbers(fingerprint) and tuple(fingerprint.tolist()) != cut.fingerprint:
        rule = f"what cut the blocks of {whose} when their state was made (delete that state to begin anew)"
        raise ValueError(refusal(owner, "grouping", rule, Described(f"one that gives {cut}")))


# Parts for kernels -------------------------------------------------------------------------------------------------


def state_parts(name: str, cut: Cut, state: Tensor) -> list[Tensor]:
    """View a state tensor as a `Place` wants it, once for each part of the cut."""
    if isinstance(cut, Partition) and name not in _TILED:
        return cut.state_views(state)
    parts = _end_to_end(state, _part_shapes(name, cut, tiled=True))
    return parts if name in _TILED else [part.unsqueeze(1) for part in parts]


def part_states(cut: Cut, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Say for each part of a cut what its blocks keep, by name; None for what this state does not hold."""
    parts = {name: state_parts(name, cut, state[name]) if name in state else None for name in WIDTHS}
    return [{name: views[i] if views else None for name, views in parts.items()} for i in range(len(cut.parts))]


def state_rows(name: str, cut: Cut, state: Tensor) -> list[Tensor]:
    """Return a state tensor by block, [num_blocks, width] for each part; a copy where it lies otherwise."""
    parts = state_parts(name, cut, state)
    if name not in _TILED:
        return [part.flatten(0, 1) for part in parts]
    return [by_block(part, n, count) for part, (n, count) in zip(parts, cut.parts, strict=True)]


# Files -------------------------------------------------------------------------------------------------------------


def to_blocks(name: str, cut: Cut, state: Tensor) -> Tensor:
    """Bring a state tensor into the form that a checkpoint has."""
    if name not in _TILED:
        return state
    rows = state_rows(name, cut, state)
    if len(cut.sizes) != 1:
        return torch.cat([row.reshape(-1) for row in rows]) if rows else state
    numbered = state.new_empty(state_shape(name, cut, tiled=False))
    for here, row in zip(_block_views(cut, numbered), rows, strict=True):
        here.copy_(row.view(here.shape))
    return numbered


def from_blocks(name: str, cut: Cut, saved: Tensor) -> Tensor:
    """Undo `to_blocks`."""
    if name not in _TILED:
        return saved
    tiles = saved.new_zeros(state_shape(name, cut))
    rows: Sequence[Tensor]
    if len(cut.sizes) != 1:
        rows = _end_to_end(saved, _part_shapes(name, cut, tiled=False))
    else:
        rows = [view.flatten(0, -2) for view in _block_views(cut, saved)]
    for part, row, (n, _) in zip(state_parts(name, cut, tiles), rows, cut.parts, strict=True):
        write_by_block_(part, n, row)
    return tiles


def _block_views(cut: Cut, numbered: Tensor) -> list[Tensor]:
    """View the parts of a tensor [num_blocks, width] whose blocks are numbered as the partition numbers them."""
    return cut.state_views(numbered) if isinstance(cut, Partition) else [numbered]
