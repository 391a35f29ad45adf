"""Loads parts that are not built in: where their code comes from, and how it is loaded.

An optimizer, a data set or an experiment of your own is registered when its module is imported: by `--load my.py`, by
an entry point of an installed package, or by a notebook. A run keeps the digest of the file that registered what it
uses, so that it is not continued with other code. A process that takes part in the work imports the same modules.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from blockadapt_experiments.files.atomic import require_no_url

GROUP = "blockadapt.experiments"
"""The group of entry points that name modules with parts."""

NAME = r"[A-Za-z0-9][\w+-]{0,63}"
"""What a part may be called: its name is a folder too."""

LOADED = "blockadapt_loaded_"
"""What the names of modules that were loaded from a file begin with; then come the file's name and its digest."""


class Origin(NamedTuple):
    """Says where a part comes from.

    Attributes:
        kind: What it is: "optimizer", "images" or "experiment".
        module: The name of the module that registered it.
        file: The file that this module was loaded from by its path; "" if it is imported by its name.
        sha256: The digest of its code.
    """

    kind: str
    module: str
    file: str
    sha256: str


ORIGINS: dict[str, Origin] = {}
"""Of every part that is not built in, by its name."""


def register(kind: str, name: str, built_in: Iterable[str], code: Callable[..., Any]) -> None:
    """Remember where a part comes from. One that was registered before is replaced, as a cell of a notebook does.

    Raises:
        ValueError: It cannot have this name.
    """
    if not re.fullmatch(NAME, name):
        raise ValueError(f"register: `name` must be of letters, digits, - and _, got {name!r}.")
    before = ORIGINS.get(name)
    if before.kind != kind if before else name in built_in:
        raise ValueError(f"register: `name` must be one that nothing else has, got {name!r}.")
    module = sys.modules.get(code.__module__)
    file = getattr(module, "__file__", None)
    if file:
        source = Path(file).read_bytes()
        digest = getattr(module, "__sha256__", hashlib.sha256(source).hexdigest())
    else:  # a notebook has no file, but its cells have a source
        digest = hashlib.sha256(_source(name, code).encode()).hexdigest()
    path = str(file) if code.__module__.startswith(LOADED) else ""
    ORIGINS[name] = Origin(kind, code.__module__, path, digest)


def _source(name: str, code: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(code)
    except OSError:
        raise ValueError(f"register: {name!r} must come from a file or a notebook whose code can be read.") from None


def code_of(names: Iterable[str]) -> dict[str, str]:
    """Give the digest of the code of those among these names that are not built in."""
    return {name: ORIGINS[name].sha256 for name in names if name in ORIGINS}


def load_file(file: str | Path) -> None:
    """Import a Python file, which registers its parts.

    Raises:
        ValueError: It cannot be read, or fails; the sentence says where.
    """
    path = Path(file)
    require_no_url("load", path, "load", "Python file")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ValueError(f"load: `load` must be a Python file that can be read, got {str(path)!r}.") from error
    digest = hashlib.sha256(source).hexdigest()
    name = f"{LOADED}{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}_{digest[:12]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None:
        raise ValueError(f"load: `load` must be a Python file, got {str(path)!r}.")
    module = importlib.util.module_from_spec(spec)
    module.__sha256__ = digest  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        exec(compile(source, str(path.absolute()), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"load: {_place(error, path)}: {type(error).__name__}: {error}") from error


def _place(error: Exception, path: Path) -> str:
    """Name the line of the file that failed."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.absolute())
    ]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    return f"{path}, line {line}" if line else str(path)


@lru_cache(maxsize=1)
def load_installed() -> bool:
    """Import the modules that installed packages name; tells whether there are any.

    Raises:
        ValueError: One of them fails.
    """
    found = entry_points(group=GROUP)
    for entry in found:
        _load_entry(entry)
    return bool(found)


def _load_entry(entry: EntryPoint) -> None:
    try:
        entry.load()
    except Exception as error:
        where = f"the entry point {entry.name!r} ({entry.value})"
        raise ValueError(f"load: {where} failed: {type(error).__name__}: {error}") from error


def load_origins(origins: Iterable[Origin]) -> None:
    """Import the modules of these parts, in a process that has not.

    Raises:
        ValueError: A file has changed meanwhile, or fails.
    """
    for module, file in {(origin.module, origin.file) for origin in origins}:
        if module in sys.modules:
            continue
        if not file:
            importlib.import_module(module)
            continue
        load_file(file)
        if module not in sys.modules:
            raise ValueError(f"load: {file} has changed since it was loaded.")
