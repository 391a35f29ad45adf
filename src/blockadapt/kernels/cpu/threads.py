"""Runs a C function on as many threads as torch uses.

Numba's own thread pool is never started: its first use changes torch's thread count (numba issue 9387), and a second
pool would fight with torch's for the cores, because OpenMP threads spin for a while after each parallel region. Instead
the function runs on torch's own OpenMP threads where torch has GNU OpenMP, else on Python threads, without the GIL.
`torch.set_num_threads` rules in either case.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch


class _Call:
    """Calls `function` on another thread."""

    def __init__(self, function: Callable[[int], None], data: int) -> None:
        self._function, self._data = function, data
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function(self._data)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def wait(self) -> BaseException | None:
        """Return what it raised. Ctrl-C has to wait with us: until it ends, the call writes memory that must stay."""
        interrupt = None
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except KeyboardInterrupt as error:  # noqa: PERF203
                interrupt = error
        return interrupt or self._error


class _Crew:
    """Keeps Python threads that take calls from one queue."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._growing = threading.Lock()
        self._size = 0

    def grow(self, size: int) -> None:
        """Start threads until there are this many; those that were started stay if the next one cannot be."""
        with self._growing:
            while self._size < size:
                threading.Thread(target=self._work, name=f"blockadapt-{self._size}", daemon=True).start()
                self._size += 1

    def submit(self, function: Callable[[int], None], data: int) -> _Call:
        call = _Call(function, data)
        self._calls.put(call)
        return call

    def _work(self) -> None:
        while True:
            self._calls.get().run()


_crew = _Crew()
_forked = False


def _after_fork() -> None:
    global _crew, _forked
    _crew, _forked = _Crew(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)  # threads do not survive a fork, and GNU OpenMP waits for its own


@lru_cache(maxsize=1)
def _gnu_openmp() -> Any:
    """Find `GOMP_parallel` of the OpenMP that torch itself has loaded; None if there is none."""
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


def ready(threads: int) -> None:
    """Start all that `run_on_threads` needs for this many threads. Call it before anything is written.

    Raises:
        RuntimeError: A thread cannot be started.
    """
    if threads > 1 and (_forked or _gnu_openmp() is None):
        _crew.grow(threads - 1)


def run_on_threads(function: Any, data: int, threads: int) -> None:
    """Call `function`, a C function of one pointer, with `data` on this many threads at once, and wait for all.

    It raises nothing after `ready(threads)` but what `function` raises, and Ctrl-C once all have ended.
    """
    ready(threads)
    if threads <= 1:
        function(data)
        return
    parallel = None if _forked else _gnu_openmp()
    if parallel is not None:
        parallel(ctypes.cast(function, ctypes.c_void_p), data, threads, 0)
        return
    others = [_crew.submit(function, data) for _ in range(threads - 1)]
    own = _Call(function, data)
    own.run()
    errors = [error for call in (own, *others) if (error := call.wait()) is not None]
    if errors:
        raise errors[0]
