"""Compile once: kernels are cached on disk, under a key that changes with anything that could change the machine code.

Several processes may start at once: one compiles while the others wait, then load what it wrote. Where the cache folder
cannot be written, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
from filelock import FileLock

NOTICE = "blockadapt: compiling the CPU kernel for {dtype}, once (about 10 s)."
_PATIENCE = 1.0
"""Seconds after which the notice is given: loading from the cache takes less, compiling more."""

_compiling = threading.Lock()


def cache_folder() -> Path:
    """Where this version of the kernels is cached: below `NUMBA_CACHE_DIR` if that is set, else the user's cache."""
    here = Path(__file__).parent
    key = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version}".encode())
    for source in sorted(here.glob("*.py")):
        key.update(source.read_bytes())
    base = numba.config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(base or Path.home() / ".cache") / "blockadapt" / key.hexdigest()[:16]


def compiled(function: Callable[[Any], None], dtype: str) -> Any:
    """`function` as a C function of one pointer: from the disk, or compiled now, with a notice."""
    with _compiling, _locked_folder() as folder:
        notice = threading.Timer(_PATIENCE, lambda: print(NOTICE.format(dtype=dtype), file=sys.stderr, flush=True))
        notice.daemon = True
        notice.start()
        try:
            if folder is None:
                return _c_function(function, cache=False)
            return _cached_c_function(function, folder)
        finally:
            notice.cancel()


def _cached_c_function(function: Callable[[Any], None], folder: Path) -> Any:
    """From the cache or into it. A damaged one, whatever it makes Numba raise, is cleared; one that fails is not used.

    The folder is read when a function is decorated: here, and by nobody else meanwhile.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        for _ in range(2):
            try:
                return _c_function(function, cache=True)
            except Exception:  # noqa: PERF203
                for entry in folder.rglob("*.nb[ic]"):
                    entry.unlink(missing_ok=True)
        return _c_function(function, cache=False)
    finally:
        numba.config.CACHE_DIR = before


def _c_function(function: Callable[[Any], None], cache: bool) -> Any:
    return numba.cfunc("void(voidptr)", error_model="numpy", cache=cache)(function)


@contextlib.contextmanager
def _locked_folder() -> Iterator[Path | None]:
    """The cache folder, held by this process alone; None if it cannot be written."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        lock.acquire()
    except (OSError, RuntimeError):  # not writable, or there is no home
        yield None
        return
    try:
        yield folder
    finally:
        lock.release()
