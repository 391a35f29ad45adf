"""Seconds are those of training: neither measuring nor other processes add to them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from blockadapt_experiments.core import clock
from blockadapt_experiments.core.training import Classification, Sets, TrainingSettings
from blockadapt_experiments.data.examples import Examples


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
