"""Commands of `blockadapt`, in this process or in a terminal: what they wrote, and how they ended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
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


def in_a_terminal(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command with a pseudo-terminal as its output; return its exit code and all that it wrote, colours off."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 65536):
            written += piece
    except OSError:  # how Linux says that the other end has closed
        pass
    finally:
        os.close(ours)
    return process.wait(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode("utf-8"))
