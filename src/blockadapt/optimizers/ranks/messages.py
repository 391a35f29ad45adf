"""Messages: what each process has to say reaches all others."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its new name, and the old one


def exchange(rows: Tensor, group: Any) -> list[Any]:
    """Begin to bring every rank's row of `rows`, [ranks, length], to all others of a group; return what to wait for.

    Where the memory is a CPU's they send straight to each other: gloo's all-gather takes twice as long for these bytes.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if not rows.is_cpu:
        return [_all_gather(rows.view(-1), rows[rank], group=group, async_op=True)]
    ahead = [(rank + steps) % size for steps in range(1, size)]
    to_come = [dist.irecv(rows[other], dist.get_global_rank(group, other), group) for other in reversed(ahead)]
    to_go = [dist.isend(rows[rank], dist.get_global_rank(group, other), group) for other in ahead]
    return to_come + to_go


def added_up(owner: str, sums: Tensor, processes: Any) -> Tensor:
    """Add up what every process has, in their order, so that all of them get the same bits.

    Raises:
        RuntimeError: Another process does not answer.
    """
    try:
        gathered = sums.new_empty(dist.get_world_size(processes), *sums.shape)
        gathered[dist.get_rank(processes)] = sums
        for message in exchange(gathered, processes):
            message.wait()
    except Exception as error:
        raise RuntimeError(
            f"{owner}: another process was lost in a step, before α* was known to all. Load a checkpoint."
        ) from error
    return gathered.sum(0)
