"""Messages: what each process has to say reaches all others."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

_TAG = 0xB10C
"""Of messages between two processes, so that they do not mix with the user's own."""

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its new name, and the old one


def exchange(received: Tensor, sent: Tensor, group: Any) -> list[Any]:
    """Begin to bring what every other rank of a group sends into its row of `received`; return what to wait for.

    On CPUs the numbers go straight from one process to another. gloo's own collectives queue and copy them first, and
    took twice as long for the same bytes.
    """
    if not sent.is_cpu:
        return [_all_gather(received.view(-1), sent, group=group, async_op=True)]
    size, here = dist.get_world_size(group), dist.get_rank(group)
    others = [dist.get_global_rank(group, (here + ahead) % size) for ahead in range(1, size)]
    rows = [received[(here + ahead) % size] for ahead in range(1, size)]
    to_come = [dist.irecv(row, rank, group, _TAG) for row, rank in zip(rows, others, strict=True)]
    return to_come + [dist.isend(sent, rank, group, _TAG) for rank in others]


def added_up(owner: str, sums: Tensor, processes: Any) -> Tensor:
    """Add up what every process has, in their order, so that all of them get the same bits.

    Raises:
        RuntimeError: Another process does not answer.
    """
    try:
        here = sums.reshape(-1)
        gathered = here.repeat(dist.get_world_size(processes), 1)
        for work in exchange(gathered, here, processes):
            work.wait()
    except Exception as error:
        raise RuntimeError(
            f"{owner}: another process was lost in a step, before α* was known to all. Load a checkpoint."
        ) from error
    return gathered.sum(0).view(sums.shape)
