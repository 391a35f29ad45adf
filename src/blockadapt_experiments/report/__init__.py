"""Write the report of an experiment: an interactive page, PNG curves, CSV tables and a Markdown page.

`reading` → `table`, `pairs`, `figures`, `content` → `page`, `markdown`: what was measured, what is said about it, how
it looks. `overview` is one table of several experiments.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blockadapt.validation import refusal
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.files.atomic import atomic_text
from blockadapt_experiments.report.content import content
from blockadapt_experiments.report.figures import write_figures
from blockadapt_experiments.report.markdown import write_markdown
from blockadapt_experiments.report.overview import write_overview
from blockadapt_experiments.report.page import write_page
from blockadapt_experiments.report.pairs import Comparison, compare
from blockadapt_experiments.report.reading import read, recorded_experiment, recorded_name
from blockadapt_experiments.report.table import cell, write_table
from blockadapt_experiments.report.together import together
from blockadapt_experiments.results.intervals import intervals
from blockadapt_experiments.results.summary import Summary

__all__ = ["write_overview", "write_report"]


def write_report(
    out: Path,
    experiment: Experiment[Any] | None = None,
    others: Sequence[Path] = (),
    into: Path | None = None,
    against: str | None = None,
) -> list[Path]:
    """Write the report of the runs in a directory, or in several: `report.html`, and the rest in `report/`.

    Args:
        out: Where `blockadapt run` wrote; runs need not be finished.
        experiment: Which experiment it was; None finds it by the name in the records.
        others: More directories of the same experiment.
        into: Where the report goes; None for `out`.
        against: The arm or variant that the others are compared with, paired by seed; None for the first.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: If that is no directory of an experiment, or of another one, or cannot be written to; or if there is
            nothing to compare with under that name.
    """
    experiment = experiment or recorded_experiment(out)
    known = {experiment.name: experiment}
    summary = together([read(each, known.get(recorded_name(each))) for each in (out, *others)])
    compared = compare(summary, against)
    into = into or out
    directory = into / "report"
    try:
        directory.mkdir(exist_ok=True, parents=True)
        return _write(experiment, summary, compared, into / "report.html", directory)
    except OSError as error:
        rule = f"a directory that can be written to ({error.strerror or error})"
        raise ValueError(refusal("report", "dir" if into == out else "out", rule, str(into))) from None


def _write(
    experiment: Experiment[Any], summary: Summary, compared: Sequence[Comparison], page: Path, directory: Path
) -> list[Path]:
    figures = write_figures(summary, directory)
    said = content(experiment, summary, compared, figures, directory)
    table, curves, markdown = (directory / name for name in ("table.csv", "curves.csv", "summary.md"))
    write_table(said.table, said.others, table)
    _write_curves(summary, curves)
    write_markdown(said, markdown)
    write_page(said, page)
    return [page, *figures, *said.apart, *said.pictures, *said.sensitivity, table, curves, markdown]


def _write_curves(summary: Summary, path: Path) -> None:
    """Write every point of every curve: mean, half width, number of seeds, and the value of each seed."""
    head = ["metric", "variant", "optimizer", summary.experiment.axis, "mean", "half", "n"]
    with atomic_text(path) as file:
        writer = csv.writer(file)
        writer.writerow([*head, *(f"seed_{seed}" for seed in summary.seeds)])
        writer.writerows(_curve_rows(summary))


def _curve_rows(summary: Summary) -> Iterator[list[Any]]:
    for metric in summary.metrics:
        for variant in summary.variants:
            for arm in summary.arms:
                curve = summary.curve(arm, metric.key, variant)
                mean, half, n = intervals(curve.values)
                values = dict(zip(curve.seeds, curve.values, strict=True))
                for i, x in enumerate(curve.x):
                    each = [cell(values[seed][i]) if seed in values else "" for seed in summary.seeds]
                    estimate = [cell(mean[i]), cell(half[i]), int(n[i])]
                    yield [metric.key, variant, arm, cell(x), *estimate, *each]
