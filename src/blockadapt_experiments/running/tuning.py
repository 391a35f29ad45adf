"""Find for each arm the best point of a grid, judged on validation data, never on test data.

Every arm tries the same grid. Where other settings than the learning rate are tuned, an arm whose optimizer lacks one
tries more learning rates between the same ends, so that all try as many points. A grid rather than a sampler that
learns, because every arm then has the same chances, and because the outcome does not depend on the order in which
trials end: one process or ten machines find the same.

Where the best point is at an edge, the arm tries the next one beyond it too, until the best is inside or the limit is
reached, which is one for all arms. Of equal points the smaller learning rate of the grid wins, and a point beyond the
grid only if it is better.

The value of a point is the objective, averaged over the last 20% of the measurements of a run and over runs with seeds
that the experiment itself does not use. A run that diverges makes it the worst there is.

A trial is a run like any other, with a record below `tuning/`. So it can be killed and goes on, in any process that
sees the folder: the folder is the study.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from blockadapt_experiments.contenders.catalogue import CONTENDERS, Contender, find_contender
from blockadapt_experiments.core.settings import TuneSettings
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.results.measurements import RunKey
from blockadapt_experiments.results.recorded_runs import Tuned, read_result
from blockadapt_experiments.results.summary import TAIL
from blockadapt_experiments.running.environment import made_with
from blockadapt_experiments.running.grids import Point, Span, grid, lr_span, outward, values
from blockadapt_experiments.running.jobs import Done, Failed
from blockadapt_experiments.running.runner import Choice, Do, Request, RunJob, do_all


@dataclass
class Search:
    """Keeps what one arm has tried so far.

    Attributes:
        request: The experiment.
        arm: The arm.
        variant: The variant.
        spans: The grid.
        found: The value of every point that was tried; infinitely bad where a run diverged.
        failed: Whether a trial has raised, which is nothing that a value could be made of.
    """

    request: Request
    arm: str
    variant: str
    spans: Sequence[Span]
    found: dict[Point, float] = field(default_factory=dict)
    failed: bool = False

    def trials(self, point: Point) -> list[RunJob]:
        """Make the runs of a point, one for each seed of tuning."""
        lr, *others = values(self.spans, point).items()
        choice = Choice(lr[1], tuple(others))
        seeds = self.request.settings.tune.seeds
        return [RunJob(self.request, RunKey(self.arm, self.variant, seed), choice, tuning=True) for seed in seeds]

    def next_points(self) -> list[Point]:
        """List what to try next: the grid, then what is beyond it, next to the best; nothing at the end."""
        if self.failed:
            return []
        if not self.found:
            return grid(self.spans)
        beyond = [point for _, _, point in outward(self.spans, self.found, self.best)]
        return beyond[: self.request.settings.tune.extensions - self.extensions]

    @property
    def extensions(self) -> int:
        """Count the points beyond the grid that were tried."""
        return len(self.found) - _count(self.spans)

    @property
    def best(self) -> Point:
        """Return the best point; of equal ones that which was tried first."""
        sign = 1 if self.low_is_better else -1
        return min(self.found, key=lambda point: sign * self.found[point])

    @property
    def low_is_better(self) -> bool:
        """Tell whether a lower objective is better."""
        experiment = get_experiment(self.request.experiment)
        return next(metric.better for metric in experiment.metrics if metric.key == experiment.objective) != "high"

    def judge(self, point: Point) -> None:
        """Read the value of a point from the records of its trials."""
        objective = get_experiment(self.request.experiment).objective
        assert objective is not None
        tails = [_tail(job, objective) for job in self.trials(point)]
        worst = math.inf if self.low_is_better else -math.inf
        self.found[point] = sum(tails) / len(tails) if all(map(math.isfinite, tails)) else worst

    def record(self) -> dict[str, Any]:
        """Give what `tuned.json` keeps; a value is None where a run diverged."""
        choice, best = self.trials(self.best)[0].choice, self.found[self.best]
        at = {point: values(self.spans, point) for point in sorted(self.found)}
        sign = 1 if self.low_is_better else -1
        by_lr: dict[float, float] = {}
        for point, named in at.items():
            value = self.found[point]
            by_lr[named["lr"]] = sign * min(sign * value, sign * by_lr.get(named["lr"], value))
        kept: dict[str, Any] = {
            "lr": choice.lr,
            "grid": {span.name: [span.low, span.high, span.points] for span in self.spans},
            "trials": len(self.found),
            "objective": get_experiment(self.request.experiment).objective,
            "value": _finite(best),
            "tried": [[lr, _finite(value)] for lr, value in by_lr.items()],
        }
        if choice.values:
            kept["values"] = dict(choice.values)
            kept["points"] = [{**named, "value": _finite(self.found[point])} for point, named in at.items()]
        if self.extensions:
            kept["extensions"] = self.extensions
        warning = " ".join(self._warnings())
        return {**kept, "warning": warning} if warning else kept

    def _warnings(self) -> list[str]:
        told = []
        if not math.isfinite(self.found[self.best]):
            told.append("Every learning rate diverged.")
        else:
            count = f"{self.extensions} point{'s' * (self.extensions > 1)}"
            after = f", after {count} beyond the grid" if self.extensions else ""
            for span, edge, _ in outward(self.spans, self.found, self.best):
                what, move = span.name, "widen its range"
                if what == "lr":
                    what, move = "learning rate", f"move `tune.{'low' if edge == 'lower' else 'high'}`"
                told.append(f"The best {what} is at the {edge} edge of the range{after}; {move} and tune again.")
        trials = [job for point in self.found for job in self.trials(point)]
        made = sorted({made_with((job.record.about or {})["environment"]) for job in trials})
        if len(made) > 1:
            told.append(f"Its trials were made with different code or threads: {'; '.join(made)}.")
        return told


def tune(
    request: Request,
    over: Sequence[Span],
    do: Do,
    on_wait: Callable[[Sequence[RunJob]], None],
) -> Tuned:
    """Try the grid with all arms, and what is beyond it where that is best.

    Args:
        request: The experiment.
        over: What is tuned beside the learning rate.
        do: Does jobs, and returns how each ended.
        on_wait: Told which trials other processes have in hand, while there is nothing else left to do.

    Returns:
        What `tuned.json` keeps. An arm of which a trial has failed is left out.
    """
    searches = [Search(request, arm, variant, _spans(request, arm, over)) for arm, variant in request.arms()]
    while asked := [(search, points) for search in searches if (points := search.next_points())]:
        turns = range(max(len(points) for _, points in asked))
        trials = [  # all arms get on alike
            (search, job)
            for turn in turns
            for search, points in asked
            if turn < len(points)
            for job in search.trials(points[turn])
        ]
        ends: Sequence[Done | Failed] = do_all([job for _, job in trials], do, on_wait)
        for (search, _), end in zip(trials, ends, strict=True):
            search.failed |= isinstance(end, Failed)
        for search, points in asked:
            for point in () if search.failed else points:
                search.judge(point)
    kept: Tuned = {}
    for search in searches:
        if not search.failed:
            kept.setdefault(search.arm, {})[search.variant] = search.record()
    return kept


def choices_of(tuned: Tuned) -> dict[tuple[str, str], Choice]:
    """Give what the runs of an experiment are made with, by arm and variant."""
    return {
        (arm, variant): Choice(best["lr"], tuple(best.get("values", {}).items()))
        for arm, variants in tuned.items()
        for variant, best in variants.items()
    }


def _spans(request: Request, arm: str, over: Sequence[Span]) -> list[Span]:
    """Give the grid of an arm. Where its optimizer lacks settings it has more learning rates, to as many points."""
    own, tune = _had_by(find_contender("run", request.settings.arm(arm).optimizer), over), request.settings.tune
    rates = math.ceil(budget(tune, over) / _count(own))
    return [replace(lr_span(tune), points=rates), *own]


def budget(tune: TuneSettings, over: Sequence[Span]) -> int:
    """Count the points of the grid of every arm: of an optimizer that has as many of these settings as any has."""
    return tune.trials * max(_count(_had_by(contender, over)) for contender in CONTENDERS.values())


def _had_by(contender: Contender, over: Sequence[Span]) -> list[Span]:
    return [span for span in over if span.name in contender.types]


def _count(spans: Sequence[Span]) -> int:
    return math.prod(span.points for span in spans)


def _tail(job: RunJob, objective: str) -> float:
    """Average the objective over the end of a trial; nan if it diverged."""
    result, _ = read_result(job.record.folder)
    measured = [row[objective] for row in job.record.rows() if objective in row]
    if result is None or result["numbers"].get("diverged") or not measured:
        return math.nan
    return float(np.mean(measured[-math.ceil(TAIL * len(measured)) :])) if np.isfinite(measured).all() else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
