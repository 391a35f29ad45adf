"""Rows of a parameter that lie in one process, and DTensors, in which all processes together have the whole."""

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


def require_placements(owner: str, param: Any) -> None:
    """Raise unless a DTensor is replicated, or sharded along its first axis over one axis of its mesh."""
    from torch.distributed.tensor import Shard

    sharded = [placement for placement in param.placements if not placement.is_replicate()]
    ok = len(sharded) <= 1 and all(type(placement) is Shard and placement.dim == 0 for placement in sharded)
    rule = "replicated, or sharded along dimension 0 over one dimension of the mesh, where they are DTensors"
    require(ok, owner, "params", rule, Described(f"placements {tuple(param.placements)}"))


@dataclass(eq=False)
class RowShare:
    """Rows [first, last) of a parameter, and the blocks in them.

    Attributes:
        rows: The rows; None if every process has all of them.
        length: How many rows all processes have together.
        blocks: How many blocks processes before this one have, and how many all have.
        mesh: The processes.
        placements: How a DTensor of such rows lies on the mesh.
        borders: The first row of each process and, at the end, `length`. Empty where torch.chunk made the rows.
        slabs: Where the rows are moved, if not in the parameter itself.
    """

    rows: Rows | None
    length: int = 0
    blocks: Rows = (0, 0)
    mesh: Any = None
    placements: Sequence[Any] = ()
    borders: Sequence[int] = ()
    slabs: dict[Tensor, Tensor] = field(default_factory=dict)

    def part(self, param: Tensor) -> Tensor:
        """See `Share`."""
        return self.slabs[param] if self.slabs else local(param)

    def gradient(self, grad: Tensor) -> Tensor:
        """See `Share`."""
        return local(grad) if self.rows is None or is_sharded(grad) else grad[slice(*self.rows)]

    def spread(self, name: str, here: Tensor) -> Tensor:
        """See `Share`. The result is a DTensor with the shape of the whole.

        By itself a DTensor knows only the shards of torch.chunk. Shards that begin elsewhere need a wrapper of torch's.
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
        """Return where this process's part of a state tensor begins, and how long that of all is."""
        assert self.rows is not None
        return (self.rows[0], self.length) if name == "exp_avg" else self.blocks
