"""Says what the runs of an experiment measured, with statistics over seeds.

A run that is not finished is read as far as it went; it has a part in curves and none in statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.results.intervals import intervals
from blockadapt_experiments.results.measurements import Design, Metric, RunKey
from blockadapt_experiments.results.recorded_runs import Run, as_number

TAIL = 0.2
"""The share of a run's points, at its end, that oscillation is measured over."""


class Band(NamedTuple):
    """Holds the middle of a curve and its 95% interval, and of how many seeds, [points] each.

    Attributes:
        middle: The mean; for a log axis the geometric mean.
        low: The lower end of the interval; nan where one seed has none.
        high: The upper end.
        n: How many seeds have a value there that the axis can show.
    """

    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


class Curve(NamedTuple):
    """Is a metric of one arm over the experiment's axis, for every seed.

    Attributes:
        x: [points], in the units of the axis, ascending.
        values: [seeds, points], nan where a seed has none.
        seeds: Which seeds.
        seconds: [seeds, points], time from the start of a run until the value was measured; nan where it is not known.
    """

    x: np.ndarray
    values: np.ndarray
    seeds: list[int]
    seconds: np.ndarray

    @property
    def is_line(self) -> bool:
        """Tell whether it has two points that could be joined; one makes no chart."""
        return int(np.isfinite(self.values).any(axis=0).sum()) > 1

    def band(self, log: bool = False) -> Band:
        """Compute mean ± half width at each point, over the seeds that have a finite value there.

        With `log` the same of the logarithms, over positive values: exp(mean(log v) ± half). So a band on a log axis
        has a lower end, however wide it is, and lies evenly around its curve.
        """
        if not log:
            mean, half, n = intervals(self.values)
            return Band(mean, mean - half, mean + half, n)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean, half, n = intervals(np.log(self.values))
            return Band(np.exp(mean), np.exp(mean - half), np.exp(mean + half), n)

    def mean_seconds(self) -> np.ndarray:
        """Compute the time until each point, [points], over the seeds of which it is known; nan where of none."""
        return intervals(self.seconds)[0]


@dataclass(frozen=True)
class Summary:
    """Holds all runs of one experiment in one directory.

    Statistics are arrays with one value for each finished seed, in the order of the seeds; nan where a run has none.

    Attributes:
        out: The directory.
        experiment: What it measures.
        scale: At which scale it was run.
        settings: Its settings, as plain data.
        command: The command that started it.
        environment: What it was started on.
        arms: Names of those compared, in the order in which they are shown: of optimizers, or of arms of their own.
        variants: What the experiment sweeps; [""] if nothing.
        seeds: The seeds.
        runs: The records, finished or not.
        tuned: What `--tune` found, by arm and variant; empty without it.
        labels: Names for people of arms that are not optimizers as all share their settings.
        asked: The number of runs that were asked for, where that is not every arm with every variant and seed.
        unsealed: Directories of old, in which nothing shows whether `experiment.json` was changed.
    """

    out: Path
    experiment: Design
    scale: str
    settings: Mapping[str, Any]
    command: str
    environment: Mapping[str, Any]
    arms: list[str]
    variants: list[str]
    seeds: list[int]
    runs: Sequence[Run]
    tuned: Mapping[str, Mapping[str, Mapping[str, Any]]]
    labels: Mapping[str, str] = field(default_factory=dict)
    asked: int | None = None
    unsealed: Sequence[Path] = ()

    @cached_property
    def _by_key(self) -> dict[RunKey, Run]:
        return {run.key: run for run in self.runs}

    @property
    def optimizers(self) -> dict[str, str]:
        """Name the optimizer of each arm, which is the arm itself where it has no settings of its own."""
        tables = self.settings.get("arms", {})
        return {arm: tables.get(arm, {}).get("optimizer", arm.partition("@")[0]) for arm in self.arms}

    @property
    def planned(self) -> int:
        """Count the runs that were asked for."""
        return self.asked if self.asked is not None else len(self.arms) * len(self.variants) * len(self.seeds)

    @property
    def finished(self) -> int:
        """Count the runs that came to their end."""
        return sum(run.finished for run in self.runs)

    @property
    def complete(self) -> bool:
        """Tell whether every run came to its end."""
        return self.finished == self.planned

    def label(self, arm: str) -> str:
        """Name an arm for people."""
        return self.labels.get(arm, CONTENDERS[arm].label if arm in CONTENDERS else arm)

    @cached_property
    def metrics(self) -> list[Metric]:
        """List the experiment's metrics that some run has measured."""
        return [metric for metric in self.experiment.metrics if any(run.measured(metric.key) for run in self.runs)]

    def metric(self, key: str) -> Metric:
        """Return the experiment's metric of that name."""
        return next(metric for metric in self.experiment.metrics if metric.key == key)

    def of(self, arm: str, variant: str = "") -> list[Run]:
        """Return the runs of one arm, finished or not, in the order of the seeds."""
        keys = (RunKey(arm, variant, seed) for seed in self.seeds)
        return [self._by_key[key] for key in keys if key in self._by_key]

    def _finished(self, arm: str, variant: str) -> list[Run]:
        return [run for run in self.of(arm, variant) if run.finished]

    def _series(self, arm: str, metric: str, variant: str, steady: bool = False) -> Iterator[np.ndarray]:
        """Yield the metric of each finished run, at least one point of it; if `steady`, nan where the run diverged."""
        for run in self._finished(arm, variant):
            values = run.series(self.experiment.axis, metric).values
            lost = not values.size or (steady and self._diverged(run))
            yield np.array([math.nan]) if lost else values

    def _diverged(self, run: Run) -> bool:
        return run.diverged(self.experiment.metrics)

    def curve(self, arm: str, metric: str, variant: str = "") -> Curve:
        """Return the metric over the axis, for all seeds that have points of it."""
        found = {run.key.seed: run.series(self.experiment.axis, metric) for run in self.of(arm, variant)}
        found = {seed: series for seed, series in found.items() if series.x.size}
        x = np.unique(np.concatenate([series.x for series in found.values()])) if found else np.empty(0)
        values, seconds = np.full((2, len(found), x.size), math.nan)
        for row, series in enumerate(found.values()):
            at = np.searchsorted(x, series.x)
            values[row, at], seconds[row, at] = series.values, series.seconds
        return Curve(x, values, list(found), seconds)

    def final(self, arm: str, metric: str, variant: str = "") -> np.ndarray:
        """Return the last value; nan where the run diverged, whatever was measured then."""
        return np.array([values[-1] for values in self._series(arm, metric, variant, steady=True)])

    def best(self, arm: str, metric: str, variant: str = "") -> np.ndarray:
        """Return the best value that is finite; nan for a metric of which neither more nor less is better."""
        sign = {"low": 1.0, "high": -1.0, None: math.nan}[self.metric(metric).better]
        finite = (values[np.isfinite(values)] for values in self._series(arm, metric, variant))
        return np.array([sign * (sign * values).min() if values.size else math.nan for values in finite])

    def oscillation(self, arm: str, metric: str, variant: str = "") -> np.ndarray:
        """Compute the deviation over the last 20% of the points; nan for fewer than two, or where the run diverged."""
        return np.array([oscillation(values) for values in self._series(arm, metric, variant, steady=True)])

    def number(self, arm: str, name: str, variant: str = "") -> np.ndarray:
        """Return one of the numbers that runs leave at their end."""
        return np.array([as_number(run.numbers.get(name)) for run in self._finished(arm, variant)])

    def number_names(self) -> list[str]:
        """List the names of all numbers that some run left."""
        return list(dict.fromkeys(name for run in self.runs for name in run.numbers))

    def to_target(self, arm: str, variant: str = "") -> list[tuple[float, float]]:
        """Tell where on the axis, and after how many seconds, the target was first reached; nan if it never was."""
        if self.experiment.target is None:
            return [(math.nan, math.nan)] * len(self._finished(arm, variant))
        key, goal = self.experiment.target
        sign = -1.0 if self.metric(key).better == "high" else 1.0
        reached = []
        for run in self._finished(arm, variant):
            series = run.series(self.experiment.axis, key)
            hits = np.flatnonzero(sign * series.values <= sign * goal)
            first = (float(series.x[hits[0]]), float(series.seconds[hits[0]])) if hits.size else (math.nan, math.nan)
            reached.append(first)
        return reached

    def arrays(self, arm: str, variant: str, seed: int) -> dict[str, np.ndarray]:
        """Return the arrays that a run left at its end; empty if it left none, or is not finished."""
        run = self._by_key.get(RunKey(arm, variant, seed))
        path = run.directory / "arrays.npz" if run and run.result and "arrays.npz" in run.result["written"] else None
        if path is None or not path.exists():
            return {}
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}

    def seconds(self, arm: str, variant: str = "") -> np.ndarray:
        """Tell how long the runs took."""
        return np.array([as_number((run.result or {}).get("seconds")) for run in self._finished(arm, variant)])

    def equal_time(self, variant: str = "") -> float:
        """Tell after how many seconds the fastest arm had finished with every seed; nan unless two arms have.

        A run that diverged did not finish: it ended early because it failed.
        """
        done = []
        for arm in self.arms:
            runs = [run for run in self._finished(arm, variant) if run.seconds.size and not self._diverged(run)]
            ends = [run.seconds[-1] for run in runs]
            if len(ends) == len(self.seeds) and np.isfinite(ends).all():
                done.append(max(ends))
        return float(min(done)) if len(done) > 1 else math.nan

    def at_equal_time(self, arm: str, metric: str, variant: str = "") -> np.ndarray:
        """Return the last value measured until `equal_time`; nan if there was none by then, or the run diverged."""
        end, found = self.equal_time(variant), []
        for run in self._finished(arm, variant):
            values = run.series(self.experiment.axis, metric).until(end).values
            found.append(math.nan if not values.size or self._diverged(run) else values[-1])
        return np.array(found)

    def lr(self, arm: str, variant: str = "") -> float:
        """Return the learning rate; nan before the first run."""
        return next((run.lr for run in self.of(arm, variant)), math.nan)

    def lr_source(self, arm: str, variant: str = "") -> str:
        """Tell where the learning rate is from: "tuned", "set", or "default", which is what its authors recommend."""
        if self.tuned.get(arm, {}).get(variant):
            return "tuned"
        chosen = arm in self.settings.get("lr", {}) or "lr" in self.settings.get("arms", {}).get(arm, {})
        return "set" if chosen else "default"

    def diverged(self, arm: str, variant: str = "") -> int:
        """Count the seeds that had a value that is not finite."""
        return sum(self._diverged(run) for run in self.of(arm, variant))


def oscillation(values: np.ndarray) -> float:
    """Compute the deviation of the last 20% of the values; nan for fewer than two, or one that is not finite."""
    tail = values[-math.ceil(TAIL * values.size) :]
    if tail.size < 2 or not np.isfinite(tail).all():
        return math.nan
    with np.errstate(over="ignore"):
        return float(tail.std(ddof=1))
