"""Writes files that are there whole or not at all."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that is there whole once the block has ended, or as it was before.

    Raises:
        OSError: It cannot be written. The error names the file, and what was written of it is gone, so that it takes no
            room on a full disk.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(part)):
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise
    if os.name == "posix":  # the new name itself must reach the disk; other systems cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def atomic_text(path: Path) -> Iterator[TextIO]:
    """Yield the same for text, whose lines end as they are written on every system."""
    text = io.StringIO(newline="")
    yield text
    with atomic(path) as file:
        file.write(text.getvalue().encode())


def write_json(path: Path, content: Any) -> None:
    """Write it atomically."""
    with atomic(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path, owner: str = "blockadapt", fields: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Read the table that `write_json` wrote.

    Args:
        path: The file.
        owner: Who asks, as the first word of a refusal.
        fields: What the table must have, and of which type.

    Raises:
        ValueError: It is no such table, or not there; the sentence names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{owner}: {str(path)!r} is missing.") from None
    except ValueError as error:
        raise ValueError(f"{owner}: {str(path)!r} is not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{owner}: {str(path)!r} must hold a table, got {json.dumps(content)[:40]}.")
    for name, kind in (fields or {}).items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{owner}: {str(path)!r} must have `{name}` as `blockadapt run` writes it.")
    return content


def require_no_url(owner: str, path: Path, argument: str = "out", what: str = "directory") -> None:
    """Refuse the address of a database or of a store elsewhere, which would be taken for a path of that name.

    Args:
        owner: Who asks, as the first word of the refusal.
        path: What was given.
        argument: As what.
        what: What it must be.

    Raises:
        ValueError: It is one. Only its beginning is told, for the rest may hold a password.
    """
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)", path.as_posix())
    if scheme:
        raise ValueError(f"{owner}: `{argument}` must be a {what} that this machine sees, got a URL, {scheme[0]}//….")


def require_directory(owner: str, path: Path) -> None:
    """Make the directory.

    Raises:
        ValueError: It cannot be made, or not be written to.
    """
    require_no_url(owner, path)
    with suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    if not (path.is_dir() and os.access(path, os.W_OK)):
        raise ValueError(f"{owner}: `out` must be a directory that can be written to, got {str(path)!r}.")
