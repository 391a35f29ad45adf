"""Lets every process move what lies in it: all of a plain parameter, its rows of a DTensor, as FSDP2 makes them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from blockadapt.optimizers.ranks.contract import Verdict, agreed
from blockadapt.optimizers.ranks.rows import RowShare, chunk_borders, is_sharded, local
from blockadapt.optimizers.unit import Unit, describe
from blockadapt.partition import Partition


class OwnShards:
    """Moves all of a plain parameter, and the rows of a DTensor that lie in this process.

    Where a shard begins within a block, the block is cut there.

    Args:
        owner: Who asks, for messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._groups: dict[Any, Any] = {}  # a parameter of each process group: votes lie where it lies by then
        self._torn: dict[str, bool] = {}  # whether this process is the first of its mesh
        self._has_warned = False

    def share_out(self, units: Sequence[Unit], before: Sequence[Unit]) -> None:
        """See `Ranks`. Rows of a DTensor lie where torch.chunk puts them."""
        for unit in units:
            if not is_sharded(unit.owner):
                continue
            param: Any = unit.owner
            mesh = param.device_mesh
            self._groups.update({mesh.get_group(dim): param for dim in range(mesh.ndim)})
            dim = next((dim for dim, place in enumerate(param.placements) if not place.is_replicate()), None)
            if dim is None:
                unit.share = RowShare()
            else:
                self._cut(unit, mesh.size(dim), mesh.get_local_rank(dim), mesh)

    def _cut(self, unit: Unit, size: int, rank: int, mesh: Any) -> None:
        """Give a unit the rows of this rank, and the blocks in them."""
        whole, param = unit.cut, unit.owner
        assert isinstance(whole, Partition)
        borders = chunk_borders(whole.length, size)
        is_torn = whole.num_blocks > 0 and any(whole.border(first) is None for first in borders)
        if is_torn:
            self._torn[describe(unit.group, unit.index, unit.position)] = not any(mesh.get_coordinate())
        cuts = [whole.between(*rows, shards=size if is_torn else 0) for rows in pairwise(borders)]
        unit.cut = cuts[rank]
        blocks = [*accumulate((cut.num_blocks for cut in cuts), initial=0)]
        unit.share = RowShare(rank, borders, blocks, mesh, param.placements)  # type: ignore[attr-defined]

    def warn(self) -> None:
        """Say once for each mesh which parameters have blocks that are cut otherwise than in one process."""
        if not self._torn or self._has_warned:
            return
        self._has_warned = True
        names = [name for name, is_first in self._torn.items() if is_first]
        if names:
            warnings.warn(
                f"{self._owner}: shards begin within blocks of {', '.join(names)}. These blocks are cut there, so the "
                f"result differs from that of one process. Use grouping='output', or give each rank a number of rows "
                f"that is a multiple of `block_size`.",
                stacklevel=4,
            )

    def buckets(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """Return all units in one bucket: nothing is sent."""
        return [list(units)]

    def agree(self, verdict: Verdict) -> Verdict:
        """See `Ranks`."""
        if not self._groups:
            return verdict
        return agreed(self._owner, verdict, {group: local(param).device for group, param in self._groups.items()})

    def publish(self, bucket: int) -> None:
        """Do nothing: nobody else needs it."""

    def finish_(self) -> None:
        """Do nothing: nothing comes from others."""

    def require_whole(self) -> None:
        """Do nothing: a step is done here when it is written."""
