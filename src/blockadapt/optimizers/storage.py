"""What blocks keep from step to step: names, shapes, and the part of each tensor that a kernel is given.

By block where a user may want to look, [num_blocks, width]; by tile, [tiles, width, TILE], what only a kernel reads. If
blocks have several sizes, a tensor holds all of them end to end, sizes ascending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from blockadapt.kernels.layout import by_block, tiled_shape
from blockadapt.moments import packed_length
from blockadapt.partition import IndexGroups, Partition

WIDTHS: dict[str, Callable[[int], int]] = {
    "second_moment": packed_length,
    "largest": lambda n: n,
    "basis": lambda n: n * n,
    "eigenvalues": lambda n: n,
}
"""Numbers a block of n keeps in each of its state tensors."""

_TILED = ("basis", "eigenvalues")


def block_state_names(amsgrad: bool, refresh_every: int) -> list[str]:
    """The state tensors that blocks keep under these options."""
    return ["second_moment"] + ["largest"] * amsgrad + ["basis", "eigenvalues"] * (refresh_every > 1)


def _segment_shapes(name: str, segments: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    width = WIDTHS[name]
    if name in _TILED:
        return [tiled_shape(n, count, width(n)) for n, count in segments]
    return [(count, width(n)) for n, count in segments]


def state_shape(name: str, cut: Partition | IndexGroups) -> tuple[int, ...]:
    """The shape of a state tensor for all blocks of a cut."""
    shapes = _segment_shapes(name, cut.segments)
    if len(cut.sizes) == 1:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return (sum(map(math.prod, shapes)),)


def state_parts(name: str, cut: Partition | IndexGroups, state: Tensor) -> list[Tensor]:
    """Views of a state tensor as a `Place` wants them, one for each segment."""
    if isinstance(cut, Partition) and name not in _TILED:
        return cut.state_views(state)
    shapes = _segment_shapes(name, cut.segments)
    pieces = state.view(-1).split([math.prod(shape) for shape in shapes])
    parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    return parts if name in _TILED else [part.unsqueeze(1) for part in parts]


def segment_states(cut: Partition | IndexGroups, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each segment what its blocks keep, by name; None for what this state does not hold."""
    parts = {name: state_parts(name, cut, state[name]) if name in state else None for name in WIDTHS}
    return [{name: views[i] if views else None for name, views in parts.items()} for i in range(len(cut.segments))]


def state_rows(name: str, cut: Partition | IndexGroups, state: Tensor) -> list[Tensor]:
    """A state tensor by block, [num_blocks, width] for each segment; a copy where it lies otherwise."""
    parts = state_parts(name, cut, state)
    if name not in _TILED:
        return [part.flatten(0, 1) for part in parts]
    return [by_block(part, count) for part, (_, count) in zip(parts, cut.segments, strict=True)]
