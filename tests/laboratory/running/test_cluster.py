"""Jobs in processes: each ends in one way, a lost process costs none of them, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest

from blockadapt_experiments.running import cluster
from blockadapt_experiments.running.cluster import gpu_for, local_cluster, remote_cluster
from blockadapt_experiments.running.jobs import Done, Engine, Event, Failed, Here, Leg
from blockadapt_experiments.running.runner import run_jobs
from support import errands
from support.clusters import Separate, separate_cluster
from support.errands import Errand
from support.laboratory import ENVIRONMENT, children, outcome, request, run_command, wait_until

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
SUPPORT = Path(errands.__file__).parent.parent  # what pytest itself has in its path
OURS = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def crew() -> Iterator[Engine]:
    """Two processes on this machine, as if it had GPUs and we may use two of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
        with local_cluster(2, 3, gpus=2) as engine:
            yield engine


def do(engine: Engine, folder: Path, *what: str) -> tuple[list[Done | Failed], list[tuple[int, Event]]]:
    events: list[tuple[int, Event]] = []
    return engine.work([Errand(name, folder) for name in what], lambda *event: events.append(event)), events


def ends_in_its_own_way(engine: Engine, folder: Path) -> None:
    ends, events = do(engine, folder, "a", "raise", "b")
    assert [type(end) for end in ends] == [Done, Failed, Done]
    assert isinstance(ends[1], Failed)
    assert ends[1][:2] == ("UnpicklableError", "no luck\nat all")
    written = (folder / "raise" / "error.txt").read_text()
    assert written == ends[1].traceback
    assert "in __call__" in written
    assert not (folder / "a").exists()
    for index, end in enumerate(ends):
        own = [event for number, event in events if number == index]
        legs = [Leg(1, 2, {"x": 0.5}), Leg(2, 2, {})]
        assert own == [*legs[: 1 if index == 1 else 2], end]


def test_every_job_ends_in_its_own_way_here(tmp_path: Path) -> None:
    ends_in_its_own_way(Here(), tmp_path)
    (end,), _ = do(Here(), tmp_path, "a")
    assert isinstance(end, Done)
    assert end.value["process"] == os.getpid()


def test_every_job_ends_in_its_own_way_in_processes(crew: Engine, tmp_path: Path) -> None:
    ends_in_its_own_way(crew, tmp_path)


def test_workers_are_processes_that_know_their_threads_and_their_gpu(crew: Engine, tmp_path: Path) -> None:
    ends, _ = do(crew, tmp_path, "a", "b", "c", "d")
    values = [end.value for end in ends if isinstance(end, Done)]
    assert len(values) == 4
    for name in cluster.THREAD_VARIABLES:
        assert {value[name] for value in values} == {"3"}
        assert os.environ.get(name) != "3"
    processes = {value["process"]: value["CUDA_VISIBLE_DEVICES"] for value in values}
    assert os.getpid() not in processes
    assert {*processes.values()} <= {"4", "7"}
    assert len({*processes.values()}) == len(processes)


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, ["0", "1", "0"]),
        ("", ["0", "1", "0"]),
        ("2,3", ["2", "3", "2"]),
        ("3", ["3", "3", "3"]),
        ("GPU-8f2a, MIG-77,-1", ["GPU-8f2a", "MIG-77", "GPU-8f2a"]),
    ],
)
def test_a_worker_gets_one_gpu_of_those_that_we_may_use(visible: str | None, chosen: list[str]) -> None:
    assert [gpu_for(worker, 2, visible) for worker in range(3)] == chosen


def test_a_job_whose_process_dies_is_done_elsewhere(crew: Engine, tmp_path: Path) -> None:
    ends, _ = do(crew, tmp_path, "a", "die once", "b")
    assert [type(end) for end in ends] == [Done, Done, Done]
    assert (tmp_path / "first").exists()


def test_a_lost_process_comes_back_however_long_it_takes(tmp_path: Path) -> None:
    """Also where Dask, left to itself, would not wait: it gives the only process up, and the job hangs."""
    impatient = dask.config.set({"distributed.deploy.lost-worker-timeout": 0})
    with impatient, local_cluster(1, 1) as engine:
        do(engine, tmp_path, "a")  # a process that has never worked is waited for anyway
        (end,), _ = do(engine, tmp_path, "die once")
    assert isinstance(end, Done)
    assert (tmp_path / "first").exists()


@linux
def test_a_process_that_dies_before_it_has_begun_is_replaced(tmp_path: Path) -> None:
    """Dask starts another in place of one that dies later, and none in place of its first one if that dies so early."""

    def newborn() -> list[int]:
        return [pid for pid in {*children(os.getpid())} - before if b"spawn_main" in command_of(pid)]

    def kill_at_birth() -> None:
        wait_until(lambda: bool(newborn()))
        for pid in newborn():
            os.kill(pid, signal.SIGKILL)

    before = {*children(os.getpid())}
    killer = threading.Thread(target=kill_at_birth)
    with local_cluster(1, 1) as engine:
        killer.start()
        (end,), _ = do(engine, tmp_path, "a")
        killer.join()
    assert isinstance(end, Done)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


@pytest.mark.slow
def test_a_job_that_kills_every_process_fails_alone(crew: Engine, tmp_path: Path) -> None:
    ends, _ = do(crew, tmp_path, "a", "die", "b", "c")
    assert [type(end) for end in ends] == [Done, Failed, Done, Done]
    assert ends[1][:2] == ("a lost process", "a worker died with it 4 times, or as often as the scheduler allows")
    assert (tmp_path / "die" / "error.txt").exists()


SLEEPERS = """
import sys
from pathlib import Path
from support.errands import Errand
from blockadapt_experiments.running.cluster import local_cluster
if __name__ == "__main__":
    try:
        with local_cluster(2, 1) as engine:
            engine.work([Errand("sleep", Path(sys.argv[1]))] * 2, lambda *event: None)
    except KeyboardInterrupt:
        print("interrupted")
"""


@linux
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: Path, end: signal.Signals) -> None:
    program = tmp_path / "sleepers.py"
    program.write_text(SLEEPERS)
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        env=OURS,
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
        process.send_signal(end)
    written, errors = process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert written == ("interrupted\n" if end == signal.SIGINT else "")
    assert errors == "" or (end == signal.SIGKILL and "resource_tracker" in errors)  # Python's own, after we are gone
    assert process.returncode == {signal.SIGINT: 0, signal.SIGTERM: 143, signal.SIGKILL: -9}[end]


# A cluster of others ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def others() -> Iterator[Separate]:
    """A scheduler and two workers, each a process of its own."""
    with separate_cluster(OURS) as separate:
        yield separate


@linux
def test_a_job_that_nobody_waits_for_stops_after_its_leg(others: Separate, tmp_path: Path) -> None:
    """A worker of another cluster does not end with us, but it does the next job: the last was left."""

    class Enough(Exception):
        pass

    def stop(index: int, event: Event) -> None:
        raise Enough

    for _ in range(2):  # more jobs than workers, were the first ones still there
        with remote_cluster(others.address, tmp_path) as engine, pytest.raises(Enough):
            engine.work([Errand("sleep", tmp_path)] * 2, stop)
    with remote_cluster(others.address, tmp_path) as engine:
        ends, _ = do(engine, tmp_path, "a", "b")
    assert {end.value["process"] for end in ends if isinstance(end, Done)} <= {worker.pid for worker in others.workers}


def test_a_folder_that_a_worker_does_not_see_is_named(others: Separate, tmp_path: Path) -> None:
    with remote_cluster(others.address, tmp_path / "mine") as engine:
        (end,), _ = do(engine, tmp_path, "a")
    assert isinstance(end, Failed)
    assert f"does not see {tmp_path / 'mine'}, which all workers must share" in end.words


def test_workers_of_several_threads_are_refused(tmp_path: Path) -> None:
    with separate_cluster(OURS, "--nthreads", "2", workers=1) as separate:
        assert separate.workers[0].stderr is not None
        while "Registered to" not in separate.workers[0].stderr.readline():
            pass
        with pytest.raises(ValueError, match=r"^run: `cluster` must be .*--nthreads 1.*, got 2 threads at tcp://"):
            remote_cluster(separate.address, tmp_path).__enter__()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense", "tcp://"])
def test_an_address_without_a_scheduler_is_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ANSWER", 0.5)
    with pytest.raises(ValueError, match=r"^run: `cluster` must be the address of a Dask scheduler .* got ") as refusal:
        remote_cluster(address, tmp_path).__enter__()
    assert str(refusal.value).endswith(f"got {address!r}.")


def has_in_hand(worker: subprocess.Popen[str], lock: Path) -> bool:
    """Whether this process has the file open."""
    files = Path(f"/proc/{worker.pid}/fd").iterdir()
    return any(os.readlink(file) == str(lock) for file in files)


@linux
def test_a_run_whose_worker_is_killed_ends_on_another_with_the_same_bytes(tmp_path: Path) -> None:
    changes = ("optimizers=['adam']", "epochs=60")
    for job in run_jobs(request(tmp_path / "undisturbed", *changes), {}):
        job(lambda event: None)
    out = tmp_path / "out"
    run = out / "runs" / "adam" / "-" / "seed-0"
    with separate_cluster(OURS) as separate:
        command = run_command(out, *changes, options=["--cluster", separate.address])
        with subprocess.Popen(
            command, env=OURS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
        ) as process:
            wait_until((run / "checkpoint.pt").exists, process)
            (at_it,) = (worker for worker in separate.workers if has_in_hand(worker, run / ".lock"))
            at_it.kill()
            assert not (run / "result.json").exists(), "too late to kill anybody"
            written, errors = process.communicate()
    assert process.returncode == 0, written + errors
    assert "1 of 1 runs are finished" in written
    assert outcome(out) == outcome(tmp_path / "undisturbed")
