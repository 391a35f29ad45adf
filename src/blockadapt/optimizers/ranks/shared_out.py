"""Shares rows out among processes that have all parameters: each moves its own and sends them to the others, ZeRO-1.

Nothing is written into a parameter before the rows of all others have come.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockadapt.kernels.flops import block_flops
from blockadapt.optimizers.ranks.contract import Verdict, agreed
from blockadapt.optimizers.ranks.messages import Exchange
from blockadapt.optimizers.ranks.rows import RowShare
from blockadapt.optimizers.unit import Unit
from blockadapt.partition import Partition
from blockadapt.validation import has_numbers, require

BUCKET_BYTES = 25 * 2**20
"""Parameters that are given to the others in one message: DDP's figure, large enough that latency does not count."""


Copies = list[tuple[Tensor, Tensor]]
"""What is written, and what is read."""


def shares(units: Sequence[Unit], ranks: int, before: Sequence[Unit] = ()) -> list[list[int] | None]:
    """Give for each unit the first row of each rank and, at the end, the number of rows.

    Every unit is dealt out in grains, as many to each rank; those that are left over go to the ranks with the least to
    do so far. So ranks differ by less than one grain in arithmetic, and hold as much state and send as many bytes.
    None for what every rank moves for itself: scalars, and blocks that span parameters.

    Args:
        units: Those of all param groups, or of those whose cut may have changed.
        ranks: How many share them.
        before: All units as they were shared out last. What is cut as it was stays where its state lies.
    """
    owners = {unit.owner for unit in units}
    stood = {unit.owner: unit for unit in before}
    loads = [0] * ranks
    dealt: list[list[int] | None] = []
    for unit in [*(unit for unit in before if unit.owner not in owners), *units]:
        cut, last = unit.whole, stood.get(unit.owner)
        borders = None
        if isinstance(cut, Partition) and unit.owner.ndim:
            borders = [*_share(last).row_borders] if last is not None and last.whole == cut else _dealt(cut, loads)
            for rank, (first, end) in enumerate(pairwise(borders)):
                loads[rank] += -(-(end - first) // cut.grain) * _grain_flops(cut)
        dealt.append(borders)
    return dealt[len(dealt) - len(units) :]


def _dealt(cut: Partition, loads: Sequence[int]) -> list[int]:
    """Deal the grains of a unit out to ranks that have so much to do already."""
    each, rest = divmod(_grains(cut), len(loads))
    more = sorted(range(len(loads)), key=loads.__getitem__)[:rest]
    ends = accumulate((each + (rank in more)) * cut.grain for rank in range(len(loads)))
    return [0, *(min(cut.length, end) for end in ends)]


def _grains(cut: Partition) -> int:
    return -(-cut.length // cut.grain)


def _grain_flops(cut: Partition) -> int:
    return cut.num_blocks * block_flops(cut.n) // max(1, _grains(cut))


@dataclass(eq=False)
class _Bucket:
    """Holds units whose rows travel together.

    Attributes:
        units: The units, of one dtype and device.
        offsets: For each unit and rank where its rows begin in what that rank moves.
        moved: What each rank moves, [ranks, length]: this one in its row, and the others' rows come by message. It is
            as long on every rank, so that ranks with fewer rows send something more.
    """

    units: list[Unit]
    offsets: list[list[int]]
    moved: Tensor

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair rows of each parameter with where they come from, rank after rank.

        Yields:
            Some rows of a parameter, and the same rows as one of the ranks moves them.
        """
        for unit, starts in zip(self.units, self.offsets, strict=True):
            param = unit.owner.detach()
            for rank, (first, last) in enumerate(pairwise(_share(unit).row_borders)):
                yield param[first:last], _shaped(self.moved[rank], starts[rank], (last - first, *param.shape[1:]))


class SharedOut:
    """Moves this process's rows of all parameters, and sends them to the others.

    Every process has all parameters and gradients. Rows are moved in memory of their own, and written into the
    parameters only when those of all others have come. So parameters are as before if a process is lost. The state of
    the blocks that were moved here is not. That memory is kept from step to step: new memory is slow to write to for
    the first time, and there may be none left after the vote.

    Args:
        owner: Who asks, for messages.
        group: The processes.
    """

    def __init__(self, owner: str, group: Any) -> None:
        member = isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0
        require(member, owner, "process_group", "a process group that this process is in, or None", group)
        self._owner, self._group = owner, group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._device = torch.device("cpu")
        self._meshes: dict[str, Any] = {}
        self._key: list[Any] | None = None
        self._moved = 0
        self._buckets: list[_Bucket] = []
        self._alone: list[Unit] = []
        self._to_move: Copies = []
        self._to_write: Copies = []
        self._exchange: Exchange | None = None
        self._is_halfway = False

    def share_out(self, units: Sequence[Unit], before: Sequence[Unit]) -> None:
        """See `Ranks` and `shares`."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard

        self._device = units[0].owner.device if units else self._device
        for unit, borders in zip(units, shares(units, self._size, before), strict=True):
            if borders is None:
                unit.share = RowShare()
                continue
            whole = unit.cut
            assert isinstance(whole, Partition)
            unit.cut = whole.between(*borders[self._rank : self._rank + 2])
            blocks = [(whole.border(row) or 0) if whole.num_blocks else 0 for row in borders]
            kind = unit.owner.device.type
            mesh = self._meshes.get(kind) or self._meshes.setdefault(kind, DeviceMesh.from_group(self._group, kind))
            unit.share = RowShare(self._rank, borders, blocks, mesh, [Shard(0)])

    def warn(self) -> None:
        """Do nothing: every block is cut as in one process."""

    def buckets(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """See `Ranks`. Copies rows to where they are moved."""
        key = [(unit, [*map(_form, unit.params)]) for unit in units]
        if key != self._key:
            self._key = None  # there may be no memory for what follows
            self._lay_out(units)
            self._key = key
        _copy_(self._to_move)
        return [bucket.units for bucket in self._buckets] + [self._alone] * bool(self._alone)

    def _lay_out(self, units: Sequence[Unit]) -> None:
        """Give each unit its memory: in a bucket with others, or, if every rank moves all of it, of its own."""
        self._moved = zlib.crc32(repr([*map(_said, units)]).encode())
        self._alone = [unit for unit in units if _share(unit).rows is None]
        for unit in self._alone:
            _share(unit).slabs = {p: torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in unit.params}
        open_: dict[tuple[torch.dtype, torch.device], list[Unit]] = {}
        full: list[list[Unit]] = []
        for unit in [unit for unit in units if _share(unit).rows is not None]:
            kind = unit.owner.dtype, unit.owner.device
            together = open_.setdefault(kind, [])
            together.append(unit)
            if sum(other.owner.nbytes for other in together) >= BUCKET_BYTES:
                full.append(open_.pop(kind))
        self._buckets = [self._bucket(together) for together in [*full, *open_.values()]]
        self._to_move = [(slab, _rows(unit, param)) for unit in units for param, slab in _share(unit).slabs.items()]
        self._to_write = [pair for bucket in self._buckets for pair in bucket.pairs()]
        self._to_write += [
            (param.detach(), slab)
            for unit in self._alone
            for param, slab in _share(unit).slabs.items()
            if param.grad is not None
        ]

    def _bucket(self, units: list[Unit]) -> _Bucket:
        """Lay rows of these units one after another, in the same order on every rank."""
        ends = [0] * self._size
        offsets: list[list[int]] = []
        for unit in units:
            offsets.append(list(ends))
            borders, row = _share(unit).row_borders, unit.owner[:1].numel()
            for rank in range(self._size):
                ends[rank] += (borders[rank + 1] - borders[rank]) * row
        like = units[0].owner
        moved = torch.zeros(self._size, max(ends), dtype=like.dtype, device=like.device)
        for unit, starts in zip(units, offsets, strict=True):
            shape = unit.shape(unit.owner)
            _share(unit).slabs = {unit.owner: _shaped(moved[self._rank], starts[self._rank], shape)}
        return _Bucket(units, offsets, moved)

    def agree(self, verdict: Verdict) -> Verdict:
        """See `Ranks`. All must have gradients for the same units. If they go on, they expect each other's rows.

        Raises:
            RuntimeError: Another process was lost.
        """
        verdict = agreed(self._owner, verdict, {self._group: self._device}, self._moved)
        self._is_halfway = verdict is Verdict.GO
        if self._is_halfway:
            try:
                self._exchange = Exchange(self._group)
                for bucket in self._buckets:
                    self._exchange.expect(bucket.moved)
            except Exception as error:
                raise RuntimeError(self._lost()) from error
        return verdict

    def publish(self, bucket: int) -> None:
        """See `Ranks`. A bucket travels while the next one is moved.

        Raises:
            RuntimeError: Another process was lost.
        """
        if bucket >= len(self._buckets):
            return  # units that every rank moves for itself
        assert self._exchange is not None  # all have agreed
        try:
            self._exchange.send(self._buckets[bucket].moved)
        except Exception as error:
            raise RuntimeError(self._lost()) from error

    def finish_(self) -> None:
        """See `Ranks`.

        Raises:
            RuntimeError: Another process was lost.
        """
        assert self._exchange is not None  # all have agreed
        try:
            self._exchange.wait()
        except Exception as error:
            raise RuntimeError(self._lost()) from error
        _copy_(self._to_write)
        self._is_halfway = False

    def require_whole(self) -> None:
        """Refuse to go on after a step that all agreed on and that did not come to its end here.

        Raises:
            RuntimeError: There was such a step.
        """
        if self._is_halfway:
            raise RuntimeError(
                f"{self._owner}: the last step was interrupted or another process was lost in it, so that parameters "
                f"and state are not those of one step. Load a checkpoint."
            )

    def _lost(self) -> str:
        return (
            f"{self._owner}: another process was lost after all had agreed on a step; parameters here are as before "
            f"it, the state of the blocks may not be, here or elsewhere. Load a checkpoint."
        )


def _form(param: Tensor) -> tuple[Any, ...]:
    """Tell all of a parameter that decides where its rows lie, and whether they are moved."""
    address = param.data_ptr() if has_numbers(param) else None
    return param.dtype, param.device, param.stride(), address, param.grad is None


def _said(unit: Unit) -> tuple[Any, ...]:
    """Tell all of a unit that must be the same in every process: messages have the length that it gives them."""
    has_gradients = [param.grad is not None for param in unit.params]
    return unit.key, unit.name, unit.owner.dtype, unit.cut.fingerprint, [*_share(unit).row_borders], has_gradients


def _copy_(copies: Copies) -> None:
    """Copy all at once: a call for each would take longer than the copying, where parameters are small."""
    if copies:
        torch._foreach_copy_([there for there, _ in copies], [here for _, here in copies])


def _share(unit: Unit) -> RowShare:
    assert isinstance(unit.share, RowShare)
    return unit.share


def _rows(unit: Unit, param: Tensor) -> Tensor:
    rows = _share(unit).rows
    return param.detach() if rows is None else param.detach()[slice(*rows)]


def _shaped(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Give the numbers of `flat` from `start` on a shape."""
    return flat[start : start + math.prod(shape)].view(shape)
