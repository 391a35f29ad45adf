"""Run a C function on as many threads as torch uses.

Numba's own thread pool is never started: its first use changes torch's thread count (numba issue 9387), and a second
pool would fight with torch's for the cores, because OpenMP threads spin for a while after each parallel region. Instead
the function runs on torch's own OpenMP threads where torch has GNU OpenMP, else on Python threads, without the GIL.
`torch.set_num_threads` rules in either case.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_pool: ThreadPoolExecutor | None = None
_forked = False


def _after_fork() -> None:
    global _pool, _forked
    _pool, _forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)  # threads do not survive a fork, and GNU OpenMP waits for its own


@lru_cache(maxsize=1)
def _gnu_openmp() -> Any:
    """`GOMP_parallel` of the OpenMP that torch itself has loaded, or None."""
    folder = Path(torch.__file__).parent / "lib"
    for library in sorted(folder.glob("libgomp*.so*")):
        try:
            parallel = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


def run_on_threads(function: Any, data: int, threads: int) -> None:
    """Call `function`, a C function of one pointer, with `data` on this many threads at once, and wait for all."""
    global _pool
    if threads > 1:
        parallel = None if _forked else _gnu_openmp()
        if parallel is not None:
            parallel(ctypes.cast(function, ctypes.c_void_p), data, threads, 0)
            return
        if _pool is None or _pool._max_workers < threads - 1:
            _pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="blockadapt")
        others = [_pool.submit(function, data) for _ in range(threads - 1)]
        function(data)
        for other in others:
            other.result()
    else:
        function(data)
