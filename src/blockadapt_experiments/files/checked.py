"""Reads and writes files that hold a digest of themselves, so that a damaged one is noticed before anybody believes it.

A binary file ends in it:

    content | SHA-256 of the content, 32 bytes

`torch.load` reads such a file as it is: it finds its way from the end of the archive, and skips what follows.

A table has it under `sha256`: the SHA-256 of all its other entries, as JSON with sorted keys. Its `format` says that it
has one, so that a table which has lost either is not taken for an old one, which has neither.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from blockadapt_experiments.files.atomic import atomic, write_json

FORMAT = 2
"""Of sealed tables; those before had no seal."""

DIGEST_BYTES = hashlib.sha256().digest_size
PIECE = 1 << 20


class _Digesting:
    """Is a file that digests what is written to it; nothing is kept in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, piece: Any) -> int:
        self.sha256.update(piece)
        try:
            return self._file.write(piece)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_checked(path: Path, write: Callable[[Any], None]) -> None:
    """Write a file atomically: what `write` puts into it, and the digest of that."""
    with atomic(path) as file:
        digesting = _Digesting(file)
        try:
            write(digesting)
        except RuntimeError as error:  # torch's word for whatever went wrong
            raise digesting.failure or error from None
        file.write(digesting.sha256.digest())


def is_whole(path: Path) -> bool:
    """Tell whether the file still is what `write_checked` wrote."""
    content = os.path.getsize(path) - DIGEST_BYTES
    if content < 0:
        return False
    with path.open("rb") as file:
        digest: bytes = sha256_of(file, content).digest()
        return digest == file.read()


def sealed(table: Mapping[str, Any]) -> dict[str, Any]:
    """Give the table with its digest."""
    content = json.dumps({name: value for name, value in table.items() if name != "sha256"}, sort_keys=True)
    return {**table, "sha256": hashlib.sha256(content.encode()).hexdigest()}


def is_sealed(table: Mapping[str, Any]) -> bool:
    """Tell whether the table still is what `sealed` gave."""
    return "sha256" in table and bool(sealed(table)["sha256"] == table["sha256"])


def write_sealed(path: Path, table: Mapping[str, Any]) -> None:
    """Write the table atomically, with its format and its digest."""
    write_json(path, sealed({"format": FORMAT, **table}))


def is_marked(table: Mapping[str, Any]) -> bool:
    """Tell whether the table says that it is sealed; one of old does not."""
    return not table.keys().isdisjoint(("format", "sha256"))


def require_sealed(path: Path, table: Mapping[str, Any], owner: str) -> None:
    """Make sure that a table is what `write_sealed` wrote into this file.

    Raises:
        ValueError: It is not; the sentence names the file and who asks.
    """
    if table.get("format") != FORMAT or not is_sealed(table):
        remedy = "take it from a copy, or remove it and repeat every command that was given for its folder"
        raise ValueError(f"{owner}: {str(path)!r} must be as `blockadapt run` wrote it; {remedy}.")


def sha256_of(file: BinaryIO, size: int) -> Any:
    """Compute the digest, still to be continued, of the next `size` bytes; of fewer if the file ends before."""
    sha256 = hashlib.sha256()
    while size > 0 and (piece := file.read(min(size, PIECE))):
        sha256.update(piece)
        size -= len(piece)
    return sha256
