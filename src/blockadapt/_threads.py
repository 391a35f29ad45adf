"""Run work on as many threads as torch uses.

The kernels release the GIL, so plain Python threads serve, and Numba's own thread pool is never started: its first use
changes torch's thread count (numba issue 9387). `torch.set_num_threads` rules here too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    global _pool, _pool_size
    _pool, _pool_size = None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)  # threads do not survive a fork


def run_chunks(work: Callable[[int], None], count: int) -> None:
    """Call work(0) .. work(count − 1), each once, on up to `torch.get_num_threads()` threads.

    Threads take the next chunk as they become free; the caller is one of them. An exception is raised in the caller
    once all threads have stopped.
    """
    global _pool, _pool_size
    threads = min(torch.get_num_threads(), count)
    ticket = itertools.count()  # next() on it is atomic

    def take() -> None:
        while (chunk := next(ticket)) < count:
            work(chunk)

    if threads <= 1:
        take()
        return
    if _pool is None or _pool_size < threads - 1:
        if _pool is not None:
            _pool.shutdown(wait=False)
        _pool, _pool_size = ThreadPoolExecutor(threads - 1, thread_name_prefix="blockadapt"), threads - 1
    others = [_pool.submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:
        for other in others:
            other.result()
