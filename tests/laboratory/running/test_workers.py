"""Jobs in processes: each ends in one way, and what happens to one leaves the others alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockadapt_experiments.running.workers import Done, Event, Failed, Leg, work
from support import errands
from support.errands import Errand
from support.laboratory import ENVIRONMENT, children, wait_until

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")


def do(folder: Path, *what: str, workers: int) -> tuple[list[Done | Failed], list[tuple[int, Event]]]:
    events: list[tuple[int, Event]] = []
    ends = work([Errand(name, folder) for name in what], workers, 3, lambda *event: events.append(event))
    return ends, events


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_job_ends_in_its_own_way(tmp_path: Path, workers: int) -> None:
    ends, events = do(tmp_path, "a", "raise", "b", workers=workers)
    assert [type(end) for end in ends] == [Done, Failed, Done]
    assert isinstance(ends[1], Failed)
    assert ends[1][:2] == ("UnpicklableError", "no luck\nat all")
    written = (tmp_path / "raise" / "error.txt").read_text()
    assert written == ends[1].traceback
    assert "in __call__" in written
    assert not (tmp_path / "a").exists()
    for index, end in enumerate(ends):
        own = [event for number, event in events if number == index]
        legs = [Leg(1, 2, {"x": 0.5}), Leg(2, 2, {})]
        assert own == [*legs[: 1 if index == 1 else 2], end]


def test_workers_are_processes_that_know_their_threads(tmp_path: Path) -> None:
    before = dict(os.environ)
    ends, _ = do(tmp_path, "a", "b", "c", "d", workers=2)
    values = [end.value for end in ends if isinstance(end, Done)]
    assert len(values) == 4
    assert all(value["threads"] == ["3", "3", "3"] for value in values)
    assert 1 <= len({value["process"] for value in values} - {os.getpid()}) <= 2
    assert os.environ == before


def test_one_worker_is_this_process(tmp_path: Path) -> None:
    ends, _ = do(tmp_path, "a", workers=1)
    assert [end.value["process"] for end in ends if isinstance(end, Done)] == [os.getpid()]


def test_a_process_that_dies_takes_only_its_job_with_it(tmp_path: Path) -> None:
    ends, _ = do(tmp_path, "a", "die", "die", "b", "c", workers=2)
    assert [type(end) for end in ends] == [Done, Failed, Failed, Done, Done]
    assert ends[1] == ("a lost process", "exit code -9", "The process ended with exit code -9, without a word.\n")
    assert (tmp_path / "die" / "error.txt").exists()


SLEEPERS = """
import sys
from pathlib import Path
from support.errands import Errand
from blockadapt_experiments.running.workers import work
if __name__ == "__main__":
    try:
        work([Errand("sleep", Path(sys.argv[1]))] * 2, 2, 1, lambda *event: None)
    except KeyboardInterrupt:
        print("interrupted")
"""


@linux
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: Path, end: signal.Signals) -> None:
    program = tmp_path / "sleepers.py"
    program.write_text(SLEEPERS)
    here = Path(errands.__file__).parent.parent  # what pytest itself has in its path
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )
    wait_until(lambda: len(list(tmp_path.glob("asleep-*"))) == 2, process)
    workers = [int(path.name.partition("-")[2]) for path in tmp_path.glob("asleep-*")]
    assert {*workers} <= {*children(process.pid)}
    if end == signal.SIGINT:
        os.killpg(process.pid, end)  # as a terminal does: to all of them
    else:
        process.kill()
    written, errors = process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert (written, errors) == (("interrupted\n", "") if end == signal.SIGINT else ("", ""))
