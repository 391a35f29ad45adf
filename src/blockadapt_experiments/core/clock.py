"""Time what a run takes to train: not what it measures, and not what else the machine does.

A run with one thread on a CPU is timed by the processor's clock, which stands still while others have the core.
Elsewhere, on a GPU or with several threads, only the clock on the wall knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_uncounted = 0.0


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
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if alone else time.perf_counter()
