"""Take the runs of an experiment forward, leg by leg, so that each can be stopped at any moment and continued."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from blockadapt import BlockAdam
from blockadapt_experiments.contenders.catalogue import LOST
from blockadapt_experiments.core import clock
from blockadapt_experiments.core.config import flat, plain, run_settings
from blockadapt_experiments.core.experiment import Task
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.data.fingerprints import data_read
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.parts import ORIGINS, Origin, code_of, load_origins
from blockadapt_experiments.results.measurements import Outcome, Row, RunKey
from blockadapt_experiments.results.tensorboard import Board
from blockadapt_experiments.running.environment import (
    available_cores,
    environment,
    peak_memory_bytes,
    reset_peak_memory,
)
from blockadapt_experiments.running.jobs import Done, Failed, Leg, Note, Report
from blockadapt_experiments.running.records import RunRecord

SAVING_SHARE = 0.05
"""Checkpoints are written after a leg, but take no more than this share of the time."""

PATIENCE = 1.0
"""Seconds between two looks at runs that other processes have in hand."""


Values = tuple[tuple[str, float], ...]
"""Settings of the optimizer by name, where more than the learning rate was tuned."""


class Choice(NamedTuple):
    """Says what tuning chooses for an arm.

    Attributes:
        lr: The learning rate.
        values: What else was tuned.
    """

    lr: float
    values: Values = ()

    @property
    def label(self) -> str:
        """Name it, for people and for its folder.

        >>> Choice(0.01, (("weight_decay", 1e-4),)).label
        'lr=0.01,weight_decay=0.0001'
        """
        return ",".join(f"{name}={value:g}" for name, value in (("lr", self.lr), *self.values))


@dataclass(frozen=True)
class Request:
    """Says what `blockadapt run` was asked for.

    Attributes:
        experiment: Its name.
        scale: At which scale.
        settings: With which settings.
        out: Where the records go.
        data_dir: Where data sets lie; None for the hub.
        threads: That each run may use.
        tensorboard: Whether to write TensorBoard's logs too.
    """

    experiment: str
    scale: str
    settings: Settings
    out: Path
    data_dir: Path | None = None
    threads: int = 1
    tensorboard: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, load what is not built in first: the settings may be of a class of it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _request, ([ORIGINS[name] for name in self.code()], pickle.dumps(fields))

    def code(self, arm: str | None = None) -> dict[str, str]:
        """Give the digest of all code that is not built in, by the name of its part; of one arm, or of all."""
        arms = self.settings.optimizers if arm is None else (arm,)
        names = [self.experiment, *(self.settings.arm(name).optimizer for name in arms)]
        return code_of([*names, str(getattr(self.settings, "data", ""))])

    def task(self, key: RunKey, lr: float, tuning: bool = False, values: Values = ()) -> Task:
        """Make the run."""
        settings = self.settings_of(key.arm, values)
        return get_experiment(self.experiment).task(settings, key, lr, self.data_dir, tuning)

    def settings_of(self, arm: str, values: Values) -> Settings:
        """Give the settings in which this arm has these values for its own."""
        return self.settings.changed(arm, dict(values)) if values else self.settings

    def arms(self) -> list[tuple[str, str]]:
        """Pair every optimizer with every variant."""
        variants = get_experiment(self.experiment).variants(self.settings)
        return [(arm, variant) for variant in variants for arm in self.settings.optimizers]

    def runs(self) -> list[RunKey]:
        """List all runs: every arm with the first seed, then with the next, so that a part of them can be compared."""
        return [RunKey(arm, variant, seed) for seed in self.settings.seeds for arm, variant in self.arms()]

    def lr(self, arm: str) -> float:
        """Give the learning rate where none was tuned; 0 for an arm that is no optimizer."""
        return self.settings.first_lr(arm)


def _request(origins: Sequence[Origin], fields: bytes) -> Request:
    load_origins(origins)
    return Request(**pickle.loads(fields))  # from the process that this one works for


@dataclass(frozen=True)
class RunJob:
    """Does one run, in any process.

    Attributes:
        request: The experiment.
        key: Which run.
        choice: The learning rate, and what else was tuned.
        tuning: Whether it is a trial: a run on a part of the training data, which never sees test data.
    """

    request: Request
    key: RunKey
    choice: Choice
    tuning: bool = False

    @property
    def record(self) -> RunRecord:
        """Return its record on disk."""
        return RunRecord(self.request.out, self.key, self.choice.label if self.tuning else "")

    @property
    def label(self) -> str:
        """Name it for people."""
        return f"tuning, {self.key.label}, {self.choice.label}" if self.tuning else self.key.label

    @property
    def error(self) -> Path:
        """Tell where the traceback goes if it fails."""
        return self.record.error

    def __call__(self, report: Report) -> Row | None:
        """Do what is left of it; return its last row, or None if another process is at it."""
        record = self.record
        with record.locked() as ours:
            if not ours:
                return None
            if not record.finished:
                self._continue(record, report)
            record.clear()  # the process may have died between a result and this
            rows = record.rows()
            if self._boarded:
                self._board(record, rows).close()
            return rows[-1] if rows else {}

    @property
    def _boarded(self) -> bool:
        return self.request.tensorboard and not self.tuning

    def _board(self, record: RunRecord, rows: Sequence[Row]) -> Board:
        folder = self.request.out / "tensorboard" / record.folder.relative_to(self.request.out / "runs")
        return Board(folder, get_experiment(self.request.experiment).axis, rows)

    def _continue(self, record: RunRecord, report: Report) -> None:
        about = {
            "experiment": self.request.experiment,
            "scale": self.request.scale,
            **self.key._asdict(),
            "lr": self.choice.lr,
            "tuning": self.tuning,
            "settings": run_settings(plain(self.request.settings_of(self.key.arm, self.choice.values)), self.key.arm),
        }
        before = record.about
        # A run that was begun keeps its number of threads, on which its last digits depend.
        with threads(before["environment"]["threads"] if before else self.request.threads), clock.own_threads():
            warm_up(get_experiment(self.request.experiment).dtype)
            reset_peak_memory()
            torch.manual_seed(self.key.seed)
            here = environment()
            with data_read() as data:
                task = self.request.task(self.key, self.choice.lr, self.tuning, self.choice.values)
            code = self.request.code(self.key.arm)
            state, troubles = record.resume({**about, "data_sha256": data, "code": code, "environment": here})
            leg = state["leg"] if state else 0
            then = before["environment"] if before and state else here  # what begins again is all of here
            for words in _told(troubles, leg, here, then):
                record.note(leg, words)
                report(Note(words))
            board = self._board(record, record.rows()) if self._boarded else None
            _take_forward(task, state, record, report, board)


def _told(troubles: Sequence[str], leg: int, here: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """Say what is to be known about a run that goes on after this leg: damaged records, and another environment.

    Yields:
        A sentence for each.
    """
    where = f"goes on after leg {leg}" if leg else "begins again"
    if troubles:
        yield f"{' '.join(troubles)} It {where}."
    then = flat(before)
    changed = [f"{key} {value}, not {then.get(key)}" for key, value in flat(here).items() if then.get(key) != value]
    if changed:
        yield f"It {where} with {'; '.join(changed)}."


def _take_forward(
    task: Task, state: Mapping[str, Any] | None, record: RunRecord, report: Report, board: Board | None
) -> None:
    """Do what is left, from where this state was taken to the end."""
    done, peak = 0, 0
    last: Row = {}
    if state:
        done, peak = state["leg"], state["peak_memory_bytes"]
        task.load_state_dict(state["task"])
        torch.set_rng_state(state["generator"])
    saved, cost, diverged = time.perf_counter(), 0.0, False
    report(Leg(done, task.legs, last))
    while done < task.legs and not diverged:
        start = clock.seconds()
        rows, diverged = advance(task)
        done += 1
        record.append(done, rows, clock.seconds() - start)
        if board:
            board.add(rows)
        last = dict(rows[-1]) if rows else last
        peak = max(peak, peak_memory_bytes())
        saving = time.perf_counter()
        if saving - saved >= cost / SAVING_SHARE and not diverged:
            generator = torch.get_rng_state()
            record.save({"leg": done, "peak_memory_bytes": peak, "generator": generator, "task": task.state_dict()})
            saved = time.perf_counter()
            cost = saved - saving
        report(Leg(done, task.legs, last))
    outcome = task.outcome()
    if board:
        board.close()
    numbers = {**outcome.numbers, "diverged": 1} if diverged else outcome.numbers
    record.finish(Outcome(numbers, outcome.arrays), max(peak, peak_memory_bytes()))


@lru_cache
def warm_up(dtype: torch.dtype = torch.float32) -> None:
    """Load what the first step of a process loads: that takes seconds, and is no part of a run's time.

    It is the kernel, which may have to be compiled, and the parts of torch that its `zero_grad` asks for.
    """
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    weight.grad = torch.zeros_like(weight)
    optimizer = BlockAdam([weight])
    optimizer.step()
    optimizer.zero_grad()


def advance(task: Task) -> tuple[Sequence[Row], bool]:
    """Do the next leg; return its rows, and whether a gradient that is not finite has ended the run.

    Meanwhile numbers too small for all their digits count as zero: a saturated net makes many of them, and products
    with them take a hundred times as long.
    """
    torch.set_flush_denormal(True)
    try:
        return task.advance(), False
    except LOST:
        return (), True
    finally:
        torch.set_flush_denormal(False)


def most_jobs() -> tuple[int, str]:
    """Say how many runs this machine does at once, and one for each of what: a GPU where it has some, else a core."""
    gpus = torch.cuda.device_count()
    return (gpus, "GPUs") if gpus else (available_cores(), "cores")


def threads_for(jobs: int) -> int:
    """Give the threads for each of `jobs` runs at once: one, or what OMP_NUM_THREADS asks for and the cores allow.

    With 0 jobs the runs are on other machines, whose cores are not counted.

    Small nets gain nothing from a second thread and lose much where the machine is busy; and results whose last digits
    depend on the number of threads are then the same on every machine. `--jobs` uses the other cores.
    """
    asked = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1
    return max(1, min(asked, available_cores() // jobs)) if jobs else asked


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_jobs(request: Request, choices: Mapping[tuple[str, str], Choice]) -> list[RunJob]:
    """Make all runs jobs; `choices` has what was tuned, by arm and variant."""
    return [
        RunJob(request, key, choices.get((key.arm, key.variant), Choice(request.lr(key.arm)))) for key in request.runs()
    ]


Do = Callable[[Sequence[RunJob]], Sequence[Done | Failed]]
"""Does jobs, and returns how each ended."""


def do_all(jobs: Sequence[RunJob], do: Do, on_wait: Callable[[Sequence[RunJob]], None]) -> list[Done | Failed]:
    """Do jobs until each has ended, here or in another process that has it in hand; return how each ended.

    A run that another process leaves unfinished is taken over. `on_wait` is told which runs there are to wait for, when
    nothing else is left to do.
    """
    ends: dict[int, Done | Failed] = {}
    left = list(range(len(jobs)))
    while left:
        ends.update(zip(left, do([jobs[index] for index in left]), strict=True))
        left = [index for index in left if ends[index] == Done(None)]
        if left:
            on_wait([jobs[index] for index in left])
        while left and all(jobs[index].record.held for index in left):
            time.sleep(PATIENCE)
    return [ends[index] for index in range(len(jobs))]


def check(jobs: Sequence[RunJob]) -> dict[str, str]:
    """Make one run of each arm and throw it away, so that what cannot work is refused before anything has begun.

    Returns:
        The digest of every data set that was read, by its name.
    """
    with data_read() as data:
        for job in {(job.key.arm, job.key.variant): job for job in jobs}.values():
            job.request.task(job.key, job.choice.lr)
    return data
