"""A small experiment for tests of the laboratory, in this process or as a command in its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blockadapt_experiments.core.config import load
from blockadapt_experiments.core.experiment import Task
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.files.atomic import read_json
from blockadapt_experiments.results.measurements import Outcome, Row
from blockadapt_experiments.running.jobs import Leg
from blockadapt_experiments.running.runner import Request, run_jobs

EXPERIMENT = "mnist-lenet300"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
COMMAND = [sys.executable, "-m", "blockadapt_experiments"]
TINY = (
    "data=digits",
    "train_examples=96",
    "test_examples=40",
    "measured_examples=40",
    "batch.size=48",
    "epochs=3",
    "optimizers=['sgd', 'block-adam']",
    "seeds=[0]",
)
"""Two minibatches an epoch on the embedded digits."""


def request(out: Path, *changes: str, experiment: str = EXPERIMENT, **options: object) -> Request:
    settings = load(get_experiment(experiment), "smoke", (*TINY, *changes))
    return Request(experiment, "smoke", settings, out, **options)  # type: ignore[arg-type]


def run_command(out: Path, *changes: str, options: Sequence[str] = ()) -> list[str]:
    settings = [word for change in (*TINY, *changes) for word in ("--set", change)]
    return [*COMMAND, "run", EXPERIMENT, "--scale", "smoke", "--out", str(out), *settings, *options]


def finished(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    chosen = {"capture_output": True, "encoding": "utf-8", "env": ENVIRONMENT, "check": False, **options}
    return subprocess.run(command, **chosen)  # type: ignore[call-overload, no-any-return]


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[Any] | None = None, seconds: float = 300.0
) -> None:
    """Wait for what this process brings about; in vain if it ends before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, f"the process has ended with {process.returncode}"
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


def outcome(out: Path) -> dict[str, bytes]:
    """All bytes that must not depend on what happened on the way."""
    found = {}
    for pattern in ("runs/**/metrics.jsonl", "runs/**/arrays.npz"):
        for path in out.glob(pattern):
            found[str(path.relative_to(out))] = path.read_bytes()
    return found


def ignore(event: object) -> None:
    """Nobody listens."""


def stopped_and_gone_on(make: Callable[[Path], Request], folder: Path, leg: int) -> dict[str, bytes]:
    """Stop every run of a request after this leg and let it go on; then the same without a stop, to the same bytes.

    `SAVING_SHARE` must let every leg be saved.
    """

    def stop(event: object) -> None:
        if isinstance(event, Leg) and event.done == leg:
            raise KeyboardInterrupt

    stopped, through = (run_jobs(make(folder / name), {}) for name in ("stopped", "through"))
    for job in stopped:
        with pytest.raises(KeyboardInterrupt):
            job(stop)
        torch.rand(5)  # what torch's generator gives meanwhile must not matter
        job(ignore)
    for job in through:
        job(ignore)
    assert outcome(folder / "stopped") == outcome(folder / "through")
    for pair in zip(stopped, through, strict=True):
        results = [read_json(job.record.folder / "result.json")["numbers"] for job in pair]
        assert results[0] == results[1]
    return outcome(folder / "through")


def finish(task: Task, done: int = 0) -> tuple[list[Row], Outcome]:
    """Do the legs that are left; gives all rows and the outcome."""
    rows = [row for _ in range(done, task.legs) for row in task.advance()]
    return rows, task.outcome()


def children(pid: int) -> list[int]:
    """The processes that this one has started, from any of its threads (Linux)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(word) for thread in threads for word in (thread / "children").read_text(encoding="utf-8").split()]
