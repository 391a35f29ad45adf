"""Do jobs one after another in this process, or several at once in processes of their own.

A worker takes one job after the other, so that a short job does not pay for a new process. Workers are spawned, not
forked: torch's threads do not survive a fork. A job that fails, or even takes its process with it, leaves the others
alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Leg(NamedTuple):
    """A job has done so many of its legs, and these are its last measurements."""

    done: int
    legs: int
    row: dict[str, float]


class Note(NamedTuple):
    """Something that whoever looks at a job should know, in a sentence."""

    words: str


class Done(NamedTuple):
    """A job has ended and returned this."""

    value: Any


class Failed(NamedTuple):
    """A job has raised this kind of error, or its process has ended. In words: not every error can be sent."""

    kind: str
    words: str
    traceback: str


Event = Leg | Note | Done | Failed
Report = Callable[[Leg | Note], None]


class Job(Protocol):
    """Something to do; it can be pickled.

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


def work(
    jobs: Sequence[Job], workers: int, threads: int, on_event: Callable[[int, Event], None]
) -> list[Done | Failed]:
    """Do all jobs, and return how each ended.

    Args:
        jobs: In the order in which they are begun.
        workers: How many at once; 1 does them in this process.
        threads: That each may use; processes are begun with the environment that says so.
        on_event: Told the index of a job and what happened to it.
    """
    ends: dict[int, Done | Failed] = {}

    def listen(index: int, event: Event) -> None:
        if isinstance(event, Failed):
            with contextlib.suppress(OSError):  # on a full disk the words alone must do
                jobs[index].error.parent.mkdir(parents=True, exist_ok=True)
                jobs[index].error.write_text(event.traceback, encoding="utf-8")
        if isinstance(event, Done | Failed):
            ends[index] = event
        on_event(index, event)

    if workers == 1:
        for index, job in enumerate(jobs):
            listen(index, _attempt(job, partial(listen, index)))
    else:
        _share_out(jobs, workers, threads, listen)
    return [ends[index] for index in range(len(jobs))]


def _share_out(jobs: Sequence[Job], workers: int, threads: int, on_event: Callable[[int, Event], None]) -> None:
    waiting = list(enumerate(jobs))[::-1]
    crew: dict[Connection, _Worker] = {}
    try:
        for _ in range(min(workers, len(jobs))):
            _begin(crew, threads, waiting)
        while crew:
            for pipe in wait(list(crew)):
                assert isinstance(pipe, Connection)
                _listen(crew, pipe, threads, waiting, on_event)
    finally:
        for worker in crew.values():
            worker.process.kill()  # nothing is lost that a checkpoint has not
            worker.process.join()


class _Worker:
    """A process, and the index of the job that it has."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.index = -1


def _begin(crew: dict[Connection, _Worker], threads: int, waiting: list[tuple[int, Job]]) -> None:
    """Start a process and give it the next job."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_worker, args=(theirs,))
    with _environment(dict.fromkeys(THREAD_VARIABLES, str(threads))), _without_interrupts():
        process.start()
    theirs.close()
    crew[ours] = _Worker(process)
    _hand_out(crew, ours, waiting)


def _hand_out(crew: dict[Connection, _Worker], pipe: Connection, waiting: list[tuple[int, Job]]) -> None:
    """Give the next job to this worker, or send it home."""
    if waiting:
        crew[pipe].index, job = waiting.pop()
        with contextlib.suppress(BrokenPipeError):  # it died idle: the next `recv` says so
            pipe.send(job)
    else:
        worker = crew.pop(pipe)
        pipe.close()
        worker.process.join()


def _listen(
    crew: dict[Connection, _Worker],
    pipe: Connection,
    threads: int,
    waiting: list[tuple[int, Job]],
    on_event: Callable[[int, Event], None],
) -> None:
    worker = crew[pipe]
    try:
        event: Event = pipe.recv()
    except (EOFError, ConnectionError):
        del crew[pipe]
        worker.process.join()
        words = f"exit code {worker.process.exitcode}"
        on_event(worker.index, Failed("a lost process", words, f"The process ended with {words}, without a word.\n"))
        if waiting:
            _begin(crew, threads, waiting)
        return
    on_event(worker.index, event)
    if isinstance(event, Done | Failed):
        _hand_out(crew, pipe, waiting)


def _attempt(job: Job, report: Report) -> Done | Failed:
    try:
        return Done(job(report))
    except Exception as error:
        return Failed(type(error).__name__, str(error), traceback.format_exc())


def _worker(pipe: Connection) -> None:
    """Do jobs from the pipe until it is closed, or until the parent dies."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_attempt(pipe.recv(), pipe.send))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process started here never sees Ctrl-C, which a terminal sends to all: its parent decides."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
