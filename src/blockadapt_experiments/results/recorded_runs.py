"""Runs read back from disk, finished or not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockadapt_experiments.results.measurements import Metric, Row, RunKey


class Series(NamedTuple):
    """The points of one run that have a metric, [points] each."""

    x: np.ndarray
    values: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True)
class Run:
    """The record of one run.

    Attributes:
        key: Which run.
        lr: The learning rate that it was made with.
        environment: What it was made on.
        rows: What it measured so far.
        seconds: Time from its start until each row, [rows]; nan where none was kept.
        result: What it left at its end; None while it is not finished.
        error: What it failed with the last time, in a line; "" if it did not.
        directory: Where its record lies.
    """

    key: RunKey
    lr: float
    environment: Mapping[str, Any]
    rows: Sequence[Row]
    seconds: np.ndarray
    result: Mapping[str, Any] | None
    error: str
    directory: Path

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.result is not None

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The numbers that it left at its end."""
        return (self.result or {}).get("numbers") or {}

    @cached_property
    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """For each name in the rows: which rows have it, ascending, and its values there."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for place, row in enumerate(self.rows):
            for name, value in row.items():
                places, values = found.setdefault(name, ([], []))
                places.append(place)
                values.append(as_number(value))
        return {name: (np.array(places), np.array(values)) for name, (places, values) in found.items()}

    def measured(self, metric: str) -> bool:
        """Whether some row has this metric."""
        return metric in self._columns

    def series(self, axis: str, metric: str) -> Series:
        """The rows that have this metric."""
        if not self.measured(metric):
            return Series(np.empty(0), np.empty(0), np.empty(0))
        places, values = self._columns[metric]
        on_axis, x = self._columns[axis]
        return Series(x[np.searchsorted(on_axis, places)], values, self.seconds[places])

    def diverged(self, metrics: Iterable[Metric]) -> bool:
        """Whether it says so itself, or one of these metrics was ever not finite."""
        found = [self._columns[metric.key][1] for metric in metrics if self.measured(metric.key)]
        return bool(self.numbers.get("diverged")) or not all(np.isfinite(values).all() for values in found)


def read_run(directory: Path) -> Run:
    """Read the record in this directory."""
    about = read_json(directory / "run.json")
    rows = _read_lines(directory / "metrics.jsonl")
    result, error = directory / "result.json", directory / "error.txt"
    trouble = error.read_text(encoding="utf-8").split("\n") if error.is_file() and not result.is_file() else []
    return Run(
        key=RunKey(about["arm"], about["variant"], about["seed"]),
        lr=as_number(about["lr"]),
        environment=about["environment"],
        rows=rows,
        seconds=_seconds_at_rows(_read_lines(directory / "timing.jsonl"), len(rows)),
        result=read_json(result) if result.is_file() else None,
        error=next((line for line in reversed(trouble) if line.strip()), ""),
        directory=directory,
    )


def read_json(path: Path) -> Any:
    """What is in a JSON file.

    Raises:
        ValueError: It is none; the sentence names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"report: {str(path)!r} is not valid JSON ({error}).") from None


def as_number(value: Any) -> float:
    """The value; nan for None."""
    return math.nan if value is None else float(value)


def _read_lines(path: Path) -> list[Any]:
    """The lines of a JSON Lines file, but for a last one that was only half written."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"report: {str(path)!r} has a line that is not valid JSON ({error}).") from None


def _seconds_at_rows(timing: Sequence[Mapping[str, Any]], rows: int) -> np.ndarray:
    """Time from the start until each row: known where a leg ends, and in proportion within one."""
    legs = {line["leg"]: line for line in timing}  # a leg that was done again after a crash counts once
    times = np.full(rows, math.nan)
    clock, done = 0.0, 0
    for line in legs.values():
        new = line["last_row"] - done
        shares = np.arange(1, new + 1) / max(new, 1)
        times[done : done + new] = (clock + line["seconds"] * shares)[: max(rows - done, 0)]
        clock, done = clock + line["seconds"], line["last_row"]
    return times
