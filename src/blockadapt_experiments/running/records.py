"""Keep runs on disk, so that `kill -9` at any moment costs no more than the work since the last checkpoint.

Small files are written whole: to a temporary file, to the disk, then renamed. Rows are appended as they come; a
checkpoint says how far they belong to it, and what was appended later is cut off when the run continues, also half a
line. Whoever writes to a run holds its lock, which the system takes back when a process dies.

A record is believed only as far as it can be checked. A checkpoint ends in its own digest and holds the digests of the
rows that belong to it. A result has its own digest too, and those of all files that the run leaves. The checkpoint
before the last is kept too, so that a damaged one costs little. What was not as expected is told, and noted in the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock, Timeout

from blockadapt.validation import refusal
from blockadapt_experiments.core.config import first_difference, grown, run_settings
from blockadapt_experiments.files.atomic import atomic, read_json, write_json
from blockadapt_experiments.files.checked import is_marked, is_whole, sealed, sha256_of, write_checked, write_sealed
from blockadapt_experiments.results.measurements import Outcome, Row, RunKey, runs_asked
from blockadapt_experiments.results.recorded_runs import (
    EXPERIMENT,
    NOTES,
    TUNED,
    Tuned,
    read_experiment,
    read_result,
    read_tuned,
)

Complete = Callable[[Mapping[str, Any]], dict[str, Any]]


def begin_experiment(out: Path, about: Mapping[str, Any], complete: Complete = dict) -> dict[str, Any]:
    """Write `experiment.json`, or join this with the one that is there; return the one that holds.

    A directory may grow: more optimizers, arms, seeds and variants join those that it has. All commands that it grew by
    are kept, a line each.

    Args:
        out: The directory of the experiment.
        about: Its name, scale, settings, data and whether learning rates are tuned, which must not change but for what
            it may grow by; which runs are asked for; the command; and the environment, of which the first is kept.
        complete: Gives the settings of an older version what they lack.

    Raises:
        ValueError: The directory holds other runs; the sentence names the first key that differs.
    """
    path = out / EXPERIMENT
    with FileLock(out / ".lock"):
        if not path.exists():
            write_sealed(path, about)
            return dict(about)
        before = read_experiment(out, "run", {"settings": dict})
        settings = joined(out, about, before, complete)
        asked = before.get("asked", [])
        asked = [*asked, *(each for each in about.get("asked", []) if not runs_asked([each]) <= runs_asked(asked))]
        if settings == before["settings"] and asked == before.get("asked", []):
            return before
        lines = dict.fromkeys([*str(before.get("command", "")).splitlines(), str(about["command"])])
        code = {**before.get("code", {}), **about.get("code", {})}
        now = {**before, "settings": settings, "asked": asked, "code": code, "command": "\n".join(filter(None, lines))}
        write = write_sealed if is_marked(before) else write_json  # a seal of today says nothing about one of old
        write(path, now)
        return now


def add_tuned(out: Path, found: Tuned) -> Tuned:
    """Add what a command has tuned to `tuned.json`; return what holds for its arms.

    What was found before holds: there are runs with it.

    Raises:
        ValueError: The file is damaged.
    """
    with FileLock(out / ".lock"):
        before = read_tuned(out, "run")
        holds = {arm: {**variants, **before.get(arm, {})} for arm, variants in found.items()}
        write_sealed(out / TUNED, {"arms": {**before, **holds}})
    return holds


def joined(out: Path, about: Mapping[str, Any], before: Mapping[str, Any], complete: Complete = dict) -> dict[str, Any]:
    """Give the settings of a directory once this has joined it; see `begin_experiment`.

    Raises:
        ValueError: It holds other runs; the sentence names the first key that differs.
    """
    where = f"the runs in {out}"
    apart = ("settings", "asked", "code", "command", "environment")
    others = {key: value for key, value in about.items() if key not in apart}
    _require_same(others, before, where)
    codes = [each.get("code", {}) for each in (about, before)]
    both = codes[0].keys() & codes[1].keys()
    ours, theirs = ({"code": {name: code[name] for name in sorted(both)}} for code in codes)
    _require_same(ours, theirs, where)
    return grown(complete(before["settings"]), about["settings"], where)


def _require_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Compare what both have: a record of old may lack something.

    Raises:
        ValueError: A value differs; the sentence names its key, and where it is otherwise.
    """
    for name in ours:
        if name not in theirs:
            continue
        key = "" if name == "settings" else name
        different = first_difference(ours[name], theirs[name], key)
        if different:
            raise ValueError(refusal("run", different.key, f"{different.theirs!r} as in {where}", different.ours))


class RunRecord:
    """Keeps the record of one run.

    Args:
        out: The directory of the experiment.
        key: Which run.
        trial: What the run tries, if it is a trial of tuning. A trial keeps no arrays.
    """

    def __init__(self, out: Path, key: RunKey, trial: str = "") -> None:
        self.key, self.trial = key, trial
        place = out / ("tuning" if trial else "runs") / key.arm / (key.variant or "-") / trial
        self.folder = place / f"seed-{key.seed}"
        self.error = self.folder / "error.txt"
        self.metrics = self.folder / "metrics.jsonl"
        self._about = self.folder / "run.json"
        self._notes = self.folder / NOTES
        self._timing = self.folder / "timing.jsonl"
        self._checkpoint = self.folder / "checkpoint.pt"
        self._checkpoint_before = self.folder / "checkpoint-before.pt"
        self._result = self.folder / "result.json"
        self._arrays = self.folder / "arrays.npz"
        self._rows = 0
        self._digests = {path: hashlib.sha256() for path in (self.metrics, self._timing)}

    @property
    def finished(self) -> bool:
        """Tell whether the run has come to its end, and what it left is what it wrote."""
        return read_result(self.folder)[0] is not None

    @property
    def begun(self) -> bool:
        """Tell whether there is something to continue from."""
        return not self._result.exists() and (self._checkpoint.exists() or self._checkpoint_before.exists())

    @property
    def about(self) -> dict[str, Any] | None:
        """Read what the run was begun with; None if it was not, or if its end is damaged: then this may be too."""
        if not self._about.exists() or read_result(self.folder)[1]:
            return None
        return read_json(self._about, "run", {"environment": dict})

    @property
    def held(self) -> bool:
        """Tell whether another process has the run in hand."""
        with self.locked() as ours:
            return not ours

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the run, so that nobody else writes to it.

        Yields:
            Whether it is ours: False if another process holds it.
        """
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

    def resume(self, about: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
        """Read the last checkpoint that can be trusted, and cut all files back to it; None to begin at the beginning.

        A run that begins, or begins again, is of here and now: `run.json` is written. A run that goes on keeps it.

        Args:
            about: What `run.json` is to say. Only the environment may be another than the run was begun in.

        Returns:
            The checkpoint, and what was found damaged, a sentence each. Damaged files are removed.
        """
        before = self.about
        if before is not None:
            self._require_begun_with(about, before)
        _, damage = read_result(self.folder)
        troubles = [damage] if damage else []
        state: dict[str, Any] | None = None
        for path in (self._checkpoint, self._checkpoint_before):
            if state is None and path.exists():
                state = self._load(path)
                if state is None:
                    troubles.append(f"{path.name} is damaged, or rows that it counts are.")
                    path.unlink()
        if before is None or (state is None and before != about):
            write_json(self._about, about)
        self._result.unlink(missing_ok=True)
        for path in self._digests:
            kept = state["written"][path.name]["bytes"] if state else 0
            with path.open("ab") as file:
                file.truncate(kept)
            with path.open("rb") as file:
                self._digests[path] = sha256_of(file, kept)
        self._rows = state["rows"] if state else 0
        return state, troubles

    def _require_begun_with(self, about: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        ours, theirs = (
            {**run, "environment": None, "settings": run_settings(run.get("settings", {}), self.key.arm)}
            for run in (about, before)
        )
        _require_same(ours, theirs, f"what {self.key.label} was begun with")

    def _load(self, path: Path) -> dict[str, Any] | None:
        """Read the checkpoint; None if it is not what was written, or the rows that it counts are not."""
        if not is_whole(path):
            return None
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for lines in self._digests:
            written = state["written"][lines.name]
            if not lines.exists():
                return None
            with lines.open("rb") as file:
                if sha256_of(file, written["bytes"]).hexdigest() != written["sha256"]:
                    return None
        return state

    def note(self, leg: int, words: str) -> None:
        """Keep a sentence about something that happened to the run after this leg."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        _append(self._notes, [{"leg": leg, "time": now, "words": words}])

    def append(self, leg: int, rows: Sequence[Row], seconds: float) -> None:
        """Add what a leg measured, and how long it took."""
        self._rows += len(rows)
        measured = [{name: _plain(value) for name, value in row.items()} for row in rows]
        timing = {"leg": leg, "seconds": seconds, "last_row": self._rows}
        for path, lines in ((self.metrics, measured), (self._timing, [timing])):
            self._digests[path].update(_append(path, lines))

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of this state, and of how far the rows belong to it. The one before is kept."""
        written = self._written_rows()

        def write(file: Any) -> None:
            torch.save({**state, "rows": self._rows, "written": written}, file)
            if self._checkpoint.exists():
                os.replace(self._checkpoint, self._checkpoint_before)

        write_checked(self._checkpoint, write)

    def _written_rows(self) -> dict[str, dict[str, Any]]:
        """Return size and digest of all rows, which are on the disk from now on."""
        found = {}
        for path, digest in self._digests.items():
            with path.open("ab") as file:
                os.fsync(file.fileno())  # rows reach the disk before the checkpoint or the result that counts them
                found[path.name] = {"bytes": file.tell(), "sha256": digest.hexdigest()}
        return found

    def finish(self, outcome: Outcome, peak_memory_bytes: int) -> None:
        """Write what is left to say; from now on the run is finished."""
        written = self._written_rows()
        files = [self._about]
        arrays = {} if self.trial else outcome.arrays
        if arrays:
            with atomic(self._arrays) as file:
                _write_arrays(file, arrays)
            files.append(self._arrays)
        for path in files:
            size = os.path.getsize(path)
            with path.open("rb") as content:
                written[path.name] = {"bytes": size, "sha256": sha256_of(content, size).hexdigest()}
        seconds = sum(json.loads(line)["seconds"] for line in self._timing.read_text(encoding="utf-8").splitlines())
        result = {
            "numbers": {name: _plain(value) for name, value in outcome.numbers.items()},
            "rows": self._rows,
            "arrays": list(arrays),
            "written": written,
            "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes,
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        write_json(self._result, sealed(result))
        self.clear()

    def clear(self) -> None:
        """Remove what only an unfinished run needs."""
        parts = self.folder.glob(".*.part")  # what a process was writing when it was killed
        for path in (self._checkpoint, self._checkpoint_before, self.error, *parts):
            path.unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        """Read all rows so far."""
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]


def _append(path: Path, lines: Sequence[Mapping[str, Any]]) -> bytes:
    """Add lines to a file, and return them as they are written there."""
    written = "".join(json.dumps(line) + "\n" for line in lines).encode()
    try:
        with path.open("ab") as file:
            file.write(written)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    return written


def _plain(value: Any) -> float | int:
    """Turn a number of Python's, NumPy's or torch's into one that JSON can hold."""
    return value if isinstance(value, int) else float(value)


def _write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write what `np.savez` writes, but the same bytes at any time of day."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
