"""Collect what a report says beside curves and tables: verdicts, how to repeat it, what was reduced, what it ran on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blockadapt_experiments.claims.claim import Verdict
from blockadapt_experiments.core.config import flat, load, plain
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.report.differences import write_differences
from blockadapt_experiments.report.pairs import Comparison
from blockadapt_experiments.report.sensitivity import write_sensitivity
from blockadapt_experiments.report.table import Table, other_numbers, results
from blockadapt_experiments.results.formats import NONE, number, setting
from blockadapt_experiments.results.recorded_runs import EXPERIMENT
from blockadapt_experiments.results.summary import Summary

VERDICTS = {True: "held", False: "did not hold", None: "cannot tell"}


class Judged(NamedTuple):
    """Joins a claim with what these runs say about it."""

    paper: str
    verdict: Verdict

    @property
    def word(self) -> str:
        """Say the verdict in a word or two."""
        return VERDICTS[self.verdict.held]


class PaperSetting(NamedTuple):
    """Says what a setting is here and at the paper's scale."""

    key: str
    here: str
    paper: str


class Tuned(NamedTuple):
    """Says what tuning chose for an optimizer.

    Attributes:
        label: Of the optimizer.
        variant: Of the experiment.
        lr: The learning rate found, and what else was tuned.
        value: The objective there.
        objective: Its name.
        grid: The grid that it tried: for each setting the smallest value, the largest, and how many.
        extensions: Points beyond the grid that it tried too.
        tried: Every point tried and its objective, as text, in ascending order.
        warning: What is wrong with it; "" if nothing.
    """

    label: str
    variant: str
    lr: str
    value: str
    objective: str
    grid: Mapping[str, Sequence[float]]
    extensions: int
    tried: Sequence[tuple[str, str]]
    warning: str

    @property
    def planned(self) -> int:
        """Count the points of its grid."""
        return len(self.tried) - self.extensions

    @property
    def trials(self) -> str:
        """Say how many points it tried."""
        return f"{self.planned} + {self.extensions} beyond the grid" if self.extensions else f"{self.planned}"


@dataclass(frozen=True)
class Content:
    """Holds all that the page and its Markdown form say.

    Attributes:
        summary: What was measured.
        table: The results.
        others: Other numbers that the runs left.
        judged: The claims, most of them the paper's.
        compared: Arms and variants against a reference, paired by seed.
        apart: The same as PNG files.
        figures: The curves, as PNG files.
        pictures: What the experiment itself draws, as PNG files.
        sensitivity: What tuning tried, as a PNG file, or none.
        troubles: Runs and pictures that have failed, and records that are damaged, a sentence each.
        notes: What happened to runs on the way, a sentence each.
        differences: Settings that differ from the paper's scale; None if that is not known.
        tuned: How learning rates were found.
        environment: What the runs were started on, by name.
        elsewhere: What was different for some of the runs.
    """

    summary: Summary
    table: Table
    others: Table
    judged: Sequence[Judged]
    compared: Sequence[Comparison]
    apart: Sequence[Path]
    figures: Sequence[Path]
    pictures: Sequence[Path]
    sensitivity: Sequence[Path]
    troubles: Sequence[str]
    notes: Sequence[str]
    differences: Sequence[PaperSetting] | None
    tuned: Sequence[Tuned]
    environment: Mapping[str, str]
    elsewhere: Mapping[str, str]

    @property
    def heading(self) -> str:
        """Say what was run, and at which scale."""
        return f"{self.summary.experiment.title} – {self.summary.scale} scale"

    @property
    def source(self) -> str:
        """Say where the paper has it, in a sentence; "" for an experiment that is not in the paper."""
        experiment = self.summary.experiment
        return f"Yun, Lozano and Yang (2019), {experiment.section}." if experiment.in_paper else ""

    @property
    def facts(self) -> str:
        """Say in one sentence how many runs there are."""
        summary = self.summary
        variants = f", {_count(len(summary.variants), 'variant')}" if summary.variants != [""] else ""
        sizes = f"{_count(len(summary.arms), 'optimizer')}{variants}, {_count(len(summary.seeds), 'seed')}"
        return f"{sizes}: {summary.finished} of {_count(summary.planned, 'run')} finished."

    @property
    def equal_times(self) -> str:
        """Say when the fastest optimizer had finished, for each variant; "" where there is nothing to compare."""
        times = {variant: self.summary.equal_time(variant) for variant in self.summary.variants}
        known = {f" with {variant}" if variant else "": time for variant, time in times.items() if time == time}
        return ", ".join(f"{number(time, 3)} s{where}" for where, time in known.items())

    @property
    def budget(self) -> str:
        """Say which grids were tried, as it was: the same for all, or as large, or neither."""
        sizes = {line.planned for line in self.tuned}
        if len(sizes) > 1:
            counts = dict.fromkeys(f"{line.label} {line.planned}" for line in self.tuned)
            told = f"The optimizers tried grids of different sizes: {', '.join(counts)} points"
        elif any(line.grid != self.tuned[0].grid for line in self.tuned):
            rates = {(*line.grid.get("lr", ()),) for line in self.tuned}
            told = f"Every optimizer tried {sizes.pop()} points"
            if len(rates) == 1:
                told += ": the same learning rates, with values of other settings that it has"
            elif len({rate[:2] for rate in rates}) == 1:
                told += ": one that lacks a setting tried more learning rates between the same ends"
            else:
                told += ", but not of the same grid"
        else:
            told = f"Every optimizer tried the same grid of {_count(sizes.pop(), 'point')}"
        most = max(line.extensions for line in self.tuned)
        beyond = f" Where the best was at an edge, up to {_count(most, 'point')} beyond it followed." if most else ""
        return f"{told}.{beyond}"

    @property
    def target(self) -> str:
        """Put the target into words; "" if there is none."""
        if self.summary.experiment.target is None:
            return ""
        key, value = self.summary.experiment.target
        metric = self.summary.metric(key)
        return f"{metric.label} {'≥' if metric.better == 'high' else '≤'} {number(value)}"


def content(
    experiment: Experiment[Any],
    summary: Summary,
    compared: Sequence[Comparison],
    figures: Sequence[Path],
    directory: Path,
) -> Content:
    """Judge and draw all that the report needs beside these comparisons and figures."""
    pictures, troubles = _draw(experiment, summary, directory)
    return Content(
        summary=summary,
        table=results(summary),
        others=other_numbers(summary),
        judged=[Judged(claim.paper, _judge(summary, claim.judge)) for claim in experiment.claims],
        compared=compared,
        apart=write_differences(summary, compared, directory),
        figures=figures,
        pictures=pictures,
        sensitivity=write_sensitivity(summary, directory),
        troubles=[*_unsealed(summary), *_failures(summary), *_damages(summary), *troubles],
        notes=[f"{run.key.label}: {note}" for run in summary.runs for note in run.notes],
        differences=_differences(experiment, summary),
        tuned=_tuned(summary),
        environment={key.removesuffix("_bytes"): _told(key, value) for key, value in flat(summary.environment).items()},
        elsewhere=_elsewhere(summary),
    )


def _judge(summary: Summary, judge: Callable[[Summary], Verdict]) -> Verdict:
    """Ask for the verdict. A judge that stumbles, over runs that are missing or for another reason, cannot tell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # NumPy's word for a mean of nothing
            return judge(summary)
    except Exception as error:
        if summary.complete:
            return Verdict(None, f"Judging it failed: {type(error).__name__}: {error}.")
        return Verdict(None, f"Only {summary.finished} of {summary.planned} runs are finished.")


def _draw(experiment: Experiment[Any], summary: Summary, directory: Path) -> tuple[Sequence[Path], list[str]]:
    """Draw the experiment's own pictures, and say so if that failed; there may be none while runs are missing."""
    if experiment.draw is None:
        return [], []
    try:
        return experiment.draw(summary, directory), []
    except Exception as error:
        return [], [f"Drawing failed: {type(error).__name__}: {error}."] if summary.complete else []


def _failures(summary: Summary) -> list[str]:
    """Write a sentence for each run that failed the last time it was tried."""
    failed = [run for run in summary.runs if run.error]
    return [
        f"{run.key.arm} {run.key.variant} seed {run.key.seed} failed: {run.error}".replace("  ", " ") for run in failed
    ]


def _unsealed(summary: Summary) -> list[str]:
    """Write a sentence for each directory whose settings cannot be checked."""
    return [
        f"{Path(out.name) / EXPERIMENT} is of an older version and has no digest: nothing shows whether it was changed."
        for out in summary.unsealed
    ]


def _damages(summary: Summary) -> list[str]:
    """Write a sentence for each run whose record cannot be believed."""
    return [
        f"{run.key.label} does not count: {run.damage} The same `blockadapt run` does it again."
        for run in summary.runs
        if run.damage
    ]


def _differences(experiment: Experiment[Any], summary: Summary) -> list[PaperSetting] | None:
    try:
        paper = flat(plain(load(experiment, "paper")))
    except (ValueError, OSError):  # an experiment that ships no settings
        return None
    here = flat(summary.settings)
    return [
        PaperSetting(key, *(setting(side[key]) if key in side else NONE for side in (here, paper)))
        for key in dict.fromkeys([*here, *paper])
        if here.get(key) != paper.get(key)
    ]


def _tuned(summary: Summary) -> list[Tuned]:
    found = []
    tune = summary.settings.get("tune") or {}
    of_all = {"lr": [tune[key] for key in ("low", "high", "trials")]} if tune else {}  # records of older versions
    for arm in summary.arms:
        for variant, record in summary.tuned.get(arm, {}).items():
            points = record.get("points") or [{"lr": lr, "value": value} for lr, value in record["tried"]]
            found.append(
                Tuned(
                    label=summary.label(arm),
                    variant=variant,
                    lr=_point({"lr": record["lr"], **record.get("values", {})}),
                    value=_value(record["value"]),
                    objective=record["objective"],
                    grid=record.get("grid", of_all),
                    extensions=record.get("extensions", 0),
                    tried=[
                        (_point(point), _value(point["value"]))
                        for point in sorted(points, key=lambda point: point["lr"])
                    ],
                    warning=record.get("warning", ""),
                )
            )
    return found


def _point(point: Mapping[str, Any]) -> str:
    """Write a point of the grid: the learning rate, and by name what else was tuned."""
    others = [f"{name} {number(value, 3)}" for name, value in point.items() if name not in ("lr", "value")]
    return ", ".join([number(point["lr"], 3), *others])


def _value(value: float | None) -> str:
    return NONE if value is None else number(value)


def _told(key: str, value: Any) -> str:
    """Write a fact about the machine; bytes as GB."""
    return f"{value / 1e9:.3g} GB" if key.endswith("_bytes") and value is not None else setting(value)


def _elsewhere(summary: Summary) -> dict[str, str]:
    """List by name what some runs had different from the environment that the experiment was started in."""
    started = flat(summary.environment)
    found: dict[str, list[str]] = {}
    for run in summary.runs:
        for key, value in flat(run.environment).items():
            told = _told(key, value)
            if started.get(key) != value and told not in found.setdefault(key.removesuffix("_bytes"), []):
                found[key.removesuffix("_bytes")].append(told)
    return {key: "; ".join(values) for key, values in found.items()}


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
