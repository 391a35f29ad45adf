"""Set several experiments side by side: a row for each, a column for each optimizer, what its runs end with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from blockadapt.validation import Described, refusal
from blockadapt_experiments.claims.contests import finals
from blockadapt_experiments.drawing.bars import Panel, draw_bars
from blockadapt_experiments.drawing.colours import bar_colours
from blockadapt_experiments.files.atomic import atomic_text
from blockadapt_experiments.report.markdown import grid, inline
from blockadapt_experiments.report.reading import read
from blockadapt_experiments.report.table import Estimate, best_of, estimate_of
from blockadapt_experiments.report.together import differences, together
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import Metric
from blockadapt_experiments.results.summary import Summary
from blockadapt_experiments.running.environment import made_with

DIRECTIONS = {"low": "lower is better", "high": "higher is better", None: "neither way is better"}


class End(NamedTuple):
    """Holds what the runs of one optimizer in one experiment end with.

    Attributes:
        values: One for each finished seed; nan where the run diverged.
        planned: How many seeds there are.
        best: Whether it leads every other beyond doubt.
        diverged: The seeds that did.
    """

    values: np.ndarray
    planned: int
    best: bool
    diverged: Sequence[int]

    @property
    def estimate(self) -> Estimate:
        """Estimate the mean of the seeds that came to an end."""
        return estimate_of(self.values)

    @property
    def text(self) -> str:
        """Write the mean and its half width, of how many seeds where that is not every one, and how many diverged."""
        found = self.estimate
        told = [f"{found.n} of {self.planned}"] * (found.n < self.planned)
        told += [f"{len(self.diverged)} diverged"] * bool(self.diverged)
        return f"{found.text} ({', '.join(told)})" if told else found.text


@dataclass(frozen=True)
class Contest:
    """Is a row: one experiment, in one variant where it sweeps something.

    Attributes:
        name: Of the experiment, with its scale, and what else tells it from the other rows.
        measure: What counts.
        ends: By the label of the optimizer.
        summary: What it was read from.
    """

    name: str
    measure: Metric
    ends: Mapping[str, End]
    summary: Summary


def write_overview(directories: Sequence[Path], into: Path) -> list[Path]:
    """Write `overview.md` of the runs in these directories, and `overview.png` once one is finished; return the files.

    Directories of one experiment with the same settings share a row; others of that experiment say what differs.

    Raises:
        ValueError: One is no directory of an experiment, or of one that has no measure; or `into` cannot be written to.
    """
    rows = [
        row for summary, apart in _joined([read(each) for each in directories]) for row in contests_of(summary, apart)
    ]
    try:
        into.mkdir(exist_ok=True, parents=True)
        page = into / "overview.md"
        panels = [panel for row in rows if (panel := _panel(row)).bars]
        title = "What runs end with, mean and 95% interval over seeds"
        pictures = [draw_bars(title, "", panels, into / "overview.png")] if panels else []
        with atomic_text(page) as file:
            file.write("\n".join(_lines(rows, pictures)) + "\n")
    except OSError as error:
        rule = f"a directory that can be written to ({error.strerror or error})"
        raise ValueError(refusal("report", "out", rule, str(into))) from None
    return [page, *pictures]


def contests_of(summary: Summary, apart: Sequence[str] = ()) -> list[Contest]:
    """Make the rows of an experiment: of the settings as they are, or of every variant where all change something.

    Args:
        summary: What was measured.
        apart: What tells it from another directory of the same experiment.

    Raises:
        ValueError: The experiment has no measure.
    """
    measure = summary.experiment.measure
    if measure is None:
        rule = "directories of experiments that have one measure"
        raise ValueError(refusal("report", "dir", rule, Described(f"{summary.experiment.name} in {summary.out}")))
    metric = summary.metric(measure)
    rows = []
    for variant in [""] if "" in summary.variants else summary.variants:
        found = {arm: finals(summary, arm, measure, variant) for arm in summary.arms}
        values = {arm: np.array([*by_seed.values()]) for arm, by_seed in found.items()}
        best = best_of([*values.values()], metric.better, len(summary.seeds))
        ends = {
            summary.label(arm): End(values[arm], len(summary.seeds), mark, _diverged(summary, arm, variant))
            for arm, mark in zip(summary.arms, best, strict=True)
        }
        words = [summary.experiment.name, f"{summary.scale} scale", *filter(None, [variant]), *apart]
        rows.append(Contest(", ".join(words), metric, ends, summary))
    return rows


def _diverged(summary: Summary, arm: str, variant: str) -> list[int]:
    metrics = summary.experiment.metrics
    return [run.key.seed for run in summary.of(arm, variant) if run.finished and run.diverged(metrics)]


def _joined(summaries: Iterable[Summary]) -> Iterator[tuple[Summary, list[str]]]:
    """Join directories of one experiment, one scale and the same settings.

    Yields:
        A summary, and the settings that differ from the first directory of that experiment and scale.
    """
    kin: dict[tuple[str, str], list[list[Summary]]] = {}
    for summary in summaries:
        groups = kin.setdefault((summary.experiment.name, summary.scale), [])
        same = next((group for group in groups if not differences(group[0], summary)), None)
        if same is None:
            groups.append([summary])
        else:
            same.append(summary)
    for groups in kin.values():
        for group in groups:
            yield together(group), differences(groups[0][0], group[0])


def _lines(rows: Sequence[Contest], pictures: Sequence[Path]) -> Iterator[str]:
    labels = list(dict.fromkeys(label for row in rows for label in row.ends))
    yield "# Overview\n"
    heads = ["Task", "Measure", "Seeds", *map(inline, labels)]
    yield from grid(heads, (tuple(_cells(row, labels)) for row in rows), numbers=1 + len(labels))
    yield (
        "\nMean ± half width of the 95% interval over seeds (Student's t), at the end of training. Bold: the best,"
        " where the interval of its lead over every other, paired by seed, is above zero. Empty: not run."
    )
    diverged = [
        f"{inline(row.name)}: {inline(label)}, seed {', '.join(map(str, end.diverged))}"
        for row in rows
        for label, end in row.ends.items()
        if end.diverged
    ]
    if diverged:
        yield f"\nDiverged, and in no mean: {'; '.join(diverged)}."
    yield from (f"\n![What runs end with]({picture.name})" for picture in pictures)
    yield "\n## What it stands on\n"
    for row in rows:
        made = sorted({made_with(run.environment) for run in row.summary.runs})
        told = [f"{row.summary.finished} of {row.summary.planned} runs finished", *made]
        told += ["settings without a digest"] * bool(row.summary.unsealed)
        yield f"- {inline(row.name)}: {inline('; '.join(told))}."


def _cells(row: Contest, labels: Sequence[str]) -> Iterator[str]:
    yield from (inline(row.name), f"{inline(row.measure.label)}, {DIRECTIONS[row.measure.better]}")
    yield str(len(row.summary.seeds))
    for label in labels:
        end = row.ends.get(label)
        text = inline(end.text) if end else ""
        yield f"**{text}**" if end and end.best else text


def _panel(row: Contest) -> Panel:
    bars = {label: interval(end.values) for label, end in row.ends.items() if end.values.size}
    heading = f"{row.name}\n{row.measure.label}, {DIRECTIONS[row.measure.better]}"
    return Panel(heading, bars, bar_colours(row.summary.optimizers, row.summary.label))
