"""Real processes that train together, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 60
"""Seconds until processes that have not answered are given up; or twice the timeout of their group."""

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "blockadapt", "blockadapt.kernels.cpu.work"]
)


def together(
    ranks: int, errand: Callable[..., Any], *args: Any, timeout: float = 30, lost: int | None = None
) -> list[Any]:
    """What `errand(*args)` returns in each of so many processes of one group; raises if one of them raises.

    Args:
        ranks: How many.
        errand: A function of a module below `tests/support`.
        *args: Its arguments.
        timeout: Of the process group, in seconds.
        lost: The rank that ends without an answer, if one is to.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(ranks):
            here, there = _SERVER.Pipe()
            process = _SERVER.Process(target=_run, args=(there, f"{folder}/store", rank, ranks, timeout, errand, args))
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        try:
            return [_answer(end, max(PATIENCE, 2 * timeout)) for rank, end in enumerate(ends) if rank != lost]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answer(end: Connection, patience: float) -> Any:
    if not end.poll(patience):
        raise TimeoutError("a process does not answer")
    ok, value = pickle.loads(end.recv_bytes())
    if not ok:
        raise AssertionError(value)
    return value


def _run(
    end: Connection, store: str, rank: int, ranks: int, timeout: float, errand: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    warnings.simplefilter("error", UserWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    try:
        end.send_bytes(pickle.dumps((True, errand(*args))))  # `send` would share memory that ends with the process
    except BaseException:
        end.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))
    finally:
        end.close()
    os._exit(0)
