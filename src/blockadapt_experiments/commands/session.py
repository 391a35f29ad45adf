"""Carry out one `blockadapt run`: refuse what cannot work, tune, run, and say what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from blockadapt.validation import require, require_integer
from blockadapt_experiments.commands.display import duration, forecasts_table, job_progress, runs_table, say
from blockadapt_experiments.core.config import completed, plain
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.atomic import require_directory, require_no_url
from blockadapt_experiments.parts import ORIGINS
from blockadapt_experiments.results.recorded_runs import EXPERIMENT, read_experiment, read_tuned
from blockadapt_experiments.running.environment import environment
from blockadapt_experiments.running.forecast import dry_run, total_seconds
from blockadapt_experiments.running.grids import Span, parse_spans
from blockadapt_experiments.running.jobs import Done, Engine, Failed, here
from blockadapt_experiments.running.records import add_tuned, begin_experiment, joined
from blockadapt_experiments.running.runner import (
    Choice,
    Request,
    RunJob,
    check,
    do_all,
    most_jobs,
    run_jobs,
    threads,
    threads_for,
)
from blockadapt_experiments.running.tuning import budget, choices_of, tune


def make_session(
    request: Request,
    command: str,
    console: Console,
    *,
    jobs: int = 1,
    cluster: str = "",
    tune: bool = False,
    tune_over: Sequence[str] = (),
) -> Session:
    """Make an invocation from what a user asks for. There are no more jobs at once than this machine can do.

    Raises:
        ValueError: What is asked for does not go together, or is not of the form that it must have.
    """
    require_no_url("run", request.out)
    if request.data_dir is not None:
        require_no_url("run", request.data_dir, "data_dir")
    if tune_over and not tune:
        raise ValueError("run: `tune_over` must be given together with --tune.")
    require_integer("run", "jobs", jobs, least=1)
    if cluster and jobs > 1:
        raise ValueError("run: `jobs` must be left out with --cluster, which does one run on each of its workers.")
    if cluster:  # workers have working directories of their own
        data = request.data_dir and request.data_dir.absolute()
        request = replace(request, out=request.out.absolute(), data_dir=data)
    most, what = most_jobs()
    if jobs > most:
        say(console, f"--jobs {jobs} is more than the {what} that there are; {most} at once.")
        jobs = most
    request = replace(request, threads=threads_for(0 if cluster else jobs))
    return Session(request, jobs, command, console, cluster, parse_spans(tune_over))


def carry_out(session: Session, tune: bool) -> bool:
    """Check, tune if asked, and run; tell whether all runs are finished now, and none failed.

    Raises:
        ValueError: It cannot work; nothing was written.
    """
    found = session.check(tune)
    with session.engine() as engine:
        require_directory("run", session.request.out)
        session.begin(tune, found)
        return session.run(engine, session.tune(engine) if tune else None)


@dataclass(frozen=True)
class Session:
    """Carries out one invocation.

    Attributes:
        request: What was asked for.
        workers: Runs at once on this machine.
        command: As it was typed, to be repeated.
        console: Where to say things.
        cluster: The address of a scheduler whose workers do the runs instead; "" for none.
        over: What is tuned beside the learning rate.
    """

    request: Request
    workers: int
    command: str
    console: Console
    cluster: str = ""
    over: Sequence[Span] = ()

    def show(self, tuned: bool) -> None:
        """Say what would be done, and about how long it would take: a few steps of each arm are measured."""
        jobs = run_jobs(self.request, {})
        self.console.print(runs_table(jobs))
        forecasts = list(dry_run(self.request))
        if forecasts:
            self.console.print(forecasts_table(forecasts))
            points = budget(self.request.settings.tune, self.over) if tuned else 0
            seconds = total_seconds(forecasts, self.request, self.workers, points)
            say(self.console, f"About {duration(seconds)} in all, from a few measured steps.")
        self._say_plan(jobs)

    def check(self, tuned: bool) -> dict[str, str]:
        """Make sure that it can work, before anything is written; return the digests of the data, by name.

        Raises:
            ValueError: It cannot: a setting, or missing data.
        """
        settings = self.request.settings
        if tuned and get_experiment(self.request.experiment).objective is None:
            raise ValueError(f"run: {self.request.experiment} has no learning rate to tune; leave --tune out.")
        if tuned:
            read_tuned(self.request.out, "run")
        seeds = self._plan(tuned)["seeds"]
        apart = not tuned or not {*settings.tune.seeds} & {*seeds}
        require(apart, "run", "tune.seeds", f"other seeds than those of the runs, {seeds}", list(settings.tune.seeds))
        known = (self.request.out / EXPERIMENT).is_file()  # else what the data are must be found anew
        return check([job for job in run_jobs(self.request, {}) if not (known and job.record.finished)])

    def engine(self) -> AbstractContextManager[Engine]:
        """Give what does the runs: this process, processes of its own, or the workers of a cluster."""
        if not self.cluster and self.workers == 1:
            return here()
        from blockadapt_experiments.running.cluster import local_cluster, remote_cluster  # Dask takes a second to load

        if self.cluster:
            return remote_cluster(self.cluster, self.request.out)
        return local_cluster(self.workers, self.request.threads, torch.cuda.device_count())

    def _about(self, tuned: bool) -> dict[str, Any]:
        """Give what must be the same for all that is done in the directory, but for what it may grow by."""
        request = self.request
        return {
            "experiment": request.experiment,
            "scale": request.scale,
            "settings": plain(request.settings),
            "code": request.code(),
            "tune": tuned,
            "tune_over": [f"{span.name}={span.low:g}:{span.high:g}:{span.points}" for span in self.over],
        }

    def _asked(self) -> dict[str, Any]:
        """Give which runs are asked for: all of these optimizers with all of these variants and seeds."""
        settings = self.request.settings
        variants = list(dict.fromkeys(variant for _, variant in self.request.arms()))
        return {"optimizers": [*settings.optimizers], "variants": variants, "seeds": [*settings.seeds]}

    def _plan(self, tuned: bool) -> dict[str, Any]:
        """Give the settings of the directory once this has joined it.

        Raises:
            ValueError: It holds other runs.
        """
        out, about = self.request.out, self._about(tuned)
        held = read_experiment(out, "run", {"settings": dict}) if (out / EXPERIMENT).is_file() else about
        return joined(out, about, held, self._completed)

    def _completed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """See `completed`."""
        return completed(get_experiment(self.request.experiment), settings)

    def begin(self, tuned: bool, data: Mapping[str, str]) -> None:
        """Write what will be done into the directory.

        Raises:
            ValueError: It holds other runs, or runs on other data.
        """
        request = self.request
        with threads(request.threads):  # as the runs have: else every report would call theirs different
            made_on = environment()
        about = {
            **self._about(tuned),
            **({"data_sha256": dict(data)} if data else {}),  # nothing was read where nothing is left to do
            "asked": [self._asked()],
            "command": self.command,
            "environment": made_on,
        }
        begin_experiment(request.out, about, self._completed)

    def tune(self, engine: Engine) -> dict[tuple[str, str], Choice]:
        """Tune, and write `tuned.json`; return what was chosen by arm and variant, of those that did not fail."""
        objective = get_experiment(self.request.experiment).objective
        do = partial(self._do, engine, "tuning", [objective] if objective else [])
        found = add_tuned(self.request.out, tune(self.request, self.over, do, self._say_wait))
        choices = choices_of(found)
        for (arm, variant), choice in choices.items():
            best = found[arm][variant]
            name = f"{arm}, {variant}" if variant else arm
            chosen = ", ".join(f"{key} {value:g}" for key, value in (("lr", choice.lr), *choice.values))
            more = best.get("extensions", 0)
            beyond = f" The grid was extended by {more} point{'s' * (more > 1)}." if more else ""
            say(self.console, f"{name}: {chosen}.{beyond} {best.get('warning', '')}".rstrip())
        return choices

    def run(self, engine: Engine, choices: dict[tuple[str, str], Choice] | None) -> bool:
        """Do all runs that are not finished, with what was tuned if anything was.

        Returns:
            Whether all runs are finished now, and none failed.
        """
        jobs = run_jobs(self.request, choices or {})
        untuned = [job for job in jobs if choices is not None and (job.key.arm, job.key.variant) not in choices]
        left = [job for job in jobs if job not in untuned and (self.request.tensorboard or not job.record.finished)]
        self._say_plan(jobs)
        start = time.monotonic()
        columns = [metric.key for metric in get_experiment(self.request.experiment).metrics[:2]]
        ends = do_all(left, partial(self._do, engine, self.request.experiment, columns), self._say_wait)
        failed = any(isinstance(end, Failed) for end in ends)
        finished = sum(job.record.finished for job in jobs)
        minutes = (time.monotonic() - start) / 60
        say(self.console, f"{finished} of {len(jobs)} runs are finished, after {minutes:.1f} min.")
        if finished:
            files = dict.fromkeys(ORIGINS[name].file for name in self.request.code() if ORIGINS[name].file)
            load = "".join(f" --load {file}" for file in files)
            say(self.console, f"`blockadapt report {self.request.out}{load}` shows them.")
        return finished == len(jobs) and not untuned and not failed

    def _say_plan(self, jobs: Sequence[RunJob]) -> None:
        finished, begun = sum(job.record.finished for job in jobs), sum(job.record.begun for job in jobs)
        count = f"{len(jobs)} run{'s' * (len(jobs) > 1)}"
        each = f"{self.request.threads} thread{'s' * (self.request.threads > 1)}"
        where = f"on the workers of {self.cluster}" if self.cluster else f"{self.workers} at once"
        say(
            self.console,
            f"{self.request.experiment}, {self.request.scale}: {count}, {finished} finished, {begun} begun; "
            f"{where} with {each} each, in {self.request.out}.",
        )

    def _say_wait(self, jobs: Sequence[RunJob]) -> None:
        say(self.console, f"Waiting for what other processes have in hand: {'; '.join(job.label for job in jobs)}.")

    def _do(self, engine: Engine, what: str, columns: Sequence[str], jobs: Sequence[RunJob]) -> Sequence[Done | Failed]:
        """Do jobs with their progress shown."""
        with job_progress(self.console, what, jobs, columns) as on_event:
            return engine.work(jobs, on_event)
