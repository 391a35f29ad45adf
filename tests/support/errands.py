"""Jobs for `test_workers.py`, in a module that a process loads in no time."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from blockadapt_experiments.running.workers import THREAD_VARIABLES, Leg, Report


@dataclass(frozen=True)
class Errand:
    """A job that does one of a few things."""

    what: str
    folder: Path

    @property
    def label(self) -> str:
        return self.what

    @property
    def error(self) -> Path:
        return self.folder / self.what / "error.txt"

    def __call__(self, report: Report) -> object:
        report(Leg(1, 2, {"x": 0.5}))
        if self.what == "raise":
            raise UnpicklableError("no luck\nat all", report)
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "sleep":
            (self.folder / f"asleep-{os.getpid()}").touch()
            time.sleep(60)
        report(Leg(2, 2, {}))
        return {"threads": [os.environ.get(name) for name in THREAD_VARIABLES], "process": os.getpid()}


class UnpicklableError(RuntimeError):
    """Cannot be sent to another process."""

    def __init__(self, words: str, report: Report) -> None:
        super().__init__(words)
        self.report = lambda: report
