"""Make the table of results: every optimizer in every variant, each number with its interval over seeds."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from blockadapt_experiments.files.atomic import atomic_text
from blockadapt_experiments.results import formats
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.summary import Summary

Better = Literal["low", "high"] | None

STATE = "state_bytes"
"""The number that runs leave for the memory of the optimizer's state."""


class Estimate(NamedTuple):
    """Is a mean over seeds.

    Attributes:
        mean: Of the values that are finite.
        half: Half width of its 95% interval.
        n: How many values are finite.
        of: How many seeds are finished.
    """

    mean: float
    half: float
    n: int
    of: int

    @property
    def text(self) -> str:
        """Write it for people."""
        return formats.estimate(self.mean, self.half)

    @property
    def part(self) -> str:
        """Say of how many seeds it is, if not of every finished one."""
        return f"{self.n} of {self.of}" if 0 < self.n < self.of else ""


@dataclass(frozen=True)
class Column:
    """Describes one measured number.

    Attributes:
        key: Its name in CSV files.
        heading: Its name for people.
        values: One for each finished seed, of an arm and a variant.
        metric: The metric that it is about, "" for none.
        better: Which way is better; None where neither is.
    """

    key: str
    heading: str
    values: Callable[[str, str], np.ndarray]
    metric: str = ""
    better: Better = "low"


@dataclass(frozen=True)
class Line:
    """Is a line of the table: one arm in one variant. `best` says which estimates lead those of all other arms."""

    arm: str
    label: str
    variant: str
    lr: float
    lr_source: str
    estimates: Sequence[Estimate]
    best: Sequence[bool]
    finished: int
    planned: int
    diverged: int

    @property
    def seeds(self) -> str:
        """Say how many seeds are finished."""
        return f"{self.finished}" if self.finished == self.planned else f"{self.finished} of {self.planned}"


@dataclass(frozen=True)
class Table:
    """Has columns and lines; an estimate belongs to the column at its place."""

    columns: Sequence[Column]
    lines: Sequence[Line]

    @property
    def has_lr(self) -> bool:
        """Tell whether an arm has a learning rate; an arm that is no optimizer has 0."""
        return any(line.lr != 0 for line in self.lines)


def results(summary: Summary) -> Table:
    """Answer what is asked of every optimizer: how far, how soon, how steadily, at what cost."""
    timed = any(math.isfinite(summary.equal_time(variant)) for variant in summary.variants)
    columns = [column for metric in summary.metrics for column in _metric_columns(summary, metric.key, timed)]
    return _table(summary, [*columns, *_target_columns(summary), *_cost_columns(summary)])


def other_numbers(summary: Summary) -> Table:
    """Collect the numbers that runs left at their end, but for those that `results` has."""
    names = [name for name in summary.number_names() if name not in (STATE, "diverged")]
    return _table(summary, [_number_column(summary, name) for name in names])


def write_table(table: Table, others: Table, path: Path) -> None:
    """Write both tables as one CSV file, with means, half widths and the number of seeds behind them."""
    columns = [*table.columns, *others.columns]
    estimated = [name for column in columns for name in (column.key, f"{column.key}_half", f"{column.key}_n")]
    head = ["optimizer", "variant", "lr", "lr_source", "seeds_planned", "seeds_finished", "seeds_diverged"]
    with atomic_text(path) as file:
        writer = csv.writer(file)
        writer.writerow([*head, *estimated])
        for line, other in zip(table.lines, others.lines, strict=True):
            facts = [line.arm, line.variant, cell(line.lr), line.lr_source, line.planned, line.finished, line.diverged]
            numbers = [(cell(e.mean), cell(e.half), e.n) for e in (*line.estimates, *other.estimates)]
            writer.writerow([*facts, *(value for triple in numbers for value in triple)])


def cell(value: float) -> float | str:
    """Give a number to a CSV file, where nothing stands for nan."""
    return "" if math.isnan(value) else float(value)


def _metric_columns(summary: Summary, key: str, timed: bool) -> list[Column]:
    better = summary.metric(key).better

    def column(name: str, heading: str, read: Callable[[str, str, str], np.ndarray], better: Better) -> Column:
        return Column(f"{key}_{name}", heading, lambda arm, variant: read(arm, key, variant), key, better)

    final = column("final", "Final", summary.final, better)
    if better is None:
        return [final]
    equal = [column("equal_time", "At equal time", summary.at_equal_time, better)] if timed else []
    best = column("best", "Best", summary.best, better)
    return [final, *equal, best, column("oscillation", "Oscillation", summary.oscillation, "low")]


def _target_columns(summary: Summary) -> list[Column]:
    if summary.experiment.target is None:
        return []
    axis = summary.experiment.axis

    def part(index: int) -> Callable[[str, str], np.ndarray]:
        return lambda arm, variant: np.array([hit[index] for hit in summary.to_target(arm, variant)], dtype=np.float64)

    return [
        Column(f"{axis}s_to_target", f"{axis.capitalize()}s to target", part(0)),
        Column("seconds_to_target", "Seconds to target", part(1)),
    ]


def _cost_columns(summary: Summary) -> list[Column]:
    found = [Column("seconds", "Seconds", summary.seconds)]
    if STATE in summary.number_names():
        found.append(_number_column(summary, STATE, better="low"))
    return found


def _number_column(summary: Summary, name: str, better: Better = None) -> Column:
    """Make the column of a number that runs left; bytes are shown as MB."""
    size = name.endswith("_bytes")
    key, scale = (name.removesuffix("_bytes") + "_mb", 1e-6) if size else (name, 1.0)
    heading = name.removesuffix("_bytes").replace("_", " ").capitalize() + (" MB" if size else "")
    return Column(key, heading, lambda arm, variant: scale * summary.number(arm, name, variant), better=better)


def _table(summary: Summary, columns: Sequence[Column]) -> Table:
    lines: list[Line] = []
    for variant in summary.variants:
        values = {arm: [column.values(arm, variant) for column in columns] for arm in summary.arms}
        best = [
            best_of([values[arm][index] for arm in summary.arms], column.better, len(summary.seeds))
            for index, column in enumerate(columns)
        ]
        for number, arm in enumerate(summary.arms):
            marks = [marked[number] for marked in best]
            lines.append(_line(summary, arm, variant, [*map(estimate_of, values[arm])], marks))
    return Table(columns, lines)


def _line(summary: Summary, arm: str, variant: str, estimates: Sequence[Estimate], best: Sequence[bool]) -> Line:
    return Line(
        arm=arm,
        label=summary.label(arm),
        variant=variant,
        lr=summary.lr(arm, variant),
        lr_source=summary.lr_source(arm, variant),
        estimates=estimates,
        best=best,
        finished=sum(run.finished for run in summary.of(arm, variant)),
        planned=len(summary.seeds),
        diverged=summary.diverged(arm, variant),
    )


def estimate_of(values: np.ndarray) -> Estimate:
    """Estimate the mean of the values that are finite."""
    finite = values[np.isfinite(values)]
    return Estimate(*interval(finite), n=finite.size, of=values.size)


def best_of(values: Sequence[np.ndarray], better: Better, seeds: int) -> list[bool]:
    """Tell which is the best beyond doubt: the 95% interval of its lead over each other, by seed, lies above zero.

    Only those with a value of every seed compete. One seed has no interval, so that then none is the best.
    """
    sign = 1.0 if better == "high" else -1.0
    competing = [sign * each for each in values if each.size == seeds and np.isfinite(each).all()]

    def leads(mine: np.ndarray) -> bool:
        found = [interval(mine - other) for other in competing if other is not mine]
        return bool(found) and all(mean - half > 0 for mean, half in found)

    if better is None:
        return [False] * len(values)
    marks = iter([leads(each) for each in competing])
    return [each.size == seeds and bool(np.isfinite(each).all()) and next(marks) for each in values]
