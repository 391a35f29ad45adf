"""Every process has all parameters, moves its rows of them, and sends these to the others: ZeRO-1.

Nothing is written into a parameter before the rows of all others have come.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockadapt.kernels.flops import block_flops
from blockadapt.optimizers.ranks.contract import Verdict, agreed
from blockadapt.optimizers.ranks.messages import exchange
from blockadapt.optimizers.ranks.rows import RowShare
from blockadapt.optimizers.unit import Unit
from blockadapt.partition import Partition
from blockadapt.validation import require

BUCKET_BYTES = 25 * 2**20
"""Parameters that are given to the others in one message: DDP's figure, large enough that latency does not count."""


def shares(units: Sequence[Unit], ranks: int) -> list[list[int] | None]:
    """For each unit of a param group the first row of each rank and, at the end, the number of rows.

    Every unit is dealt out in grains, as many to each rank; those that are left over go to the ranks with the least to
    do so far. So ranks differ by less than one grain in arithmetic, and hold as much state and send as many bytes.
    None for what every rank moves for itself: scalars, and blocks that span parameters.
    """
    dealt: list[list[int] | None] = []
    loads = [0] * ranks
    for unit in units:
        cut = unit.whole
        if not isinstance(cut, Partition) or not unit.owner.ndim:
            dealt.append(None)
            continue
        grains = -(-cut.length // cut.grain)
        each, rest = divmod(grains, ranks)
        more = sorted(range(ranks), key=lambda rank: (loads[rank], (rank - unit.index) % ranks))[:rest]
        for rank in more:
            loads[rank] += cut.num_blocks * block_flops(cut.n) // grains
        borders, row = [0], 0
        for rank in range(ranks):
            row = min(cut.length, row + (each + (rank in more)) * cut.grain)
            borders.append(row)
        dealt.append(borders)
    return dealt


@dataclass(eq=False)
class _Bucket:
    """Units whose rows travel together.

    Attributes:
        units: The units, of one dtype and device.
        offsets: For each unit and rank where its rows begin in what that rank moves.
        sent: What this rank moves; as long on every rank, so that ranks with fewer rows send something more.
        received: What all other ranks send, [ranks, length], while it is under way.
        messages: Those under way.
    """

    units: list[Unit]
    offsets: list[list[int]]
    sent: Tensor
    received: Tensor | None = None
    messages: Sequence[Any] = ()


class SharedOut:
    """Moves this process's rows of all parameters, and sends them to the others.

    Every process has all parameters and gradients. Rows are moved in memory of their own, and written into the
    parameters only when those of all others have come. So parameters are as before if a process is lost. The state of
    the blocks that were moved here is not.

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
        self._key: list[tuple[Unit, object]] = []
        self._buckets: list[_Bucket] = []
        self._alone: list[Unit] = []
        self._is_lost = False

    def share_out(self, units: Sequence[Unit]) -> None:
        """See `Ranks` and `shares`."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard

        for unit, borders in zip(units, shares(units, self._size), strict=True):
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
        key: list[tuple[Unit, object]] = [
            (unit, [(p.dtype, p.device, p.grad is None) for p in unit.params]) for unit in units
        ]
        if key != self._key:
            self._lay_out(units)
            self._key = key
        for unit in units:
            for param, slab in _share(unit).slabs.items():
                slab.copy_(_rows(unit, param))
        return [bucket.units for bucket in self._buckets] + [self._alone] * bool(self._alone)

    def _lay_out(self, units: Sequence[Unit]) -> None:
        """Give each unit its memory: in a bucket with others, or, if every rank moves all of it, of its own."""
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
        self._device = units[0].owner.device if units else self._device

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
        sent = torch.zeros(max(ends), dtype=like.dtype, device=like.device)
        for unit, starts in zip(units, offsets, strict=True):
            shape = unit.shape(unit.owner)
            _share(unit).slabs = {unit.owner: _piece(sent, starts[self._rank], shape)}
        return _Bucket(units, offsets, sent)

    def agree(self, verdict: Verdict) -> Verdict:
        """See `Ranks`. All must have gradients for the same units."""
        moved = zlib.crc32(" ".join(unit.key for unit, _ in self._key).encode())
        return agreed(self._owner, verdict, {self._group: self._device}, moved)

    def publish(self, bucket: int) -> None:
        """See `Ranks`. A bucket travels while the next one is moved.

        Raises:
            RuntimeError: Another process was lost.
        """
        if bucket >= len(self._buckets):
            return  # units that every rank moves for itself
        one = self._buckets[bucket]
        self._is_lost = True
        one.received = one.sent.new_empty(self._size, len(one.sent))
        try:
            one.messages = exchange(one.received, one.sent, self._group)
        except Exception as error:
            raise RuntimeError(self._lost()) from error

    def finish_(self) -> None:
        """See `Ranks`.

        Raises:
            RuntimeError: Another process was lost.
        """
        try:
            for bucket in self._buckets:
                for message in bucket.messages:
                    message.wait()
        except Exception as error:
            raise RuntimeError(self._lost()) from error
        for bucket in self._buckets:
            for unit, starts in zip(bucket.units, bucket.offsets, strict=True):
                for rank, (first, last) in enumerate(pairwise(_share(unit).row_borders)):
                    if last > first and bucket.received is not None:
                        shape = (last - first, *unit.owner.shape[1:])
                        moved = bucket.sent if rank == self._rank else bucket.received[rank]
                        unit.owner[first:last] = _piece(moved, starts[rank], shape)
            bucket.received, bucket.messages = None, ()
        for unit in self._alone:
            for param, slab in _share(unit).slabs.items():
                if param.grad is not None:
                    param.copy_(slab)
        self._is_lost = False

    def require_whole(self) -> None:
        """Refuse to go on after a step that was moved here and lost on its way.

        Raises:
            RuntimeError: There was such a step.
        """
        if self._is_lost:
            raise RuntimeError(self._lost())

    def _lost(self) -> str:
        return (
            f"{self._owner}: another process was lost in a step; parameters are as before it, the state of the blocks "
            f"here is not. Load a checkpoint."
        )


def _share(unit: Unit) -> RowShare:
    assert isinstance(unit.share, RowShare)
    return unit.share


def _rows(unit: Unit, param: Tensor) -> Tensor:
    rows = _share(unit).rows
    return param.detach() if rows is None else param.detach()[slice(*rows)]


def _piece(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    return flat[start : start + math.prod(shape)].view(shape)
