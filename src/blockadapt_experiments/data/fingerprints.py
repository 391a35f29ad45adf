"""Names the data that a run has read by a digest: the same pixels have the same one, wherever they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

_read: ContextVar[dict[str, str] | None] = ContextVar("data read", default=None)


def fingerprint(arrays: Iterable[np.ndarray]) -> str:
    """Compute a digest that changes with any number in these arrays, and with their shapes and types."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def note(name: str, digest: str) -> None:
    """Say that this data set is read; those who load data say so every time, also when it was in memory."""
    read = _read.get()
    if read is not None:
        read[name] = digest


@contextmanager
def data_read() -> Iterator[dict[str, str]]:
    """Yield a table that gets, within this block, the digest of every data set that is read, by its name."""
    read: dict[str, str] = {}
    token = _read.set(read)
    try:
        yield read
    finally:
        _read.reset(token)
