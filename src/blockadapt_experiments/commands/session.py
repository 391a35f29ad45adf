"""What one `blockadapt run` does: refuse what cannot work, tune, run, and say what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from blockadapt.validation import require
from blockadapt_experiments.commands.display import duration, estimates_table, job_progress, runs_table, say
from blockadapt_experiments.core.config import plain
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.atomic import read_json, require_directory, write_json
from blockadapt_experiments.parts import ORIGINS
from blockadapt_experiments.running.environment import environment
from blockadapt_experiments.running.estimate import dry_run, total_seconds
from blockadapt_experiments.running.records import begin_experiment, joined
from blockadapt_experiments.running.runner import Request, RunJob, check, run_jobs
from blockadapt_experiments.running.storage import without_password
from blockadapt_experiments.running.workers import Done, Failed, Job, work


def carry_out(session: Session, tune: bool, storage: str | None) -> bool:
    """Check, tune if asked, and run; returns whether all runs are finished now, and none failed.

    Raises:
        ValueError: It cannot work; nothing was written.
    """
    out = session.request.out
    if storage and not tune:
        raise ValueError("run: `storage` must be given together with --tune.")
    found = session.check(tune)
    require_directory("run", out)
    data = session.begin(tune, found)
    rates = session.tune(storage or f"sqlite:///{out.absolute() / 'tuning.db'}", data) if tune else None
    return session.run(rates)


@dataclass(frozen=True)
class Session:
    """One invocation.

    Attributes:
        request: What was asked for.
        workers: Runs at once.
        command: As it was typed, to be repeated.
        console: Where to say things.
    """

    request: Request
    workers: int
    command: str
    console: Console

    def show(self, tuned: bool) -> None:
        """Say what would be done, and about how long it would take: a few steps of each arm are measured."""
        jobs = run_jobs(self.request, {})
        self.console.print(runs_table(jobs))
        estimates = list(dry_run(self.request))
        if estimates:
            self.console.print(estimates_table(estimates))
            seconds = total_seconds(estimates, self.request, self.workers, tuned)
            say(self.console, f"About {duration(seconds)} in all, from a few measured steps.")
        self._say_plan(jobs)

    def check(self, tuned: bool) -> dict[str, str]:
        """Make sure that it can work, before anything is written; returns the digests of the data, by name.

        Raises:
            ValueError: It cannot: a setting, or missing data.
        """
        settings = self.request.settings
        if tuned and get_experiment(self.request.experiment).objective is None:
            raise ValueError(f"run: {self.request.experiment} has no learning rate to tune; leave --tune out.")
        seeds = self._plan(tuned)["seeds"]
        apart = not tuned or not {*settings.tune.seeds} & {*seeds}
        require(apart, "run", "tune.seeds", f"other seeds than those of the runs, {seeds}", list(settings.tune.seeds))
        return check([job for job in run_jobs(self.request, {}) if not job.record.finished])

    def _about(self, tuned: bool) -> dict[str, Any]:
        """Give what must be the same for all that is done in the directory, but for what it may grow by."""
        request = self.request
        return {
            "experiment": request.experiment,
            "scale": request.scale,
            "settings": plain(request.settings),
            "code": request.code(),
            "tune": tuned,
        }

    def _plan(self, tuned: bool) -> dict[str, Any]:
        """Give the settings of the directory once this has joined it.

        Raises:
            ValueError: It holds other runs.
        """
        path, about = self.request.out / "experiment.json", self._about(tuned)
        held = read_json(path, "run", {"settings": dict}) if path.is_file() else about
        return joined(self.request.out, about, held)

    def begin(self, tuned: bool, data: Mapping[str, str]) -> Mapping[str, str]:
        """Write what will be done into the directory; returns the digests of the data that its runs have.

        Raises:
            ValueError: It holds other runs, or runs on other data.
        """
        request = self.request
        about = {
            **self._about(tuned),
            **({"data_sha256": dict(data)} if data else {}),  # nothing was read where nothing is left to do
            "command": self.command,
            "environment": environment(),
        }
        held: Mapping[str, str] = begin_experiment(request.out, about).get("data_sha256", {})
        return held

    def tune(self, storage: str, data: Mapping[str, str]) -> dict[tuple[str, str], float]:
        """Tune, and write `tuned.json`; returns learning rates by arm and variant, of those that did not fail."""
        from blockadapt_experiments.running.tuning import TrialJob, tune

        say(self.console, f"Tuning learning rates through {without_password(storage)}.")
        waited: list[int] = []

        def do(jobs: Sequence[TrialJob]) -> Sequence[Done | Failed]:
            return self._do("tuning", jobs, ("lr", "value"))

        def on_wait(claimed: int) -> None:
            if not waited:
                say(self.console, f"Waiting for trials that other processes have claimed, {claimed} of them.")
            waited.append(claimed)

        found = tune(self.request, storage, data, do, on_wait)
        path = self.request.out / "tuned.json"
        before = read_json(path, "run") if path.is_file() else {}
        for arm, variants in found.items():  # what was found before holds: there are runs with it
            variants.update(before.get(arm, {}))
        write_json(path, {**before, **found})
        rates = {}
        for arm, variants in found.items():
            for variant, best in variants.items():
                name = f"{arm}, {variant}" if variant else arm
                say(self.console, f"{name}: lr {best['lr']:g}. {best.get('warning', '')}".rstrip())
                rates[arm, variant] = best["lr"]
        return rates

    def run(self, rates: dict[tuple[str, str], float] | None) -> bool:
        """Do all runs that are not finished, with these learning rates where there are any.

        Returns:
            Whether all runs are finished now, and none failed.
        """
        jobs = run_jobs(self.request, rates or {})
        untuned = [job for job in jobs if rates is not None and (job.key.arm, job.key.variant) not in rates]
        left = [job for job in jobs if job not in untuned and (self.request.tensorboard or not job.record.finished)]
        self._say_plan(jobs)
        start = time.monotonic()
        columns = [metric.key for metric in get_experiment(self.request.experiment).metrics[:2]]
        ends = self._do(self.request.experiment, left, columns)
        others = [job.label for job, end in zip(left, ends, strict=True) if isinstance(end, Done) and end.value is None]
        if others:
            say(self.console, f"Another process is working on {'; '.join(others)}.")
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
        threads = f"{self.request.threads} thread{'s' * (self.request.threads > 1)}"
        say(
            self.console,
            f"{self.request.experiment}, {self.request.scale}: {len(jobs)} runs, {finished} finished, {begun} begun; "
            f"{self.workers} at once with {threads} each, in {self.request.out}.",
        )

    def _do(self, what: str, jobs: Sequence[Job], columns: Sequence[str]) -> list[Done | Failed]:
        """Do jobs with their progress shown."""
        with job_progress(self.console, what, jobs, columns) as on_event:
            return work(jobs, self.workers, self.request.threads, on_event)
