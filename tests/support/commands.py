"""Commands of `blockadapt` in this process: what they wrote, and how they ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from support.laboratory import COMMAND, run_command


class Said(NamedTuple):
    """What a command wrote, and its exit code."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


def tiny(out: Path, *changes: str, options: Sequence[str] = ()) -> list[str]:
    """The arguments of a tiny run."""
    return run_command(out, *changes, options=options)[len(COMMAND) :]
