"""A disk that is full: no file may grow beyond a size, as far as this process is concerned."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

posix = pytest.mark.skipif(os.name != "posix", reason="limits of a process")


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Within this block, a write beyond so many bytes raises OSError ("File too large")."""
    import resource

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
