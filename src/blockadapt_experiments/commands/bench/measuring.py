"""Take measures: contenders take turns within one run, and every row says what it should be and what it is."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blockadapt import BlockAdam

Turn = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """Holds one measure: a ratio or a count, its quartiles over the turns, and what it should be."""

    name: str
    value: float
    low: float
    high: float
    floor: str
    goal: str
    detail: str

    @property
    def spread(self) -> str:
        """Write the quartiles, where there are any."""
        return "" if self.low == self.high else f"{self.low:.3g} – {self.high:.3g}"

    @property
    def reached(self) -> str:
        """Tell whether the value reaches the goal or the floor; "" where there is neither."""
        if _is_reached(self.value, self.goal):
            return "goal"
        if _is_reached(self.value, self.floor):
            return "floor"
        return "" if self.floor == NONE else "MISSED"


NONE = "–"
"""Instead of a floor or a goal where there is none."""


def _is_reached(value: float, rule: str) -> bool:
    """Tell whether a value is as a rule such as "≤ 1.2" asks."""
    if rule == NONE:
        return False
    sign, bound = rule.split()
    return value <= float(bound) if sign == "≤" else value >= float(bound)


def take_turns(contenders: dict[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round. Two rounds before are not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 2):
        for name, turn in contenders.items():
            seconds = turn()
            if number >= 2:
                times[name].append(seconds)
    return times


def ratio(times: dict[str, list[float]], above: str, below: str) -> tuple[float, float, float]:
    """Return median and quartiles of above/below, where each round gives a ratio of its own."""
    low, middle, high = quantiles([a / b for a, b in zip(times[above], times[below], strict=True)], n=4)
    return middle, low, high


def milliseconds(times: dict[str, list[float]], *names: str) -> str:
    """Write the median of each of them."""
    return ", ".join(f"{name} {1e3 * median(times[name]):.3g} ms" for name in names)


WARM = 30
"""Steps that are taken before the first turn. Blocks of up to 25 then have full rank, as in the midst of training."""


class Training:
    """Trains a network on one batch of 128 after another; a turn times either the whole step or `optimizer.step`."""

    def __init__(self, model: nn.Module, batches: Tensor, make: Callable[[Any], Optimizer]) -> None:
        self.model, self.batches = copy.deepcopy(model), cycle(batches)
        self.labels = torch.arange(batches.shape[1]) % 10
        self.optimizer = make(self.model.parameters())
        for _ in range(WARM):
            self.backward()
            self.optimizer.step()

    def backward(self) -> None:
        """Fill the gradients, with those of the next batch."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(next(self.batches)), self.labels).backward()

    def whole(self, repeats: int) -> Turn:
        """Return a turn that times a whole training step, mean of `repeats`."""

        def turn() -> float:
            start = time.perf_counter()
            for _ in range(repeats):
                self.backward()
                self.optimizer.step()
            return (time.perf_counter() - start) / repeats

        return turn

    def step(self, repeats: int) -> Turn:
        """Return a turn that times `optimizer.step` alone, mean of `repeats`, each after a fresh backward pass."""

        def turn() -> float:
            seconds = 0.0
            for _ in range(repeats):
                self.backward()
                start = time.perf_counter()
                self.optimizer.step()
                seconds += time.perf_counter() - start
            return seconds / repeats

        return turn


def mnist_like(shape: tuple[int, ...]) -> Tensor:
    """Draw `WARM` batches as sparse as MNIST: about a fifth of the pixels are lit."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(WARM, *shape, generator=generator) * (torch.rand(WARM, *shape, generator=generator) < 0.2)


def block_adam(**options: Any) -> Callable[[Any], Optimizer]:
    """Return what makes Block-Adam with these options, for whatever parameters."""
    return lambda params: BlockAdam(params, lr=1e-4, **options)


def timed(call: Callable[[], Any]) -> Turn:
    """Return a turn that times the call."""

    def turn() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return turn


def timed_step(optimizer: Optimizer, params: Sequence[Tensor], repeats: int = 1) -> Turn:
    """Return a turn that times `optimizer.step`, mean of `repeats`, each with gradients that nobody has touched."""

    def step() -> float:
        for param in params:
            param.grad = torch.randn_like(param)
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    for _ in range(WARM):
        step()
    return lambda: sum(step() for _ in range(repeats)) / repeats


def floats_a_parameter(optimizer: Optimizer) -> float:
    """Count the numbers in the state, without counters, for each number of the parameters."""
    held: int = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.is_floating_point())
    return held / sum(int(param.numel()) for group in optimizer.param_groups for param in group["params"])
