"""A cluster of Dask whose scheduler and workers are processes of their own, as on several machines."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

DASK = [sys.executable, "-m", "dask"]


class Separate(NamedTuple):
    """Its scheduler's address, and its processes."""

    address: str
    scheduler: subprocess.Popen[str]
    workers: list[subprocess.Popen[str]]


@contextmanager
def separate_cluster(environment: Mapping[str, str], *options: str, workers: int = 2) -> Iterator[Separate]:
    """Start a scheduler and workers, with these options; end them with the block."""
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*DASK, *words], env=dict(environment), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            )
            stack.callback(process.stderr.close)  # type: ignore[union-attr]
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        scheduler = start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        assert scheduler.stderr is not None
        address = ""
        while not address:
            line = scheduler.stderr.readline()
            assert line, "the scheduler has ended"
            found = re.search(r"Scheduler at: +(tcp://\S+)", line)
            address = found[1] if found else ""
        alone = ("--nthreads", "1", "--no-nanny", "--memory-limit", "0", "--no-dashboard")
        crew = [start("worker", address, *alone, *options) for _ in range(workers)]
        yield Separate(address, scheduler, crew)
