"""Define what a job is, what it says on its way and how it ends, and do jobs in this process."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Leg(NamedTuple):
    """Says how many of its legs a job has done, and its last measurements."""

    done: int
    legs: int
    row: dict[str, float]


class Note(NamedTuple):
    """Carries a sentence of a job that whoever looks at it should know."""

    words: str


class Done(NamedTuple):
    """Says that a job has ended and returned this."""

    value: Any


class Failed(NamedTuple):
    """Says that a job has raised this kind of error, or its process was lost. In words: not every error can be sent."""

    kind: str
    words: str
    traceback: str


Event = Leg | Note | Done | Failed
Report = Callable[[Leg | Note], None]
OnEvent = Callable[[int, Event], None]
"""Is told the index of a job, and what happened to it."""


class Job(Protocol):
    """Is something to do that can be pickled.

    Attributes:
        label: Its name for people.
        error: The file that gets the traceback if it fails.
    """

    @property
    def label(self) -> str: ...  # noqa: D102

    @property
    def error(self) -> Path: ...  # noqa: D102

    def __call__(self, report: Report) -> Any:
        """Do it, and say after each leg how far it is, and what else there is to know."""
        ...


class Engine(Protocol):
    """Does jobs."""

    def work(self, jobs: Sequence[Job], on_event: OnEvent) -> list[Done | Failed]:
        """Do all jobs, begun in this order, and return how each ended. A job that fails leaves the others alone."""
        ...


class Here:
    """Does jobs in this process, one after the other."""

    def work(self, jobs: Sequence[Job], on_event: OnEvent) -> list[Done | Failed]:
        """Do all jobs."""
        return [
            kept(job, attempt(job, partial(on_event, index)), partial(on_event, index))
            for index, job in enumerate(jobs)
        ]


@contextmanager
def here() -> Iterator[Engine]:
    """Give the engine of this process.

    Yields:
        The engine.
    """
    yield Here()


def attempt(job: Job, report: Report) -> Done | Failed:
    """Do the job, whatever comes of it."""
    try:
        return Done(job(report))
    except Exception as error:
        return Failed(type(error).__name__, str(error), traceback.format_exc())


def kept(job: Job, end: Done | Failed, on_event: Callable[[Event], None]) -> Done | Failed:
    """Write the traceback of a job that failed where it belongs, tell how it ended, and return that."""
    if isinstance(end, Failed):
        with contextlib.suppress(OSError):  # on a full disk the words alone must do
            job.error.parent.mkdir(parents=True, exist_ok=True)
            job.error.write_text(end.traceback, encoding="utf-8")
    on_event(end)
    return end
