"""Jobs for `test_cluster.py`, in a module that a process loads in no time."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from blockadapt_experiments.running.jobs import Leg, Report


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
        if self.what == "die" or (self.what == "die once" and self._first()):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "sleep":
            (self.folder / f"asleep-{os.getpid()}").touch()
            while True:
                time.sleep(0.05)
                report(Leg(1, 2, {}))
        report(Leg(2, 2, {}))
        return {**{name: os.environ.get(name) for name in SHOWN}, "process": os.getpid()}

    def _first(self) -> bool:
        """Whether nobody has been here before."""
        try:
            (self.folder / "first").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


SHOWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


class UnpicklableError(RuntimeError):
    """Cannot be sent to another process."""

    def __init__(self, words: str, report: Report) -> None:
        super().__init__(words)
        self.report = lambda: report
