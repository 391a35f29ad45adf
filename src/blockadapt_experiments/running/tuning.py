"""Find learning rates: for each arm the best of one grid, judged on validation data, never on test data.

Every arm tries the same learning rates, `trials` of them evenly spaced on a log scale from `low` to `high`. A grid
rather than a sampler that learns, because every arm then has the same chances, and because the outcome does not depend
on the order in which trials end: one process or ten machines find the same. The value of a trial is the objective,
averaged over the last 20% of its measurements and over seeds that the experiment itself does not use; a trial that
diverges has the worst there is. Of equal ones the smaller learning rate wins.

Each arm is a study of Optuna, in a database that several processes and machines may share. A process claims a trial
there and gives signs of life while it works; a trial whose process has died is put up again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import torch
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.trial import TrialState
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from blockadapt import __version__
from blockadapt.validation import refusal
from blockadapt_experiments.core.config import plain, run_settings
from blockadapt_experiments.core.settings import TuneSettings
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.results.measurements import Row, RunKey
from blockadapt_experiments.results.summary import TAIL
from blockadapt_experiments.running.environment import git_state
from blockadapt_experiments.running.runner import Request, advance, threads
from blockadapt_experiments.running.storage import is_postgres, with_driver, without_password
from blockadapt_experiments.running.workers import Done, Failed, Leg, Report

HEARTBEAT = 5
"""Seconds between two signs of life."""

GRACE = 15
"""Seconds without one after which a trial is taken for dead. If it was not, it is done twice, to the same value."""

PATIENCE = 1.0
"""Seconds between two looks at trials that others have claimed."""

PAUSES = (0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds between attempts to open a database that another process is just making."""

POINT = "point"
"""The attribute of a trial that says which point of the grid it is."""

ALIVE = "alive"
"""The attribute of a trial that has given its first sign of life; Optuna never misses a trial that has given none."""

MADE_WITH = "made with"
"""The attribute of a trial that says with which code and threads its value was made."""

TAKEN = (TrialState.COMPLETE, TrialState.RUNNING)


def grid(tune: TuneSettings) -> list[float]:
    """The learning rates to try."""
    rounded = (float(f"{lr:.3g}") for lr in np.geomspace(tune.low, tune.high, tune.trials)[1:-1])
    return [tune.low, *(min(max(lr, tune.low), tune.high) for lr in rounded), tune.high]


@dataclass(frozen=True)
class TrialJob:
    """The next trial of one arm that nobody has claimed, to be done in any process."""

    request: Request
    storage: str
    data: str
    arm: str
    variant: str

    @property
    def label(self) -> str:
        """Its name for people."""
        return ", ".join(part for part in ("tuning", self.arm, self.variant) if part)

    @property
    def error(self) -> Path:
        """Where the traceback goes if it fails."""
        return self.request.out / "tuning" / self.arm / (self.variant or "-") / "error.txt"

    @property
    def low_is_better(self) -> bool:
        """Which way the objective is better."""
        experiment = get_experiment(self.request.experiment)
        return next(metric.better for metric in experiment.metrics if metric.key == experiment.objective) != "high"

    def study(self) -> optuna.Study:
        """The study of this arm, whose name changes with the settings and the data that its values depend on.

        They depend on code and threads a little too: each trial keeps with which it was made.
        """
        everything = plain(self.request.settings)
        made = {"tune": everything["tune"], "": self.data, "code": self.request.code(self.arm)}
        settings = {**run_settings(everything, self.arm), **made}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        parts = (self.request.experiment, self.request.scale, self.arm, self.variant, digest)
        return optuna.create_study(
            storage=_storage(self.storage),
            study_name=" ".join(part for part in parts if part),
            direction="minimize" if self.low_is_better else "maximize",
            sampler=optuna.samplers.RandomSampler(seed=0),  # never asked: every trial is put up with its learning rate
            load_if_exists=True,
        )

    def __call__(self, report: Report) -> Row | None:
        """Do it; returns the learning rate with its value, or None if there was nothing to claim."""
        study, rates = self.study(), grid(self.request.settings.tune)
        tried: list[Row] = []

        def objective(trial: optuna.Trial) -> float:
            point = trial.user_attrs.get(POINT)
            if point is None or _claimed_before(study, trial, point):  # others were faster
                raise optuna.TrialPruned
            _storage(self.storage).record_heartbeat(trial._trial_id)
            trial.set_user_attr(ALIVE, True)
            trial.set_user_attr(MADE_WITH, _made_with(self.request.threads))
            trial.suggest_float("lr", rates[0], rates[-1], log=True)  # for those who read the database
            value = self._value(rates[point], report)
            tried.append({"lr": rates[point], "value": value})
            return value

        try:
            if study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                study.optimize(objective, n_trials=1)
        except ValueError:
            if not tried:
                raise
            return None  # the machine slept past the grace and the trial was declared dead: it will be put up again
        return tried[0] if tried else None

    def _value(self, lr: float, report: Report) -> float:
        """The objective, averaged over seeds; infinitely bad if one of them diverges."""
        seeds = self.request.settings.tune.seeds
        values = []
        with threads(self.request.threads):
            for seed in seeds:
                values.append(self._objective(lr, seed, report))
                if not math.isfinite(values[-1]):
                    return math.inf if self.low_is_better else -math.inf
        return sum(values) / len(values)

    def _objective(self, lr: float, seed: int, report: Report) -> float:
        """The objective at the end of one run; nan if it diverges."""
        key = get_experiment(self.request.experiment).objective
        torch.manual_seed(seed)
        task = self.request.task(RunKey(self.arm, self.variant, seed), lr, tuning=True)
        measured: list[float] = []
        for leg in range(task.legs):
            rows, diverged = advance(task)
            measured += [float(row[key]) for row in rows if key in row]
            if diverged or not all(map(math.isfinite, measured)):
                return math.nan
            report(Leg(leg + 1, task.legs, {"lr": lr}))
        if task.outcome().numbers.get("diverged"):
            return math.nan
        return float(np.mean(measured[-math.ceil(TAIL * len(measured)) :]))


def _claimed_before(study: optuna.Study, trial: optuna.Trial, point: int) -> bool:
    """Whether another process has put up the same point at the same time, and its trial comes first."""
    taken = study.get_trials(deepcopy=False, states=TAKEN)
    return any(other.number < trial.number and other.user_attrs.get(POINT) == point for other in taken)


@lru_cache(maxsize=1)
def _storage(url: str) -> RDBStorage:
    """The database. Of two that first open it at once, one may find tables half made by the other: it tries again."""
    try:
        for pause in PAUSES:
            with contextlib.suppress(DatabaseError):
                return _opened(url)
            time.sleep(pause)
        return _opened(url)
    except (SQLAlchemyError, ImportError) as error:
        if isinstance(error, ImportError) and is_postgres(url):
            install = 'pip install "blockadapt[postgres]"'
            raise ValueError(f"run: `storage` needs the driver of PostgreSQL; install it with {install}.") from error
        rule = f"the URL of a database that can be opened ({type(error).__name__})"
        raise ValueError(refusal("run", "storage", rule, without_password(url))) from error


def _opened(url: str) -> RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}  # others may be writing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return RDBStorage(with_driver(url), engine_kwargs=options, heartbeat_interval=HEARTBEAT, grace_period=GRACE)


Tuned = dict[str, dict[str, dict[str, Any]]]
"""What was found, by arm and variant."""


def tune(
    request: Request,
    storage: str,
    data: Mapping[str, str],
    do: Callable[[Sequence[TrialJob]], Sequence[Done | Failed]],
    on_wait: Callable[[int], None],
) -> Tuned:
    """Try all learning rates of all arms, and return what was found, as `tuned.json` has it.

    Args:
        request: The experiment.
        storage: URL of the database.
        data: The digest of every data set of the experiment, by its name.
        do: Does jobs, and returns how each ended.
        on_wait: Told how many trials others have claimed, while there is nothing else left to do.

    Returns:
        What was found. An arm of which a trial has failed is left out.
    """
    digest = json.dumps(dict(data), sort_keys=True)
    jobs = [TrialJob(request, storage, digest, arm, variant) for arm, variant in request.arms()]
    broken: set[int] = set()
    while True:
        left = {index: _put_up(job) for index, job in enumerate(jobs) if index not in broken}
        turns = range(request.settings.tune.trials)
        todo = [index for turn in turns for index in left if turn < left[index].waiting]  # all arms get on alike
        if todo:
            ends = do([jobs[index] for index in todo])
            broken |= {index for index, end in zip(todo, ends, strict=True) if isinstance(end, Failed)}
        elif claimed := sum(trials.claimed for trials in left.values()):
            on_wait(claimed)
            time.sleep(PATIENCE)
        else:
            break
    found: Tuned = {}
    for index in left:
        found.setdefault(jobs[index].arm, {})[jobs[index].variant] = _best(jobs[index])
    return found


class Left(NamedTuple):
    """Trials that can be claimed, and those that are."""

    waiting: int
    claimed: int


def _put_up(job: TrialJob) -> Left:
    """Put up every point of the grid that is not done, claimed or waiting; also those whose process has died."""
    study = job.study()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        fail_stale_trials(study)
        _fail_stillborn(study, _storage(job.storage))
    trials = study.get_trials(deepcopy=False, states=(*TAKEN, TrialState.WAITING))
    found = {trial.user_attrs.get(POINT): trial.state for trial in trials}
    for point, lr in enumerate(grid(job.request.settings.tune)):
        if point not in found:
            study.enqueue_trial({"lr": lr}, user_attrs={POINT: point})
            found[point] = TrialState.WAITING
    states = list(found.values())
    return Left(states.count(TrialState.WAITING), states.count(TrialState.RUNNING))


def _fail_stillborn(study: optuna.Study, storage: RDBStorage) -> None:
    """Give up trials whose process has died between the claim and the first sign of life."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        started = trial.datetime_start or datetime.now()
        if ALIVE not in trial.user_attrs and datetime.now() - started > timedelta(seconds=GRACE):
            with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def _best(job: TrialJob) -> dict[str, Any]:
    """The best learning rate of an arm, with what else was tried; a value is None where the run diverged."""
    rates = grid(job.request.settings.tune)
    done = job.study().get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    values = {trial.user_attrs[POINT]: trial.value for trial in done if trial.value is not None}
    sign = 1 if job.low_is_better else -1
    best = min(sorted(values), key=lambda point: sign * values[point])
    found: dict[str, Any] = {
        "lr": rates[best],
        "trials": len(values),
        "objective": get_experiment(job.request.experiment).objective,
        "value": _finite(values[best]),
        "tried": [[rates[point], _finite(values[point])] for point in sorted(values)],
    }
    told = []
    if found["value"] is None:
        told.append("Every learning rate diverged.")
    elif best in (0, len(rates) - 1):
        end, key = ("lower", "tune.low") if best == 0 else ("upper", "tune.high")
        told.append(f"The best learning rate is at the {end} edge of the range; move `{key}` and tune again.")
    made_with = sorted({trial.user_attrs[MADE_WITH] for trial in done if MADE_WITH in trial.user_attrs})
    if len(made_with) > 1:
        told.append(f"Its trials were made with different code or threads: {'; '.join(made_with)}.")
    return {**found, "warning": " ".join(told)} if told else found


def _made_with(threads: int) -> str:
    """The code and the number of threads behind a value, in words."""
    state = git_state()
    commit = f"commit {state['commit'][:12]}{' and changes' * state['dirty']}" if state else f"version {__version__}"
    return f"{commit}, torch {torch.__version__}, {threads} thread{'s' * (threads > 1)}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
