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


def cached_jit(function: Callable[..., Any]) -> Any:
    """`numba.njit` with the disk cache where one can be written, without it elsewhere."""
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(cache_folder())
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except (OSError, RuntimeError):  # Numba found no place to write to, or there is no home
        return numba.njit(nogil=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


def compile_once(function: Any, signature: tuple[Any, ...], dtype: str) -> None:
    """Have `function` compiled for this signature: from this process, the disk, or now, with a notice."""
    if signature in function.signatures:
        return
    with _compiling:
        notice = threading.Timer(_PATIENCE, lambda: print(NOTICE.format(dtype=dtype), file=sys.stderr, flush=True))
        notice.daemon = True
        with _only_process():
            notice.start()
            try:
                function.compile(signature)
            finally:
                notice.cancel()


@contextlib.contextmanager
def _only_process() -> Iterator[None]:
    """Hold the cache's lock; without one if its folder cannot be written."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        lock.acquire()
    except (OSError, RuntimeError):
        yield
        return
    try:
        yield
    finally:
        lock.release()
