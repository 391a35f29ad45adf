"""What runs leave on disk, so that `kill -9` at any moment costs no more than the work since the last checkpoint.

Small files are written whole: to a temporary file, to the disk, then renamed. Rows are appended as they come; a
checkpoint says how far they belong to it, and what was appended later is cut off when the run continues, also half a
line. Whoever writes to a run holds its lock, which the system takes back when a process dies.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock, Timeout

from blockadapt.validation import refusal
from blockadapt_experiments.core.config import first_difference
from blockadapt_experiments.files.atomic import atomic, read_json, write_json
from blockadapt_experiments.results.measurements import Outcome, Row, RunKey


def begin_experiment(out: Path, about: Mapping[str, Any]) -> None:
    """Write `experiment.json`, or make sure that the one that is there says the same.

    Args:
        out: The directory of the experiment.
        about: Its name, scale, settings and whether learning rates are tuned, which must not change; and the command
            and the environment, of which the first are kept.

    Raises:
        ValueError: The directory holds other runs; the sentence names the first key that differs.
    """
    path = out / "experiment.json"
    with FileLock(out / ".lock"):
        if path.exists():
            _require_same(about, read_json(path), f"the runs in {out}")
        else:
            write_json(path, about)


def _require_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Compare all but what may change: the command and the environment."""
    for name in ours:
        if name in ("command", "environment"):
            continue
        key = "" if name == "settings" else name
        different = first_difference(ours[name], theirs.get(name), key)
        if different:
            raise ValueError(refusal("run", different.key, f"{different.theirs!r} as in {where}", different.ours))


class RunRecord:
    """The record of one run.

    Args:
        out: The directory of the experiment.
        key: Which run.
    """

    def __init__(self, out: Path, key: RunKey) -> None:
        self.key = key
        self.folder = out / "runs" / key.arm / (key.variant or "-") / f"seed-{key.seed}"
        self.error = self.folder / "error.txt"
        self.metrics = self.folder / "metrics.jsonl"
        self._about = self.folder / "run.json"
        self._timing = self.folder / "timing.jsonl"
        self._checkpoint = self.folder / "checkpoint.pt"
        self._result = self.folder / "result.json"
        self._arrays = self.folder / "arrays.npz"
        self._rows = 0

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self._result.exists()

    @property
    def begun(self) -> bool:
        """Whether there is something to continue from."""
        return self._checkpoint.exists()

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the run, so that nobody else writes to it; False if another process holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def begin(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Write `run.json`, or make sure that the one that is there says the same; returns the one that holds."""
        if self._about.exists():
            before: dict[str, Any] = read_json(self._about)
            _require_same(about, before, f"what {self.key.label} was begun with")
            return before
        write_json(self._about, about)
        return dict(about)

    def resume(self) -> dict[str, Any] | None:
        """The last checkpoint, all files cut back to it; None to begin at the beginning."""
        state: dict[str, Any] | None = None
        if self._checkpoint.exists():
            state = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        for path, kept in ((self.metrics, "metrics_bytes"), (self._timing, "timing_bytes")):
            with path.open("ab") as file:
                file.truncate(state[kept] if state else 0)
        self._rows = state["rows"] if state else 0
        return state

    def append(self, leg: int, rows: Sequence[Row], seconds: float) -> None:
        """Add what a leg measured, and how long it took."""
        self._rows += len(rows)
        _append(self.metrics, [{name: _plain(value) for name, value in row.items()} for row in rows])
        _append(self._timing, [{"leg": leg, "seconds": seconds, "last_row": self._rows}])

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of this state, and of how far the rows belong to it."""
        sizes = {}
        for path, kept in ((self.metrics, "metrics_bytes"), (self._timing, "timing_bytes")):
            with path.open("ab") as file:
                os.fsync(file.fileno())  # rows reach the disk before the checkpoint that counts them
                sizes[kept] = file.tell()
        with atomic(self._checkpoint) as file:
            torch.save({**state, "rows": self._rows, **sizes}, file)

    def finish(self, outcome: Outcome, peak_memory_bytes: int) -> None:
        """Write what is left to say; from now on the run is finished."""
        if outcome.arrays:
            with atomic(self._arrays) as file:
                _write_arrays(file, outcome.arrays)
        seconds = sum(json.loads(line)["seconds"] for line in self._timing.read_text(encoding="utf-8").splitlines())
        result = {
            "numbers": {name: _plain(value) for name, value in outcome.numbers.items()},
            "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes,
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        write_json(self._result, result)
        self.clear()

    def clear(self) -> None:
        """Remove what only an unfinished run needs."""
        for path in (self._checkpoint, self.error):
            path.unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        """All rows so far."""
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]


def _append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open("ab") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


def _plain(value: Any) -> float | int:
    """A number that JSON can hold, also where it came as NumPy's or torch's."""
    return value if isinstance(value, int) else float(value)


def _write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """As `np.savez`, but the same bytes at any time of day."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
