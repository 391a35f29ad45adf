"""Runs read back from disk, finished or not.

A finished run is believed only if its result is as it was written, and so is every file that the result counts:
`damage` says if one is not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.files.checked import is_marked, is_sealed, require_sealed
from blockadapt_experiments.results.measurements import Metric, Row, RunKey

NOTES = "notes.jsonl"
"""The file of a run that says what happened to it on the way."""

EXPERIMENT = "experiment.json"
"""The file of an experiment that says what its runs are."""

TUNED = "tuned.json"
"""The file of an experiment that keeps what tuning tried and chose."""

Tuned = dict[str, dict[str, dict[str, Any]]]
"""What tuning found, by arm and variant."""

COUNTED = ("run.json", "metrics.jsonl", "timing.jsonl")
"""The files that every result counts; it counts `arrays.npz` where the run left arrays."""

LEFT = (*COUNTED, "result.json")
"""What every finished run leaves. A folder with none of it is of a run that was killed before it wrote anything."""

WEIGHTS_ALONE = ["weights"]
"""Arrays that no report reads, so that `blockadapt pack` leaves their file behind: it may be missing."""

FIELDS = {"arm": str, "variant": str, "seed": int, "environment": dict}
"""What a report needs of `run.json`."""


def read_experiment(out: Path, owner: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """Read `experiment.json`. One of old has no digest, which `is_marked` tells.

    Args:
        out: The directory of the experiment.
        owner: Who asks, as the first word of a refusal.
        fields: What it must have, and of which type.

    Raises:
        ValueError: It is damaged, or was changed; the sentence names the file.
    """
    path = out / EXPERIMENT
    head = read_json(path, owner, fields)
    if is_marked(head):
        require_sealed(path, head, owner)
    return head


def read_tuned(out: Path, owner: str) -> Tuned:
    """Read what tuning found, by arm and variant; nothing where nothing was tuned.

    Raises:
        ValueError: `tuned.json` is damaged, was changed or is not sealed; the sentence names the file.
    """
    path = out / TUNED
    if not path.is_file():
        return {}
    table = read_json(path, owner)
    require_sealed(path, table, owner)
    arms: Tuned = table["arms"]
    return arms


class Series(NamedTuple):
    """Holds the points of one run that have a metric, [points] each."""

    x: np.ndarray
    values: np.ndarray
    seconds: np.ndarray

    def until(self, end: float) -> Series:
        """Return the points that were measured within `end` seconds from the start."""
        return Series(*(column[self.seconds <= end] for column in self))


@dataclass(frozen=True)
class Run:
    """Reads the record of one run.

    Attributes:
        key: Which run.
        lr: The learning rate that it was made with.
        environment: What it was made on.
        rows: What it measured so far; none if the record is damaged.
        seconds: Time from its start until each row, [rows]; nan where none was kept.
        result: What it left at its end; None while it is not finished, or if the record is damaged.
        error: What it failed with the last time, in a line; "" if it did not.
        damage: What of its record cannot be believed, in a sentence; "" if all can.
        notes: What happened to it on the way, a sentence each.
        directory: Where its record lies.
    """

    key: RunKey
    lr: float
    environment: Mapping[str, Any]
    rows: Sequence[Row]
    seconds: np.ndarray
    result: Mapping[str, Any] | None
    error: str
    damage: str
    notes: Sequence[str]
    directory: Path

    @property
    def finished(self) -> bool:
        """Tell whether it came to its end, and its record can be believed."""
        return self.result is not None

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Return the numbers that it left at its end."""
        return (self.result or {}).get("numbers") or {}

    @cached_property
    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Find for each name in the rows which rows have it, ascending, and its values there."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for place, row in enumerate(self.rows):
            for name, value in row.items():
                places, values = found.setdefault(name, ([], []))
                places.append(place)
                values.append(as_number(value))
        return {name: (np.array(places), np.array(values)) for name, (places, values) in found.items()}

    def measured(self, metric: str) -> bool:
        """Tell whether some row has this metric."""
        return metric in self._columns

    def series(self, axis: str, metric: str) -> Series:
        """Return the rows that have this metric."""
        if not self.measured(metric):
            return Series(np.empty(0), np.empty(0), np.empty(0))
        places, values = self._columns[metric]
        on_axis, x = self._columns[axis]
        return Series(x[np.searchsorted(on_axis, places)], values, self.seconds[places])

    def diverged(self, metrics: Iterable[Metric]) -> bool:
        """Tell whether it says so itself, or one of these metrics was ever not finite."""
        found = [self._columns[metric.key][1] for metric in metrics if self.measured(metric.key)]
        return bool(self.numbers.get("diverged")) or not all(np.isfinite(values).all() for values in found)


def read_run(directory: Path) -> Run:
    """Read the record in this directory.

    Raises:
        ValueError: Its `run.json` cannot be read; the sentence names the file.
    """
    about = read_json(directory / "run.json", "report", FIELDS)
    result, damage = read_result(directory)
    rows, broken = _read_lines(directory / "metrics.jsonl")
    timing, broken_timing = _read_lines(directory / "timing.jsonl")
    damage = damage or broken or broken_timing
    if damage:  # then nothing of it is shown
        result, rows, timing = None, [], []
    notes, _ = _read_lines(directory / NOTES)
    error = directory / "error.txt"
    trouble = error.read_text(encoding="utf-8").split("\n") if error.is_file() and not result else []
    return Run(
        key=RunKey(about["arm"], about["variant"], about["seed"]),
        lr=as_number(about.get("lr")),
        environment=about["environment"],
        rows=rows,
        seconds=_seconds_at_rows(timing, len(rows)),
        result=result,
        error=next((line for line in reversed(trouble) if line.strip()), ""),
        damage=damage,
        notes=[str(note.get("words")) for note in notes],
        directory=directory,
    )


def read_result(directory: Path) -> tuple[dict[str, Any] | None, str]:
    """Read what a run left at its end, and why that cannot be believed.

    Returns:
        The result, None if there is none that can be believed; and a sentence if it was changed, or a file that it
        counts was, else "".
    """
    file = directory / "result.json"
    if not file.is_file():
        return None, ""
    try:
        result = read_json(file)
    except ValueError:
        return None, f"{file.name} cannot be read."
    if not is_sealed(result):
        return None, f"{file.name} is not what the run wrote (its digest is another, or it has none)."
    counted = result.get("written", {})
    if not counted.keys() >= {*COUNTED}:
        return None, f"{file.name} does not count what the run wrote."
    for name, written in counted.items():
        path = directory / name
        if name == "arrays.npz" and result.get("arrays") == WEIGHTS_ALONE and not path.exists():
            continue
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != written["sha256"]:
            size = written["bytes"]
            how = "other bytes" if len(content) == size else f"{len(content)} bytes where the run wrote {size}"
            return None, f"{name} is not what the run wrote ({how})."
    return result, ""


def as_number(value: Any) -> float:
    """Return the value; nan for None."""
    return math.nan if value is None else float(value)


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read the tables in a JSON Lines file, but for a last one that was only half written.

    Returns:
        The lines up to the first that is none, and a sentence about that one; "" if all are.
    """
    if not path.is_file():
        return [], ""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            table = json.loads(line)
        except ValueError:
            table = None
        if not isinstance(table, dict):
            return found, f"{path.name} has a line that cannot be read, line {number}."
        found.append(table)
    return found, ""


def _seconds_at_rows(timing: Sequence[Mapping[str, Any]], rows: int) -> np.ndarray:
    """Compute the time from the start until each row: it is known where a leg ends, and in proportion within one."""
    legs = {line["leg"]: line for line in timing}  # a leg that was done again after a crash counts once
    times = np.full(rows, math.nan)
    clock, done = 0.0, 0
    for line in legs.values():
        new = line["last_row"] - done
        shares = np.arange(1, new + 1) / max(new, 1)
        times[done : done + new] = (clock + line["seconds"] * shares)[: max(rows - done, 0)]
        clock, done = clock + line["seconds"], line["last_row"]
    return times
