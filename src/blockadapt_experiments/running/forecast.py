"""Forecast what a run will take before it begins: steps, blocks, the optimizer's memory, and time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from blockadapt import plan
from blockadapt.optimizers import BlockOptimizer
from blockadapt_experiments.contenders.memory import state_bytes_of
from blockadapt_experiments.core.training import Work
from blockadapt_experiments.experiments.registry import get_experiment
from blockadapt_experiments.results.measurements import Row, RunKey
from blockadapt_experiments.running.runner import Request, threads, warm_up

LEAST_STEPS = 4
"""Steps to take at least; the first, which allocates, is not counted."""

MOST_STEPS = 12
"""Steps to take at most: enough for SOAP to renew its bases once."""

PATIENCE = 10.0
"""Seconds after which the least steps are enough."""


@runtime_checkable
class Trained(Protocol):
    """Names what a task needs so that it can be forecast: a model, its optimizer, and what there is to do."""

    model: nn.Module
    optimizer: Optimizer
    work: Work

    def advance(self) -> Sequence[Row]:
        """Do the next leg."""
        ...


@dataclass(frozen=True)
class Forecast:
    """Says what one run of an arm will take.

    Attributes:
        arm: The optimizer.
        variant: The variant.
        parameters: Of the model.
        steps: Of the optimizer.
        sizes: Number of blocks of each size; empty if it is no block method.
        state_bytes: Memory of the optimizer's state.
        step_seconds: Of a whole training step.
        measure_seconds: Of a minibatch that is only measured on.
        seconds: Of the run, without what it takes to load its data and to write its records.
    """

    arm: str
    variant: str
    parameters: int
    steps: int
    sizes: dict[int, int]
    state_bytes: int
    step_seconds: float
    measure_seconds: float
    seconds: float


def dry_run(request: Request) -> Iterator[Forecast]:
    """Take a few steps with every arm and throw them away. Arms that train no model have no forecast.

    A run is measured alone, with the threads that it will have. Runs at once that share a memory are slower.

    Yields:
        The forecast of each arm in each variant.
    """
    for arm, variant in request.arms():
        with threads(request.threads):
            warm_up(get_experiment(request.experiment).dtype)
            seed = request.settings.seeds[0]
            torch.manual_seed(seed)
            task = request.task(RunKey(arm, variant, seed), request.lr(arm))
            if isinstance(task, Trained):
                yield _forecast(task, arm, variant)


def total_seconds(forecasts: Sequence[Forecast], request: Request, workers: int, points: int) -> float:
    """Give the time of all runs, `workers` at once, and of the trials at `points` points of a grid if there are any.

    Trials are a little shorter than runs; those beyond the grid are not counted.
    """
    settings = request.settings
    repeats = len(settings.seeds) + points * len(settings.tune.seeds)
    return sum(forecast.seconds for forecast in forecasts) * repeats / workers


class _Enough(Exception):
    """Says that steps enough were taken."""


def _forecast(task: Trained, arm: str, variant: str) -> Forecast:
    step, inputs = _measured_steps(task)
    measure = _seconds_of_measuring(task.model, inputs)
    optimizer, work = task.optimizer, task.work
    return Forecast(
        arm=arm,
        variant=variant,
        parameters=sum(parameter.numel() for parameter in task.model.parameters()),
        steps=work.steps,
        sizes=plan(optimizer).sizes if isinstance(optimizer, BlockOptimizer) else {},
        state_bytes=state_bytes_of(optimizer),
        step_seconds=step,
        measure_seconds=measure,
        seconds=work.steps * step + work.measured * measure,
    )


def _measured_steps(task: Trained) -> tuple[float, tuple[Any, ...]]:
    """Return the seconds of a step, mean over those after the first, and what the model was last given."""
    times: list[float] = []
    given: list[tuple[Any, ...]] = []
    start = _now()

    def after_step(*_: Any) -> None:
        times.append(_now())
        patient = times[-1] - start < PATIENCE or len(times) < LEAST_STEPS
        if len(times) >= MOST_STEPS or not patient:
            raise _Enough

    hooks = (
        task.optimizer.register_step_post_hook(after_step),
        task.model.register_forward_pre_hook(lambda model, inputs: given.append(inputs) if model.training else None),
    )
    try:
        task.advance()
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if len(times) < 2:  # a leg of one step, or one that diverged at once
        return _now() - start, given[-1]
    return (times[-1] - times[0]) / (len(times) - 1), given[-1]


@torch.no_grad()
def _seconds_of_measuring(model: nn.Module, inputs: tuple[Any, ...]) -> float:
    """Time the model's answer to a minibatch, the faster of two."""
    model.eval()
    times = []
    for _ in range(2):
        start = _now()
        model(*inputs)
        times.append(_now() - start)
    return min(times)


def _now() -> float:
    """Read the clock once a GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
