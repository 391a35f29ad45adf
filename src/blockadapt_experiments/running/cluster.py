"""Do jobs on a cluster of Dask, which is on this machine or anywhere.

A worker of the cluster is a process that does one job at a time. What a job says travels to us as an event of Dask. If
the process of a job dies, Dask gives the job to another worker, where its record is: on a disk that all workers share.
If we die or are interrupted, nobody waits for our jobs any more: the processes of our own cluster end with us, and a
worker of another cluster stops after the leg that it is at.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Future, KilledWorker, LocalCluster, Status, get_worker
from distributed import TimeoutError as LateError

from blockadapt_experiments.running.jobs import Done, Engine, Event, Failed, Job, Leg, Note, OnEvent, attempt, kept

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

ANSWER = 10.0
"""Seconds within which a scheduler must answer."""

LOOK = 1.0
"""Seconds between two looks at how many workers there are."""

RESTART = 3600.0
"""Seconds that a lost process of our own may take to come back. After Dask's 15, which are few on a busy machine, the
cluster would give the process up and start no other. To ask for one then does not help: the two collide.
"""

DEATHS = 3
"""Processes that a job may lose; with one more it has failed, for it may be what kills them."""

_alone = threading.Lock()
"""Whoever holds it is the only job of this process: torch has one generator and one number of threads for all."""


@contextmanager
def local_cluster(workers: int, threads: int, gpus: int = 0) -> Iterator[Engine]:
    """Start processes on this machine; they end with the block, and with this process whatever ends it.

    Args:
        workers: How many.
        threads: What each may use.
        gpus: How many there are. Each process gets one of them, in turn.

    Yields:
        The engine that does jobs there.
    """
    options: dict[str, Any] = {
        "distributed.scheduler.allowed-failures": DEATHS,
        "distributed.deploy.lost-worker-timeout": RESTART,
        "distributed.nanny.pre-spawn-environ": {},  # Dask would set these in this process too
    }
    with dask.config.set(options), _quiet(), _exit_on_sigterm(), contextlib.ExitStack() as stack:
        with _interrupts_blocked():  # for all threads and processes of the cluster, now and later
            cluster = LocalCluster(
                n_workers=0,
                threads_per_worker=1,
                processes=True,
                memory_limit=0,
                scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
                silence_logs=logging.CRITICAL,
                env=dict.fromkeys(THREAD_VARIABLES, str(threads)),
            )
            stack.callback(_end, cluster)
            client = stack.enter_context(Client(cluster, set_as_default=False))
        yield _Cluster(client, lambda jobs: _staff(cluster, min(workers, jobs)), gpus)


@contextmanager
def remote_cluster(address: str, folder: Path) -> Iterator[Engine]:
    """Use the cluster whose scheduler has this address.

    Args:
        address: As `dask scheduler` prints it, such as tcp://10.0.0.1:8786.
        folder: Where the jobs leave their records: every worker must see it.

    Yields:
        The engine that does jobs there.

    Raises:
        ValueError: No scheduler answers there, or it has workers that would do several jobs at once.
    """
    with _quiet():
        try:
            client = Client(address, set_as_default=False, timeout=ANSWER)
        except (OSError, ValueError, TypeError) as error:
            rule = f"the address of a Dask scheduler that answers ({type(error).__name__})"
            raise ValueError(f"run: `cluster` must be {rule}, got {address!r}.") from None
        with client:
            for worker, threads in client.nthreads().items():
                if threads != 1:
                    rule = "a scheduler whose workers have one thread each (`dask worker --nthreads 1`)"
                    raise ValueError(f"run: `cluster` must be {rule}, got {threads} threads at {worker}.")
            yield _Cluster(client, lambda jobs: None, folder=folder)


class _Cluster:
    """Does jobs through this client, no more at once than there are workers."""

    def __init__(self, client: Client, staff: Callable[[int], None], gpus: int = 0, folder: Path | None = None) -> None:
        self._client, self._staff, self._gpus, self._folder = client, staff, gpus, folder

    def work(self, jobs: Sequence[Job], on_event: OnEvent) -> list[Done | Failed]:
        """Do all jobs."""
        told: queue.SimpleQueue[tuple[int, bytes | Future[Any]]] = queue.SimpleQueue()
        topic = f"blockadapt-{uuid.uuid4().hex}"
        self._client.subscribe_topic(topic, lambda event: told.put(event[1]))
        waiting = list(range(len(jobs)))[::-1]
        under_way: dict[int, Future[Any]] = {}
        ends: dict[int, Done | Failed] = {}
        look = time.monotonic()
        try:
            while waiting or under_way:
                if time.monotonic() >= look:
                    self._staff(len(jobs))
                    # A worker that dies makes all its jobs suspect, so none gets a second one to keep. While no job
                    # waits, the scheduler is not asked: if it is gone, the futures of the jobs tell it.
                    workers = len(self._client.nthreads()) if waiting else 0
                    if not workers and len(waiting) == len(jobs) and self._folder:
                        on_event(waiting[-1], Note("It waits for a worker of the cluster."))
                    for _ in range(min(len(waiting), max(1, workers) - len(under_way))):
                        index = waiting.pop()
                        under_way[index] = self._begin(jobs[index], index, topic)
                        under_way[index].add_done_callback(partial(_put, told, index))
                    look = time.monotonic() + LOOK
                try:
                    index, what = told.get(timeout=LOOK)
                except queue.Empty:
                    continue
                if isinstance(what, Future):
                    end = _end_of(what)
                    if end is None:
                        _put(told, index, what)
                        continue
                    del under_way[index]
                    ends[index] = kept(jobs[index], end, partial(on_event, index))
                    look = time.monotonic()
                elif index in under_way:
                    event: Event = pickle.loads(what)
                    on_event(index, event)
        finally:
            self._client.unsubscribe_topic(topic)
            self._client.cancel(list(under_way.values()), force=True)
        return [ends[index] for index in range(len(jobs))]

    def _begin(self, job: Job, index: int, topic: str) -> Future[Any]:
        errand = pickle.dumps(job)
        key = f"{topic}-{index}"
        return self._client.submit(_errand, errand, index, topic, self._gpus, self._folder, key=key, pure=False)


def _put(told: queue.SimpleQueue[tuple[int, bytes | Future[Any]]], index: int, future: Future[Any]) -> None:
    told.put((index, future))


def _end_of(future: Future[Any]) -> Done | Failed | None:
    """Say how a job ended whose future is done; None if its worker died with the answer, so that it is done again."""
    try:
        end: Done | Failed = future.result(timeout=LOOK)
    except LateError:
        return None
    except KilledWorker:
        words = f"a worker died with it {DEATHS + 1} times, or as often as the scheduler allows"
        return Failed("a lost process", words, f"{words}\n".capitalize())
    except Exception as error:  # as a scheduler that is gone
        return Failed("a lost cluster", f"{type(error).__name__} {error}", f"{type(error).__name__}: {error}\n")
    return end


def _errand(errand: bytes, index: int, topic: str, gpus: int, folder: Path | None) -> Done | Failed:
    """Do a job in a worker."""
    worker = get_worker()
    key = worker.get_current_task()

    def report(event: Leg | Note) -> None:
        task = worker.state.tasks.get(key)
        if task is None or task.state == "cancelled":
            raise InterruptedError("nobody waits for this job any more")
        worker.log_event(topic, (index, pickle.dumps(event)))

    if folder is not None and not folder.is_dir():
        words = f"the worker on {socket.gethostname()} does not see {folder}, which all workers must share"
        return Failed("FileNotFoundError", words, f"{words}\n")
    if gpus:  # before anything asks for one; the next job of this process finds the one alone
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_for(int(worker.name), gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    with _alone:
        return attempt(_Unpacked(errand), report)


def gpu_for(worker: int, gpus: int, visible: str | None) -> str:
    """Choose one of the GPUs for a worker, under the name that CUDA_VISIBLE_DEVICES has for it, if that is set.

    >>> [gpu_for(worker, 2, visible) for visible in (None, "2,3", "3") for worker in (0, 1)]
    ['0', '1', '2', '3', '3', '3']
    """
    names = visible.split(",")[:gpus] if visible else [str(number) for number in range(gpus)]
    return names[worker % len(names)].strip()


class _Unpacked:
    """Unpickles a job where it is done, so that what goes wrong there is told like any failure."""

    label, error = "", Path()

    def __init__(self, errand: bytes) -> None:
        self._errand = errand

    def __call__(self, report: Any) -> Any:
        return pickle.loads(self._errand)(report)


def _staff(cluster: LocalCluster, workers: int) -> None:
    """See to it that a cluster of our own has so many processes, or will have.

    Dask starts a process that has died anew, but not one that dies before Dask knows that it has begun.
    """
    cluster.sync(_let_go, cluster)
    cluster.scale(workers)


async def _let_go(cluster: LocalCluster) -> None:
    """Forget the processes that Dask has given up, so that others take their places."""
    for name, nanny in [*cluster.workers.items()]:
        if nanny.status in (Status.failed, Status.closed):
            del cluster.workers[name]
            await nanny.close()


def _end(cluster: LocalCluster) -> None:
    """Kill the processes of a cluster; nothing is lost that a checkpoint has not."""
    for nanny in cluster.workers.values():
        nanny.auto_restart = False
        if nanny.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(nanny.pid, signal.SIGKILL)
    cluster.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Dask's log to itself: what matters is told by events."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in ("distributed", "distributed.client")}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Keep Ctrl-C, which a terminal sends to all, from threads and processes that are started here: we decide."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """End this process in order when it is asked to, so that it ends its own processes first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
