"""Time what a run takes to train: not what it measures, and not what else the machine does.

A run with one thread of torch on a CPU is timed by the processor, whose clock stands still while others have the core.
The thread that trains counts, and so do all that the run starts, as an optimizer may that works in threads. Threads of
Python that were there before, such as those that show progress or talk to a cluster, do not count: on a busy machine
they take a tenth or more of the process. Only Linux tells the times of single threads; elsewhere the thread that trains
counts alone. Processes that a run starts never count.

On a GPU, or with several threads of torch, only the clock on the wall knows.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

TOGETHER = 1e-4
"""Seconds that other threads may have worked while the clocks were read in turn; else they are read anew."""

_uncounted = 0.0

_own: set[int] = set()
"""Threads that runs of this process have started, by the system's number."""

_others: dict[int, float] = {}
"""The time of each thread that is not the run's, as last seen."""


@contextmanager
def own_threads() -> Iterator[None]:
    """Let the threads that are started in the block count for `seconds`, now and in runs to come, and no others.

    Yields:
        Nothing; the block is a run.
    """
    global _own, _others
    me = threading.get_native_id()
    _others = dict.fromkeys(_alive() - _own - {me}, 0.0)
    try:
        yield
    finally:
        _own = _alive() - _others.keys() - {me}


def seconds() -> float:
    """Tell the time of training in this process, which does one run at a time; only differences mean something."""
    return _now() - _uncounted


@contextmanager
def not_counted() -> Iterator[None]:
    """Leave what is done in the block out of `seconds`: measuring, which takes as long whatever the optimizer.

    Yields:
        Nothing; the block is what is left out.
    """
    global _uncounted
    start = _now()
    try:
        yield
    finally:
        _uncounted += _now() - start


def _now() -> float:
    if torch.get_num_threads() > 1 or torch.cuda.is_available():
        return time.perf_counter()
    if sys.platform != "linux":
        return time.thread_time()
    while True:
        before, used, after = _time_of_others(), time.process_time(), _time_of_others()
        if after - before < TOGETHER:
            return used - after


def _alive() -> set[int]:
    return {thread.native_id for thread in threading.enumerate() if thread.native_id}


def _time_of_others() -> float:
    for thread in _others:
        with suppress(OSError):  # it has ended, and its time stays what it was
            _others[thread] = time.clock_gettime(~thread << 3 | 6)  # Linux's name for the processor's clock of a thread
    return sum(_others.values())
