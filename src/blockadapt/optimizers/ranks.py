"""Who holds which rows of which parameters: the seam between one process and many.

    OwnShards    every process moves what lies in it: all of a plain parameter, its own rows of a DTensor (FSDP2)
    SharedOut    every process has all parameters; each moves its rows of them, and gives them to the others (ZeRO-1)

Both hand a step plain tensors: rows [first, last) of a parameter, its gradient and its first moment, and the blocks in
these rows. Nothing is written before all processes have agreed that all of them can.
"""

from __future__ import annotations

import math
import sys
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from blockadapt.errors import NonFiniteGradientError
from blockadapt.optimizers.unit import Unit, describe
from blockadapt.partition import Partition, block_flops
from blockadapt.validation import Described, refusal, require

BUCKET_BYTES = 25 * 2**20
"""Parameters that are given to the others in one message: DDP's figure, large enough that latency does not count."""

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its new name, and the old one

Rows = tuple[int, int]


class Verdict(IntEnum):
    """What a process has to say of a step; the gravest one counts for all."""

    GO = 0
    SKIP = 1
    NOT_FINITE = 2
    FAILED = 3


class Ranks(Protocol):
    """What a step needs to know of the processes that train together."""

    def share_out(self, units: Sequence[Unit]) -> None:
        """Say of all units of a param group what of them lies here."""
        ...

    def warn(self) -> None:
        """Say once where blocks are not cut as in one process."""
        ...

    def buckets(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """These units, in the order in which they are moved and published. Their parts hold the parameters' numbers."""
        ...

    def agree(self, verdict: Verdict) -> Verdict:
        """Whether all go on or all skip; raises if another process cannot go on. Nothing is written before it."""
        ...

    def publish(self, bucket: int) -> None:
        """Begin to give the others what was moved here."""
        ...

    def finish_(self) -> None:
        """Take what the others moved. The last thing in a step."""
        ...

    def require_whole(self) -> None:
        """Raise if the state here is no longer that of any step of all."""
        ...


# DTensors ----------------------------------------------------------------------------------------------------------


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor. Who has none does not pay for the import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def are_sharded(tensors: Sequence[Tensor]) -> bool:
    """Whether any of them is a DTensor. Asked in every step, so it looks at each kind of tensor once."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in {*map(type, tensors)})


def local(tensor: Any) -> Tensor:
    """What of a tensor lies in this process."""
    here: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return here


def require_placements(owner: str, param: Any) -> None:
    """Raise unless a DTensor is replicated, or sharded along its first axis over one axis of its mesh."""
    from torch.distributed.tensor import Shard

    sharded = [placement for placement in param.placements if not placement.is_replicate()]
    ok = len(sharded) <= 1 and all(type(placement) is Shard and placement.dim == 0 for placement in sharded)
    rule = "replicated, or sharded along dimension 0 over one dimension of the mesh, where they are DTensors"
    require(ok, owner, "params", rule, Described(f"placements {tuple(param.placements)}"))


def _chunk(length: int, ranks: int, rank: int) -> Rows:
    """What torch.chunk gives to a rank."""
    size = -(-length // ranks)
    return min(length, rank * size), min(length, (rank + 1) * size)


@dataclass(eq=False)
class RowShare:
    """Rows [first, last) of a parameter, and the blocks in them.

    Attributes:
        rows: They; None for all of it, in every process.
        length: Rows in all processes.
        blocks: Blocks in processes before this one, and in all.
        mesh: The processes.
        placements: How a DTensor of such rows lies on the mesh.
        borders: The first row of each process and, at the end, `length`.
        slabs: Where the rows are moved, if not in the parameter itself.
    """

    rows: Rows | None
    length: int = 0
    blocks: Rows = (0, 0)
    mesh: Any = None
    placements: Sequence[Any] = ()
    borders: Sequence[int] = ()
    slabs: dict[Tensor, Tensor] = field(default_factory=dict)

    @property
    def processes(self) -> Any:
        """See `Share`."""
        if self.rows is None:
            return None
        return self.mesh.get_group(next(dim for dim, place in enumerate(self.placements) if not place.is_replicate()))

    def part(self, param: Tensor) -> Tensor:
        """See `Share`."""
        return self.slabs[param] if self.slabs else local(param)

    def gradient(self, grad: Tensor) -> Tensor:
        """See `Share`."""
        return local(grad) if self.rows is None or is_sharded(grad) else grad[slice(*self.rows)]

    def spread(self, name: str, here: Tensor) -> Tensor:
        """See `Share`: a DTensor with the shape of the whole.

        By itself a DTensor knows only the shards of torch.chunk; what begins elsewhere needs a wrapper of torch's.
        """
        if self.rows is None:
            return here
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

        first, total = self._extent(name)
        shape = torch.Size((total, *here.shape[1:]))
        piece: Tensor = here
        if name != "exp_avg" or self.borders:
            # What is empty must not lie where another process's begins: a checkpoint would take it for the same.
            begin = first if len(here) else total
            piece = LocalShardsWrapper([here], [(begin, *[0] * (here.ndim - 1))])
        stride = torch.empty(shape, device="meta").stride()
        spread: Tensor = DTensor.from_local(
            piece, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )
        return spread

    def taken(self, name: str, spread: Tensor, shape: tuple[int, ...]) -> Tensor:
        """See `Share`."""
        if self.rows is None:
            return local(spread)
        if is_sharded(spread):
            here = local(spread)
            shards: list[Tensor] = here.local_shards() if hasattr(here, "local_shards") else [here]
            return shards[0]
        first, total = self._extent(name)
        fits = tuple(spread.shape) == (total, *shape[1:])
        return spread[first : first + shape[0]] if fits else spread

    def _extent(self, name: str) -> Rows:
        """Where this process's part of a state tensor begins, and how long that of all is."""
        assert self.rows is not None
        return (self.rows[0], self.length) if name == "exp_avg" else self.blocks


class OwnShards:
    """Every process moves what lies in it: all of a plain parameter, its own rows of a DTensor.

    Where a shard begins within a block, the block is cut there.

    Args:
        owner: Who asks, for messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._groups: dict[Any, torch.device] = {}
        self._torn: dict[str, None] = {}
        self._has_warned = False

    def share_out(self, units: Sequence[Unit]) -> None:
        """See `Ranks`: rows of a DTensor lie where torch.chunk puts them."""
        for unit in units:
            if not is_sharded(unit.owner):
                continue
            param: Any = unit.owner
            mesh = param.device_mesh
            self._groups.update({mesh.get_group(dim): local(param).device for dim in range(mesh.ndim)})
            dim = next((dim for dim, place in enumerate(param.placements) if not place.is_replicate()), None)
            if dim is None:
                unit.share = RowShare(None)
            else:
                self._cut(unit, mesh.size(dim), mesh.get_local_rank(dim), mesh)

    def _cut(self, unit: Unit, size: int, rank: int, mesh: Any) -> None:
        whole, param = unit.cut, unit.owner
        assert isinstance(whole, Partition)
        pieces = [_chunk(whole.length, size, other) for other in range(size)]
        is_torn = whole.num_blocks > 0 and any(whole.border(first) is None for first, _ in pieces)
        if is_torn:
            self._torn[describe(unit.group, unit.index, unit.position)] = None
        cuts = [whole.between(*piece, shards=size if is_torn else 0) for piece in pieces]
        counts = [cut.num_blocks for cut in cuts]
        unit.cut = cuts[rank]
        blocks = sum(counts[:rank]), sum(counts)
        unit.share = RowShare(pieces[rank], whole.length, blocks, mesh, param.placements)  # type: ignore[attr-defined]

    def warn(self) -> None:
        """Say once which parameters have blocks that are cut otherwise than in one process."""
        if not self._torn or self._has_warned:
            return
        self._has_warned = True
        if dist.get_rank() == 0:
            warnings.warn(
                f"{self._owner}: shards begin within blocks of {', '.join(self._torn)}. These blocks are cut there, so "
                f"the result differs from that of one process. Use grouping='output', or give each rank a number of "
                f"rows that is a multiple of `block_size`.",
                stacklevel=4,
            )

    def buckets(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """All at once."""
        return [list(units)]

    def agree(self, verdict: Verdict) -> Verdict:
        """See `Ranks`."""
        return _agreed(self._owner, verdict, self._groups) if self._groups else verdict

    def publish(self, bucket: int) -> None:
        """Nobody else needs it."""

    def finish_(self) -> None:
        """Nothing comes from others."""

    def require_whole(self) -> None:
        """A step is done here when it is written."""


# Shared out --------------------------------------------------------------------------------------------------------


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
        units: They, of one dtype and device.
        length: Numbers that each rank sends; ranks with fewer send something more.
        offsets: For each unit and rank where its rows begin in what that rank sends.
        sent: What this rank sends.
        received: What all send, once it is asked for.
        work: The message under way.
    """

    units: list[Unit]
    length: int
    offsets: list[list[int]]
    sent: Tensor
    received: Tensor | None = None
    work: Any = None


class SharedOut:
    """Every process has all parameters and gradients; each moves its rows of them, and gives them to the others.

    Rows are moved in memory of their own, and written into the parameters only when those of all others have come. So
    parameters are as before if a process is lost; the state of the blocks moved here is not.

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
                unit.share = RowShare(None)
                continue
            whole, (first, last) = unit.cut, borders[self._rank : self._rank + 2]
            assert isinstance(whole, Partition)
            unit.cut = whole.between(first, last)
            before = (whole.border(first) or 0) if whole.num_blocks else 0
            kind = unit.owner.device.type
            mesh = self._meshes.get(kind) or self._meshes.setdefault(kind, DeviceMesh.from_group(self._group, kind))
            blocks = before, whole.num_blocks
            unit.share = RowShare((first, last), whole.length, blocks, mesh, [Shard(0)], borders)

    def warn(self) -> None:
        """No block is cut otherwise than in one process."""

    def buckets(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """See `Ranks`. Rows are copied to where they are moved."""
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
        ends = [0] * self._size
        offsets: list[list[int]] = []
        for unit in units:
            offsets.append(list(ends))
            borders, row = _share(unit).borders, unit.owner[:1].numel()
            for rank in range(self._size):
                ends[rank] += (borders[rank + 1] - borders[rank]) * row
        length, like = max(ends), units[0].owner
        sent = torch.zeros(length, dtype=like.dtype, device=like.device)
        for unit, starts in zip(units, offsets, strict=True):
            shape = unit.shape(unit.owner)
            _share(unit).slabs = {unit.owner: _piece(sent, starts[self._rank], shape)}
        return _Bucket(units, length, offsets, sent)

    def agree(self, verdict: Verdict) -> Verdict:
        """See `Ranks`. All must have gradients for the same units."""
        moved = zlib.crc32(" ".join(unit.key for unit, _ in self._key).encode())
        return _agreed(self._owner, verdict, {self._group: self._device}, moved)

    def publish(self, bucket: int) -> None:
        """See `Ranks`: one all-gather a bucket, while the next is moved."""
        if bucket >= len(self._buckets):
            return  # units that every rank moves for itself
        one = self._buckets[bucket]
        self._is_lost = True
        one.received = torch.empty(self._size * one.length, dtype=one.sent.dtype, device=one.sent.device)
        try:
            one.work = _all_gather(one.received, one.sent, group=self._group, async_op=True)
        except Exception as error:
            raise RuntimeError(self._lost()) from error

    def finish_(self) -> None:
        """See `Ranks`."""
        try:
            for bucket in self._buckets:
                bucket.work.wait()
        except Exception as error:
            raise RuntimeError(self._lost()) from error
        for bucket in self._buckets:
            for unit, starts in zip(bucket.units, bucket.offsets, strict=True):
                borders = _share(unit).borders
                for rank in range(self._size):
                    first, last = borders[rank : rank + 2]
                    if last > first and bucket.received is not None:
                        shape = (last - first, *unit.owner.shape[1:])
                        unit.owner[first:last] = _piece(bucket.received, rank * bucket.length + starts[rank], shape)
            bucket.received = bucket.work = None
        for unit in self._alone:
            for param, slab in _share(unit).slabs.items():
                if param.grad is not None:
                    param.copy_(slab)
        self._is_lost = False

    def require_whole(self) -> None:
        """Raise if a step was moved here and lost on its way."""
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


def added_up(owner: str, sums: Tensor, processes: Any) -> Tensor:
    """Add up what every process has, in their order, so that all of them get the same bits.

    Raises:
        RuntimeError: Another process does not answer.
    """
    size = dist.get_world_size(processes)
    try:
        gathered = torch.empty(size * sums.numel(), dtype=sums.dtype, device=sums.device)
        _all_gather(gathered, sums.reshape(-1), group=processes)
    except Exception as error:
        raise RuntimeError(
            f"{owner}: another process was lost in a step, before α* was known to all. Load a checkpoint."
        ) from error
    return gathered.view(size, *sums.shape).sum(0)


def _agreed(owner: str, verdict: Verdict, groups: Mapping[Any, torch.device], moved: int = 0) -> Verdict:
    """The gravest verdict of all processes.

    Raises:
        NonFiniteGradientError: Another process has a gradient that is not finite.
        RuntimeError: Another process failed, or does not answer.
        ValueError: Processes have gradients for different parameters.
    """
    try:
        said = torch.tensor([verdict, moved, -moved])
        for group, device in groups.items():
            said = said.to(device)
            dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    except Exception as error:
        raise RuntimeError(f"{owner}: another process does not answer; parameters and state are unchanged.") from error
    gravest, most, least = said.tolist()
    if verdict <= Verdict.SKIP < gravest:
        if gravest == Verdict.NOT_FINITE:
            raise NonFiniteGradientError(
                f"{owner}: another process has a gradient that is not finite; parameters and state are unchanged."
            )
        raise RuntimeError(f"{owner}: another process failed in this step; parameters and state are unchanged.")
    if gravest == Verdict.GO and most != -least:
        rule = "there for the same parameters in every process"
        raise ValueError(refusal(owner, "grad", rule, Described("other ones")))
    return Verdict(gravest)
