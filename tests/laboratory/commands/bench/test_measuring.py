"""What `blockadapt bench` says of what it measured."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from blockadapt import BlockAdam
from blockadapt.moments import unpack
from blockadapt_experiments.commands.bench import blocks
from blockadapt_experiments.commands.bench.measuring import (
    WARM,
    Row,
    Training,
    floats_a_parameter,
    mnist_like,
    ratio,
    take_turns,
    timed_step,
)
from blockadapt_experiments.commands.display import bench_table
from blockadapt_experiments.running.runner import threads


def test_the_value_lies_within_its_own_quartiles() -> None:
    """Ratios of medians would not: here 3 / 2, outside of [2, 4]."""
    times = {"above": [1.0, 3.0, 4.0], "below": [0.5, 2.0, 1.0], "third": [1.0, 1.0, 1.0]}
    value, low, high = ratio(times, "above", "below")
    assert (value, low, high) == (2.0, 1.5, 4.0)
    assert low <= value <= high


@pytest.mark.parametrize(
    ("value", "floor", "goal", "reached"),
    [
        (0.7, "≤ 1.2", "≤ 0.8", "goal"),
        (1.2, "≤ 1.2", "≤ 0.8", "floor"),
        (1.3, "≤ 1.2", "≤ 0.8", "MISSED"),
        (61.0, "≥ 25", "≥ 60", "goal"),
        (30.0, "≥ 25", "≥ 60", "floor"),
        (20.0, "≥ 25", "≥ 60", "MISSED"),
        (2.0, "–", "≤ 1", ""),
        (2.0, "–", "–", ""),
    ],
)
def test_a_missed_floor_is_marked(value: float, floor: str, goal: str, reached: str) -> None:
    row = Row("measure", value, value, value, floor, goal, "")
    assert row.reached == reached
    console = Console(file=io.StringIO(), width=200)
    console.print(bench_table([row]))
    assert ("MISSED" in console.file.getvalue()) == (reached == "MISSED")  # type: ignore[attr-defined]


def test_contenders_take_turns_and_the_first_two_rounds_do_not_count() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = take_turns({"a": lambda: turn("a"), "b": lambda: turn("b")}, 3)
    assert order == ["a", "b"] * 5
    assert times == {"a": [5.0, 7.0, 9.0], "b": [6.0, 8.0, 10.0]}


def test_state_is_counted_without_counters_and_steps_are_taken_on_one_thread() -> None:
    param = nn.Parameter(torch.zeros(10, 4))
    optimizer = BlockAdam([param], backend="eigh")
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
        timed_step(optimizer, [param], repeats=3)()
    assert torch.get_num_threads() == before
    assert int(optimizer.state[param]["step"]) == WARM + 3
    assert floats_a_parameter(optimizer) == 6.5


def test_blocks_have_full_rank_when_the_clock_starts() -> None:
    """Of one batch, again and again, they would have rank 1, which is another way through the kernel."""
    training = Training(nn.Linear(784, 10), mnist_like((128, 784)), lambda params: BlockAdam(params, lr=1e-4))
    states = training.optimizer.state
    V = states[next(iter(states))]["second_moment"][:32]
    eigenvalues = torch.linalg.eigvalsh(unpack(V, 10).double())
    assert (eigenvalues[:, 1] > 1e-3 * eigenvalues[:, -1]).all()  # the first is zero: softmax's gradients sum to it


def test_the_cost_of_measuring_the_final_lr_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an open interval, whose only difference is whether α* is measured."""
    made: list[BlockAdam] = []

    def block_adam(**options: Any) -> Callable[[Any], BlockAdam]:
        def make(params: Any) -> BlockAdam:
            made.append(BlockAdam(params, lr=1e-4, **options))
            return made[-1]

        return make

    monkeypatch.setattr(blocks, "block_adam", block_adam)
    rows = {row.name: row for row in blocks.option_rows(2)}
    row = rows["step, LeNet-300-100, blocks of 10: measured α* / given α*"]
    assert row.floor == "≤ 1.02"
    assert row.value > 0
    given, measured = (
        optimizer for optimizer in made if optimizer.param_groups[0]["clip"] and optimizer is not made[0]
    )
    assert (given.param_groups[0]["clip"].final_lr, measured.param_groups[0]["clip"].final_lr) == (1e-3, "auto")
    assert given.param_groups[0]["block_size"] == measured.param_groups[0]["block_size"] == 10
    for optimizer in (given, measured):  # the matrices of a closed one would be gone
        assert all("second_moment" in state for state in optimizer.state.values())
