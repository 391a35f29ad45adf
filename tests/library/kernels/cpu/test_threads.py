"""Threads: the same bits however many there are, and torch's own setting left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockadapt import BlockAdam
from blockadapt.kernels.cpu import threads as threads_module
from blockadapt.kernels.cpu import work

DTYPES = [torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model(dtype: torch.dtype) -> nn.Module:
    """Many shapes: blocks of several sizes, short runs, a convolution, and enough tiles for two threads."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 40, 3), nn.Conv2d(40, 5, 5), nn.Linear(123, 77), nn.Linear(77, 10), nn.Embedding(50, 6)]
    return nn.ModuleList([*layers, nn.LayerNorm(13)]).to(dtype)


def train_(net: nn.Module, threads: int, **options: Any) -> BlockAdam:
    """Take five steps."""
    torch.set_num_threads(threads)
    optimizer = BlockAdam(net.parameters(), backend="numba", **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for param in net.parameters():
            param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        optimizer.step()
    return optimizer


def trained(threads: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """Parameters and state after five steps."""
    net = model(dtype)
    optimizer = train_(net, threads, **options)
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    assert state
    return [*(param.detach() for param in net.parameters()), *state]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.equal(y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def python_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch has no GNU OpenMP."""
    monkeypatch.setattr(threads_module, "_gnu_openmp", lambda: None)
    monkeypatch.setattr(threads_module, "_crew", threads_module._Crew())


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that steps ask for."""
    numbers: list[int] = []
    original = threads_module.run_on_threads

    def noting(function: Any, data: int, threads: int) -> None:
        numbers.append(threads)
        original(function, data, threads)

    monkeypatch.setattr(work, "run_on_threads", noting)
    return numbers


@each_dtype
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"refresh_every": 2}], ids=["plain", "amsgrad", "refresh"])
def test_two_threads_give_the_same_bits_as_one(dtype: torch.dtype, options: dict[str, Any], used: list[int]) -> None:
    one = trained(1, dtype, **options)
    assert set(used) == {1}
    used.clear()
    two = trained(2, dtype, **options)
    assert 2 in used
    assert same(one, two)


def test_more_threads_than_cores_give_the_same_bits(used: list[int]) -> None:
    one = trained(1)
    assert same(one, trained(7))
    assert 7 in used


def test_repeated_runs_on_two_threads_give_the_same_bits() -> None:
    first = trained(2)
    for _ in range(5):
        assert same(first, trained(2))


@pytest.mark.usefixtures("python_threads")
@each_dtype
def test_python_threads_give_the_same_bits(dtype: torch.dtype) -> None:
    one = trained(1, dtype)
    assert threads_module._crew._size == 0
    assert same(one, trained(2, dtype))
    assert threads_module._crew._size == 1
    assert same(one, trained(5, dtype))
    assert threads_module._crew._size > 1


@pytest.mark.usefixtures("python_threads")
def test_python_threads_raise_what_the_function_raised() -> None:
    def failing(data: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("from a thread")

    with pytest.raises(RuntimeError, match="from a thread"):
        threads_module.run_on_threads(failing, 0, 2)


@pytest.mark.usefixtures("python_threads")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_thread_runs_the_function_once(count: int) -> None:
    calls = []
    everyone = threading.Barrier(count, timeout=20)

    def note(data: int) -> None:
        everyone.wait()  # returns only if this many run at once
        calls.append(data)

    threads_module.run_on_threads(note, 42, count)
    assert calls == [42] * count


@pytest.mark.usefixtures("python_threads")
def test_after_ready_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls: list[int] = []
    threads_module.ready(3)
    monkeypatch.setattr(threading.Thread, "start", no_more)
    threads_module.ready(3)
    threads_module.run_on_threads(calls.append, 42, 3)
    assert calls == [42] * 3
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threads_module.ready(4)
    threads_module.run_on_threads(calls.append, 42, 3)
    assert calls == [42] * 6


@pytest.mark.usefixtures("python_threads")
def test_threads_that_could_be_started_are_kept_when_one_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def only_two(self: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", only_two)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads_module.ready(4)
    calls: list[int] = []
    threads_module.run_on_threads(calls.append, 42, 3)
    assert (len(started), calls) == (2, [42] * 3)


@pytest.mark.usefixtures("python_threads")
def test_ctrl_c_is_raised_only_when_no_thread_writes_any_more() -> None:
    pressed = threading.Event()
    ended = []

    def function(data: int) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        pressed.wait(0.3)  # the main thread has the signal long before
        ended.append(data)

    with pytest.raises(KeyboardInterrupt):
        threads_module.run_on_threads(function, 42, 2)
    assert ended == [42]


def test_the_number_of_threads_is_that_of_torch_and_no_more_than_there_is_work(used: list[int]) -> None:
    torch.set_num_threads(4)
    param = nn.Parameter(torch.zeros(10))
    optimizer = BlockAdam([param], backend="numba")
    param.grad = torch.ones(10)
    optimizer.step()
    assert used == [1]


def test_a_step_from_another_thread_gives_the_same_bits() -> None:
    expected = trained(2)
    results: list[list[Tensor]] = []
    thread = threading.Thread(target=lambda: results.append(trained(2)))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert same(results[0], expected)


def test_optimizers_that_step_in_two_threads_at_once_do_not_disturb_each_other() -> None:
    expected = trained(2)
    nets = [model(torch.float32) for _ in range(2)]
    workers = [threading.Thread(target=train_, args=(net, 2)) for net in nets]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    for net in nets:
        params = [param.detach() for param in net.parameters()]
        assert same(params, expected[: len(params)])


# ---------------------------------------------------------------------------------------------------- other processes


def run(script: str, timeout: float = 60, **environment: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


STEP = """
import torch
from blockadapt import BlockAdam
param = torch.nn.Parameter(torch.zeros(300, 100))
def step():
    torch.manual_seed(0)
    param.grad = torch.randn(300, 100)
    optimizer.step()
"""


@pytest.mark.parametrize("environment", [{}, {"OMP_NUM_THREADS": "1"}], ids=["unset", "one"])
def test_torchs_number_of_threads_stays_as_it_was(environment: dict[str, str]) -> None:
    """Numba's own thread pool would change it."""
    script = """
    before = torch.get_num_threads()
    optimizer = BlockAdam([param], backend="numba")
    made = torch.get_num_threads()
    step()
    print(before, made, torch.get_num_threads())
    """
    counts = run(STEP + textwrap.dedent(script), **environment).split()
    assert len(counts) == 3
    assert len(set(counts)) == 1
    if "OMP_NUM_THREADS" in environment:
        assert counts[0] == environment["OMP_NUM_THREADS"]


def test_a_number_of_threads_that_the_user_set_stays_and_can_be_changed_later() -> None:
    script = """
    optimizer = BlockAdam([param], backend="numba")
    for count in (3, 1, 2):
        torch.set_num_threads(count)
        step()
        print(torch.get_num_threads())
    """
    assert run(STEP + textwrap.dedent(script)).split() == ["3", "1", "2"]


END_OF_CHILD = """
import signal, time
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        print("ended", os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.05)
else:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("hung")
"""


def test_a_forked_child_can_step_after_its_parent_has_used_two_threads() -> None:
    """The child has none of the parent's threads, so it must not wait for them.

    The parameter is small, because torch's own operations on large tensors do hang in such a child.
    """
    script = """
    import os
    torch.set_num_threads(2)
    optimizer = BlockAdam([param], backend="numba")
    step()
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0)
    """
    small = STEP.replace("300, 100", "40, 64")
    assert run(small + textwrap.dedent(script) + END_OF_CHILD).split() == ["ended", "0"]


def test_a_forked_child_starts_threads_of_its_own_after_its_parent_has_used_python_threads() -> None:
    script = """
    import os
    from blockadapt.kernels.cpu import threads
    threads._gnu_openmp = lambda: None
    calls = []
    threads.run_on_threads(calls.append, 1, 3)
    child = os.fork()
    if child == 0:
        threads.run_on_threads(calls.append, 2, 3)
        os._exit(10 * calls.count(1) + calls.count(2))
    """
    assert run(textwrap.dedent(script) + END_OF_CHILD).split() == ["ended", "33"]
