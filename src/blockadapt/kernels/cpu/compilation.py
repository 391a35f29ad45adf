"""Compiles once: machine code is kept on disk, under a name that changes with anything that could change it.

What is kept is executed later. So it is read only from a folder that is the user's own (`private_folder`), and it is
object code with a checksum: nothing is unpickled. Several processes may start at once: one compiles while the others
wait, then load what it wrote. Where the folder is not the user's own, or cannot be written, a warning says so and the
process compiles for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from blockadapt.kernels.contract import TERMS
from blockadapt.kernels.cpu.private_folder import PrivateFolder

COMPILING = "blockadapt: compiling the CPU kernel for {dtype}, once (10 to 20 s)."
COMPILING_UNKEPT = "blockadapt: compiling the CPU kernel for {dtype} (10 to 20 s)."
WAITING = "blockadapt: waiting for another process to compile the CPU kernel for {dtype}."
_PATIENCE = 1.0
"""What takes more seconds than this is told."""

_compiling = threading.Lock()


class CacheWarning(UserWarning):
    """Warns that the cache of compiled kernels is not used, so that every process compiles for itself."""


def cache_folder() -> Path:
    """Say where kernels are kept: below `NUMBA_CACHE_DIR` if that is set, else in the user's cache.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG specification demands.
    """
    import numba

    base = numba.config.CACHE_DIR or _absolute("XDG_CACHE_HOME") or _absolute("LOCALAPPDATA")
    return Path(base or Path.home() / ".cache") / "blockadapt" / "kernels"


def compiled(function: Callable[[Any], None], dtype: str) -> Any:
    """Make `function` a C function of one pointer, in its attribute `ctypes`: load it from the disk, or compile it now.

    Warns:
        CacheWarning: The cache cannot be used. Nothing was read from it, then.
    """
    name = _file_name(function, dtype)
    with _compiling, contextlib.ExitStack() as held:
        folder = kept = None
        try:
            folder = held.enter_context(PrivateFolder(cache_folder()))
            kept = _loaded(folder.read(name))
            if kept is None:
                held.enter_context(_lock(folder.path / f"{name}.lock", dtype))
                kept = _loaded(folder.read(name))  # another process may have compiled it meanwhile
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home, or there are no locks
            folder = None
            _warn(error)
        if kept is not None:
            return kept
        with _telling((COMPILING if folder else COMPILING_UNKEPT).format(dtype=dtype)):
            fresh = _compiled_now(function)
        if folder is not None:
            try:
                folder.write(name, _content(fresh))
            except (OSError, ValueError) as error:
                _warn(error)
        return fresh


def _compiled_now(function: Callable[[Any], None]) -> Any:
    import numba

    return numba.cfunc("void(voidptr)", error_model="numpy")(function)


class _Loaded(NamedTuple):
    """Holds a C function that was kept as Numba's own hold theirs: in the attribute `ctypes`."""

    ctypes: Any


def _loaded(kept: bytes | None) -> _Loaded | None:
    """Load what `_content` has made; None if there is none, it is damaged, or something that it calls is missing."""
    from llvmlite import binding
    from numba.core.registry import cpu_target
    from numba.core.runtime import rtsys

    if kept is None or hashlib.sha256(kept[32:]).digest() != kept[:32]:
        return None
    names, _, code = kept[32:].partition(b"\0")
    symbol, *calls = names.decode().split()
    rtsys.initialize(cpu_target.target_context)  # so that what Numba's code calls has an address
    if not all(binding.address_of_symbol(name) for name in calls):
        return None
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address(symbol))
    function.engine = engine  # type: ignore[attr-defined]  # the code lives as long as the engine
    return _Loaded(function)


# ----------------------------------------------------------------------------------------------------- what is on disk


def _file_name(function: Callable[[Any], None], dtype: str) -> str:
    """Name everything that the machine code depends on."""
    import llvmlite
    import numba
    from numba.core.registry import cpu_target

    processor = cpu_target.target_context.codegen().magic_tuple()
    versions = numba.__version__, llvmlite.__version__, sys.version
    key = hashlib.sha256(repr((versions, processor, dtype, TERMS, _identity(function))).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        key.update(source.read_bytes())
    return f"{dtype}-{key.hexdigest()[:32]}"


def _identity(value: Any) -> object:
    """Tell a function apart from all others: by its code, its file, and the same of all that it closes over."""
    function = getattr(value, "py_func", value)  # Numba's functions keep the Python one there
    if not hasattr(function, "__code__"):
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError):
            return repr(value)
    code = function.__code__
    file = Path(code.co_filename)
    text: object = file.read_bytes() if file.is_file() else (code.co_consts, code.co_names)
    around = (*(function.__defaults__ or ()), *(cell.cell_contents for cell in function.__closure__ or ()))
    return code.co_code, code.co_firstlineno, text, [_identity(each) for each in around]


def _content(fresh: Any) -> bytes:
    """Lay out what is kept: checksum, the function's symbol and those that it calls, a zero byte, object code.

    Raises:
        ValueError: The code is good for this process only.
    """
    from llvmlite import binding

    if fresh._library.has_dynamic_globals:
        raise ValueError("the code holds addresses of this process")
    _, _, (code, bitcode) = fresh._library.serialize_using_object_code()
    module = binding.parse_bitcode(bitcode)
    outside = [entry.name for entry in (*module.functions, *module.global_variables) if entry.is_declaration]
    calls = [name for name in outside if not name.startswith("llvm.")]
    content: bytes = " ".join((fresh.native_name, *calls)).encode() + b"\0" + code
    return hashlib.sha256(content).digest() + content


def _absolute(variable: str) -> str | None:
    """Read an environment variable; None if it holds no absolute path."""
    value = os.environ.get(variable, "")
    return value if os.path.isabs(value) else None


# ---------------------------------------------------------------------------------------------------- waiting, telling


@contextlib.contextmanager
def _lock(path: Path, dtype: str) -> Iterator[None]:
    """Hold a lock that only one process has at a time."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with _telling(WAITING.format(dtype=dtype)):
            lock.acquire(timeout=-1)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _telling(text: str) -> Iterator[None]:
    """Print a line to stderr if it takes long."""
    notice = threading.Timer(_PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def _warn(error: Exception) -> None:
    reason = str(getattr(error, "strerror", None) or error).rstrip(".")
    with contextlib.suppress(RuntimeError):  # there is no home
        reason = f"the cache {cache_folder()} cannot be used: {reason}"
    warnings.warn(
        f"blockadapt: every process compiles the CPU kernel for itself, because {reason}.", CacheWarning, stacklevel=3
    )
