"""Measure one GPU: a step of Adam, SOAP and Block-Adam under each of its kernels, as ratios within one run.

A turn times the step alone, from an idle device to an idle device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blockadapt import BlockAdam
from blockadapt.validation import require
from blockadapt_experiments.commands.bench.measuring import Row, Turn, milliseconds, ratio, take_turns
from blockadapt_experiments.models.lenets import lenet_300_100

Make = Callable[[Any], Optimizer]

FOREACH = "Adam (foreach)"


def require_device(name: str) -> torch.device:
    """Read the name of a device on which steps can be measured.

    Raises:
        ValueError: torch knows no such device, or does not find it here.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # the device "meta" has no numbers
    except (RuntimeError, AssertionError, NotImplementedError):
        device = None
    require(device is not None, "bench", "device", "the CPU or a GPU that torch finds here", name)
    assert device is not None
    return device


def contenders() -> dict[str, Make]:
    """Name the optimizers that take turns, the one that the others are compared with first."""
    import pytorch_optimizer

    def block_adam(backend: str, **options: Any) -> Make:
        return lambda params: BlockAdam(params, lr=1e-4, backend=backend, on_nonfinite="propagate", **options)

    return {
        FOREACH: lambda params: torch.optim.Adam(params, lr=1e-4, foreach=True),
        "Adam (fused)": lambda params: torch.optim.Adam(params, lr=1e-4, fused=True),
        "SOAP": lambda params: pytorch_optimizer.SOAP(params, lr=1e-4),
        "Block-Adam (eigh)": block_adam("eigh"),
        "Block-Adam (triton)": block_adam("triton"),
        "Block-Adam (triton, refresh_every=10)": block_adam("triton", refresh_every=10),
    }


def models() -> dict[str, Callable[[], nn.Module]]:
    """Name the networks: one that leaves a GPU idle, and one that fills it, with 25 million weights."""
    wide = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return {"LeNet-300-100": lenet_300_100, "6 layers of 2048": lambda: nn.Sequential(*wide)}


def gpu_rows(device: torch.device, rounds: int, makes: Mapping[str, Make], model: str) -> Iterator[Row]:
    """Measure each contender's step on one network against the first contender's.

    Yields:
        A ratio for each but the first.
    """
    steps = {name: timed_step(models()[model]().to(device), make) for name, make in makes.items()}
    times = take_turns(steps, max(5, rounds // 3))
    for name in [name for name in makes if name != FOREACH]:
        detail = milliseconds(times, name, FOREACH)
        yield Row(f"step, {model}, {device}: {name} / {FOREACH}", *ratio(times, name, FOREACH), "–", "–", detail)


def timed_step(model: nn.Module, make: Make) -> Turn:
    """Time `optimizer.step` under new gradients, which are made while no clock runs."""
    params: list[Tensor] = list(model.parameters())
    optimizer = make(params)

    def turn() -> float:
        for param in params:
            param.grad = torch.randn_like(param)
        _finish(params[0].device)
        start = time.perf_counter()
        optimizer.step()
        _finish(params[0].device)
        return time.perf_counter() - start

    return turn


def _finish(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
