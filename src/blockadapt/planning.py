"""Says before training what an optimizer will do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from blockadapt.kernels.flops import block_flops as block_flops
from blockadapt.moments import statistics_dtype
from blockadapt.optimizers import BlockAdam, BlockOptimizer
from blockadapt.optimizers.ranks import shares
from blockadapt.optimizers.storage import block_state_names, state_shape
from blockadapt.optimizers.unit import Unit
from blockadapt.parameter_groups import layer_of, param_groups
from blockadapt.partition import Cut, Partition
from blockadapt.validation import Described, require, require_integer

_TALL = 16
"""A matrix with this many times as many rows as columns has the shape of a vocabulary."""

_PLANNED = "a model, parameters, param groups or an optimizer of blockadapt"


@dataclass(frozen=True)
class PlanRow:
    """Says what happens to one parameter, or to a group of parameters whose blocks span them.

    Example:
        >>> plan(torch.nn.Linear(784, 10)).rows[0].sizes
        {10: 784}
    """

    name: str
    shape: tuple[int, ...]
    grouping: str
    sizes: dict[int, int]
    state_bytes: int
    flops: int
    rank_bytes: tuple[int, ...] = ()
    mixes: bool = False  # its blocks hold weights of several inputs or words, as only a plan of a model knows
    is_stack: bool = False  # it is no kernel of a convolution and is cut as one, as only a plan of a model knows

    @property
    def num_blocks(self) -> int:
        """Count the blocks in all."""
        return sum(self.sizes.values())

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        shape = "×".join(map(str, self.shape))
        state = _state(self.state_bytes, self.rank_bytes)
        return (self.name, shape, self.grouping, _sizes(self.sizes), *state, _count(self.flops))


@dataclass(frozen=True)
class Plan:
    """Says what an optimizer will do with each parameter; `str` gives a table, and `notes` what could be better.

    `flops` counts a step that solves every block; it is an estimate by `block_flops`. `rank_bytes` is the memory of
    the state on each rank, where several share the blocks out. Frozen parameters take no state and no time.

    Example:
        >>> plan(torch.nn.Linear(784, 10)).num_blocks
        785
    """

    rows: Sequence[PlanRow]
    num_parameters: int
    ranks: int = 1

    @property
    def num_blocks(self) -> int:
        """Count the blocks in all."""
        return sum(row.num_blocks for row in self.rows)

    @property
    def sizes(self) -> dict[int, int]:
        """Count the blocks of each size. A step makes one kernel call a size."""
        total: dict[int, int] = {}
        for row in self.rows:
            for n, count in row.sizes.items():
                total[n] = total.get(n, 0) + count
        return dict(sorted(total.items()))

    @property
    def state_bytes(self) -> int:
        """Count the bytes of the optimizer state."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Count the bytes of the optimizer state on each rank."""
        return tuple(sum(row.rank_bytes[rank] for row in self.rows) for rank in range(self.ranks))

    @property
    def flops(self) -> int:
        """Count the floating-point operations of a step."""
        return sum(row.flops for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """Say in sentences what could be cheaper, or may be cut along the wrong axis; none if nothing stands out."""
        return [*self._vocabulary(), *self._mixed(), *self._stacked()]

    def _vocabulary(self) -> list[str]:
        words = [row for row in self.rows if len(row.shape) == 2 and row.shape[0] >= _TALL * row.shape[1]]
        words = [row for row in words if max(row.sizes, default=1) > 1]
        flops, state = sum(row.flops for row in words), sum(row.state_bytes for row in words)
        if 2 * max(flops / max(self.flops, 1), state / max(self.state_bytes, 1)) <= 1:
            return []
        names = " and ".join(row.name for row in words)
        return [
            f"{names}: {flops / self.flops:.0%} of the arithmetic and {state / self.state_bytes:.0%} of the state. "
            f'For a vocabulary, param_groups(model, embeddings="diagonal") makes both small.'
        ]

    def _mixed(self) -> list[str]:
        mixed = [row.name for row in self.rows if row.mixes]
        sentence = "blocks mix input neurons or words. param_groups(model) keeps each block within one."
        return [f"{_first_of(mixed)}: {sentence}"] if mixed else []

    def _stacked(self) -> list[str]:
        stacks = [row.name for row in self.rows if row.is_stack]
        sentence = (
            "blocks run along the last axis. In experts stored as [experts, in, out] each lies within one input "
            "neuron, as in a Linear; in [experts, out, in] within one output neuron."
        )
        return [f"{_first_of(stacks)}: {sentence}"] if stacks else []

    def __str__(self) -> str:
        state = ("state", "largest rank") if self.ranks > 1 else ("state",)
        head = ("parameter", "shape", "grouping", "blocks", *state, "flops a step")
        table = [head, *(row.cells() for row in self.rows)]
        sums = (_sizes(self.sizes), *_state(self.state_bytes, self.rank_bytes), _count(self.flops))
        table.append(("total", f"{self.num_parameters:,}", "", *sums))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        rule = "─" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *self.notes])


def plan(model_or_params: nn.Module | Iterable[Any] | BlockOptimizer, *, ranks: int = 1, **options: Any) -> Plan:
    """Say what `BlockAdam` with these options will do: grouping, blocks, state and flops of each parameter.

    Args:
        model_or_params: A model, parameters, named parameters, param groups, or an optimizer of blockadapt.
        ranks: Processes that share the blocks out, as `process_group` does.
        **options: Options of `BlockAdam`. An optimizer has its own, and takes none here.

    Raises:
        TypeError: Options were given for an optimizer.

    Example:
        >>> print(plan(torch.nn.Linear(784, 10)))
        parameter  shape   grouping  blocks    state     flops a step
        ─────────────────────────────────────────────────────────────
        weight     10×784  input     784 × 10  203.9 kB  3.4 M
        bias       10      chunk     1 × 10    308 B     4.4 k
        ─────────────────────────────────────────────────────────────
        total      7,850             785 × 10  204.2 kB  3.4 M
    """
    if isinstance(model_or_params, BlockOptimizer):
        if options:
            raise TypeError(f"plan: an optimizer has its own options; leave out {', '.join(sorted(options))}.")
        optimizer = model_or_params
    else:
        params = model_or_params.named_parameters() if isinstance(model_or_params, nn.Module) else model_or_params
        known = isinstance(params, Iterable) and not isinstance(params, str)
        require(known, "plan", "model_or_params", _PLANNED, Described(type(params).__name__))
        groups = [dict(entry) if isinstance(entry, dict) else entry for entry in params]  # torch fills them in
        optimizer = BlockAdam(groups, **options)
    require_integer("plan", "ranks", ranks, least=1)
    units = optimizer.units()
    rows = [_row(optimizer, unit, borders) for unit, borders in zip(units, shares(units, ranks), strict=True)]
    mixing = {row.name for row in rows if row.grouping == "input" and max(row.sizes, default=1) > 1}
    model = model_or_params if isinstance(model_or_params, nn.Module) else nn.Module()
    mixing &= _cut_along_rows(model) if mixing else set()  # asks the model for its heads, which runs code of its own
    stacks = _stacks(model)
    rows = [
        replace(
            row,
            rank_bytes=row.rank_bytes or (row.state_bytes,) * ranks,
            mixes=row.name in mixing,
            is_stack=row.grouping == "filter" and row.name in stacks,
        )
        for row in rows
    ]
    return Plan(rows, sum(p.numel() for group in optimizer.param_groups for p in group["params"]), ranks)


def _cut_along_rows(model: nn.Module) -> set[str]:
    """Find the names of the weights that `param_groups` would cut along their rows: each is an input or a word."""
    groups = (group for group in param_groups(model) if group["grouping"] == "output")
    return {name for group in groups for name, _ in group["params"]}


def _stacks(model: nn.Module) -> set[str]:
    """Find the names of the stacks of matrices, such as experts: of three axes, and no kernels of a convolution."""
    modules = [
        (prefix, module)
        for prefix, module in model.named_modules()
        if not isinstance(layer_of(model, prefix, module), _ConvNd)
    ]
    named = ((prefix, name, p) for prefix, module in modules for name, p in module.named_parameters(recurse=False))
    return {f"{prefix}.{name}" if prefix else name for prefix, name, p in named if p.ndim == 3 and len(p) > 1}


def _row(optimizer: BlockOptimizer, unit: Unit, borders: Sequence[int] | None) -> PlanRow:
    params, cut = unit.params, unit.whole
    shape = (sum(p.numel() for p in params),) if unit.spans else tuple(unit.owner.shape)
    if not any(p.requires_grad or p.grad is not None for p in params):
        return PlanRow(unit.name, shape, "frozen", {}, 0, 0)
    flops = sum(count * block_flops(n) for n, count in cut.sizes.items())
    state_bytes = _state_bytes(optimizer, unit, cut, sum(p.numel() for p in params))
    on_each: list[int] = []
    if borders is not None and isinstance(cut, Partition):
        row, known = unit.owner[:1].numel(), dict[int, int]()  # ranks hold one number of rows or another
        for first, last in pairwise(borders):
            if last - first not in known:
                share = cut.between(first, last)
                known[last - first] = _state_bytes(optimizer, unit, share, (last - first) * row)
            on_each.append(known[last - first])
    return PlanRow(unit.name, shape, unit.grouping, cut.sizes, state_bytes, flops, tuple(on_each))


def _state_bytes(optimizer: BlockOptimizer, unit: Unit, cut: Cut, coordinates: int) -> int:
    """Count the bytes of the state that these coordinates and the blocks of this cut keep."""
    group = unit.group
    names = block_state_names(group.get("amsgrad", False), group["refresh_every"])
    averages = coordinates if optimizer.keeps_first_moment(group) else 0
    numbers = averages + sum(math.prod(state_shape(name, cut)) for name in names)
    counts = len(unit.params) + len(cut.fingerprint)  # a step counter each, and how the blocks are cut
    return numbers * statistics_dtype(unit.owner).itemsize + 8 * counts


def _first_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _state(total: int, on_each: Sequence[int]) -> tuple[str, ...]:
    """Return the state of all, and of the rank that has most of it, if there are several."""
    return (_bytes(total), _bytes(max(on_each))) if len(on_each) > 1 else (_bytes(total),)


def _sizes(sizes: dict[int, int]) -> str:
    return ", ".join(f"{count:,} × {n}" for n, count in sizes.items())


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != units[0] else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} {units[-1]}"


def _bytes(value: int) -> str:
    return _scaled(value, ("B", "kB", "MB", "GB")).strip()


def _count(value: int) -> str:
    return _scaled(value, ("", "k", "M", "G")).strip()
