"""Seconds are those of training: neither measuring nor threads and processes that are not the run's add to them."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from blockadapt_experiments.core import clock
from blockadapt_experiments.core.training import Classification, Sets, TrainingSettings
from blockadapt_experiments.data.examples import Examples

linux = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="the times of threads are not told, or not asked for"
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is timed by the wall")
def test_one_thread_is_timed_by_the_processor_and_several_by_the_wall(threads: None) -> None:
    taken = []
    for count in (1, 2):
        torch.set_num_threads(count)
        start = clock.seconds()
        time.sleep(0.5)
        taken.append(clock.seconds() - start)
    assert taken[0] < 0.25
    assert taken[1] > 0.45


def work() -> None:
    """Keep a core busy, without the interpreter."""
    hashlib.sha256(bytes(30_000_000))


def counted(do: Callable[[], object]) -> float:
    """The share of what this takes the whole process that the clock of a run counts."""
    start, used = clock.seconds(), time.process_time()
    do()
    return (clock.seconds() - start) / (time.process_time() - used)


@linux
def test_threads_that_a_run_starts_are_counted_and_no_others(threads: None) -> None:
    """A bar of progress is drawn by one, and a worker of Dask has several."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as theirs, ThreadPoolExecutor(1) as ours:
        theirs.submit(int).result()
        with clock.own_threads():
            assert counted(lambda: theirs.submit(work).result()) < 0.2
            assert counted(lambda: ours.submit(work).result()) > 0.9
            with ThreadPoolExecutor(1) as short:
                assert counted(lambda: (short.submit(work), short.shutdown())) > 0.9
        with clock.own_threads():  # the next run of the process, whose optimizer keeps its threads
            assert counted(lambda: theirs.submit(work).result()) < 0.2
            assert counted(lambda: ours.submit(work).result()) > 0.9


@linux
def test_a_thread_that_ends_takes_back_nothing_of_what_was_not_counted(threads: None) -> None:
    torch.set_num_threads(1)
    theirs = ThreadPoolExecutor(1)
    theirs.submit(work).result()
    with clock.own_threads():
        start = clock.seconds()
        theirs.shutdown()
        assert clock.seconds() - start < 0.01


def test_what_is_not_counted_is_left_out_also_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(clock, "_now", lambda: now)

    def fail() -> None:
        nonlocal now
        now += 100
        raise KeyError

    start = clock.seconds()
    with clock.not_counted():
        now += 10
    now += 1
    with pytest.raises(KeyError), clock.not_counted():
        fail()
    now += 2
    assert clock.seconds() - start == pytest.approx(3)


def test_an_epoch_takes_what_its_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0.0

    class Slow(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            nonlocal passed
            passed += 1 if self.training else 100
            return super().forward(given)

    monkeypatch.setattr(clock, "_now", lambda: passed)
    examples = Examples(torch.zeros(12, 3), torch.zeros(12, dtype=torch.int64))
    settings = TrainingSettings(epochs=2)
    task = Classification(
        model=lambda: Slow(3, 2),
        sets=Sets(examples, {"test": examples}),
        settings=settings,
        optimizer=lambda model, /, *, steps: torch.optim.SGD(model.parameters(), lr=0.1),
        seed=0,
        prepare=lambda images: images,
    )
    start = clock.seconds()
    task.advance()
    assert clock.seconds() - start == pytest.approx(settings.steps(12)[0])
