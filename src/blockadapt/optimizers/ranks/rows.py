"""Handles rows of a parameter in one process, and DTensors, in which all processes together have the whole."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockadapt.validation import Described, require

Rows = tuple[int, int]


def is_sharded(tensor: object) -> bool:
    """Return whether it is a DTensor. A program that has none does not pay for the import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def are_sharded(tensors: Sequence[Tensor]) -> bool:
    """Return whether any of them is a DTensor. Every step asks this, so it looks at each kind of tensor once."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in {*map(type, tensors)})


def local(tensor: Any) -> Tensor:
    """Return what of a tensor lies in this process."""
    here: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return here


def is_flattened(param: Tensor) -> bool:
    """Return whether torch's older FullyShardedDataParallel has made it one piece of a flat parameter."""
    return getattr(param, "_fsdp_flattened", False) is True


def require_placements(owner: str, param: Any, whose: str) -> None:
    """Raise unless a DTensor is replicated, or sharded along its first axis over one axis of its mesh."""
    from torch.distributed.tensor import Shard

    sharded = [placement for placement in param.placements if not placement.is_replicate()]
    ok = len(sharded) <= 1 and all(type(placement) is Shard and placement.dim == 0 for placement in sharded)
    rule = "replicated, or sharded along dimension 0 over one dimension of the mesh, where they are DTensors"
    require(ok, owner, "params", rule, Described(f"placements {tuple(param.placements)} for {whose}"))


@dataclass(eq=False)
class RowShare:
    """Holds rows [first, last) of a parameter, and the blocks in them.

    Attributes:
        rank: This process, by its place among those that share the parameter.
        row_borders: The first row of each process and, at the end, the number of rows. Empty if each has all of them.
        block_borders: The same for the blocks.
        mesh: The processes.
        placements: How a DTensor of such rows lies on the mesh.
        slabs: Where the rows are moved, if not in the parameter itself.
    """

    rank: int = 0
    row_borders: Sequence[int] = ()
    block_borders: Sequence[int] = ()
    mesh: Any = None
    placements: Sequence[Any] = ()
    slabs: dict[Tensor, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Rows | None:
        """See `Share`."""
        return _between(self.row_borders, self.rank) if self.row_borders else None

    @property
    def processes(self) -> Any:
        """See `Share`."""
        if self.rows is None:
            return None
        return self.mesh.get_group(next(dim for dim, place in enumerate(self.placements) if not place.is_replicate()))

    def local(self, param: Tensor) -> Tensor:
        """See `Share`."""
        return self.slabs[param] if self.slabs else local(param)

    def gradient(self, grad: Tensor) -> Tensor:
        """See `Share`."""
        rows = self.rows
        return local(grad) if rows is None or is_sharded(grad) else grad[slice(*rows)]

    def spread(self, name: str, here: Tensor) -> Tensor:
        """See `Share`. The result is a DTensor with the shape of the whole.

        By itself a DTensor knows only the shards of torch.chunk. Shards that begin elsewhere need a wrapper of torch's.
        """
        if self.rows is None:
            return here
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

        borders = self._borders(name)
        total = borders[-1]
        shape = torch.Size((total, *here.shape[1:]))
        shard: Tensor = here
        if borders != chunk_borders(total, len(borders) - 1):
            # What is empty must not lie where another process's begins: a checkpoint would take it for the same.
            begin = borders[self.rank] if len(here) else total
            shard = LocalShardsWrapper([here], [(begin, *[0] * (here.ndim - 1))])
        stride = torch.empty(shape, device="meta").stride()
        spread: Tensor = DTensor.from_local(
            shard, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
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
        borders = self._borders(name)
        fits = tuple(spread.shape) == (borders[-1], *shape[1:])
        return spread[slice(*_between(borders, self.rank))] if fits else spread

    def _borders(self, name: str) -> list[int]:
        """Return where each process's part of a state tensor begins, and how long that of all is."""
        return [*(self.row_borders if name == "exp_avg" else self.block_borders)]


def chunk_borders(length: int, ranks: int) -> list[int]:
    """Return the first row that torch.chunk gives to each rank and, at the end, the number of rows."""
    size = -(-length // ranks)
    return [min(length, rank * size) for rank in range(ranks)] + [length]


def _between(borders: Sequence[int], rank: int) -> Rows:
    return borders[rank], borders[rank + 1]
