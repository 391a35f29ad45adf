"""Measurements behind `docs/performance.md`, as ratios within one run.

Contenders of one comparison take turns, so that a slow moment of the machine meets all of them, and the median of the
turns is compared. Every row says what was measured, what the floor and the goal are, and the spread.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.moments import packed_length
from blockadapt.planning import block_flops
from blockadapt_experiments.contenders.memory import state_bytes_of
from blockadapt_experiments.models.lenets import lenet_5_caffe, lenet_300_100

Turn = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """One measure: a ratio or a count, its quartiles over the turns, and what it should be."""

    name: str
    value: float
    low: float
    high: float
    floor: str
    goal: str
    detail: str

    @property
    def spread(self) -> str:
        """The quartiles, where there are any."""
        return "" if self.low == self.high else f"{self.low:.3g} – {self.high:.3g}"


def take_turns(contenders: dict[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round; two rounds before are not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 2):
        for name, turn in contenders.items():
            seconds = turn()
            if number >= 2:
                times[name].append(seconds)
    return times


def ratio(times: dict[str, list[float]], above: str, below: str) -> tuple[float, float, float]:
    """Median and quartiles over the rounds of above/below."""
    ratios = [a / b for a, b in zip(times[above], times[below], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return median(times[above]) / median(times[below]), low, high


def milliseconds(times: dict[str, list[float]], *names: str) -> str:
    """The median of each of them."""
    return ", ".join(f"{name} {1e3 * median(times[name]):.3g} ms" for name in names)


class Training:
    """A network, a fixed batch of 128, and an optimizer; a turn times either the whole step or `optimizer.step`."""

    def __init__(self, model: nn.Module, batch: Tensor, make: Callable[[Any], Optimizer]) -> None:
        self.model, self.batch = copy.deepcopy(model), batch
        self.labels = torch.arange(len(batch)) % 10
        self.optimizer = make(self.model.parameters())

    def backward(self) -> None:
        """Fill the gradients."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.batch), self.labels).backward()

    def whole(self, repeats: int) -> Turn:
        """Seconds of a whole training step, mean of `repeats`."""

        def turn() -> float:
            start = time.perf_counter()
            for _ in range(repeats):
                self.backward()
                self.optimizer.step()
            return (time.perf_counter() - start) / repeats

        return turn

    def step(self, repeats: int) -> Turn:
        """Seconds of `optimizer.step` alone, mean of `repeats`, each after a fresh backward pass."""

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
    """A batch with MNIST's sparsity: about a fifth of the pixels are lit."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)


def _block_adam(**options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: BlockAdam(params, lr=1e-4, **options)


def lenet_300_rows(rounds: int) -> Iterator[Row]:
    """LeNet-300-100 against eigh, Adam, SOAP and Shampoo."""
    import pytorch_optimizer

    model, batch = lenet_300_100(), mnist_like((128, 784))
    options = {"eigh": {"backend": "eigh"}, "numba": {"backend": "numba"}}
    for size, floor, goal in ((10, "≥ 25", "≥ 60"), (25, "≥ 14", "≥ 30")):
        contenders = {
            name: Training(model, batch, _block_adam(block_size=size, **option)).step(1 if name == "eigh" else 20)
            for name, option in options.items()
        }
        times = take_turns(contenders, max(5, rounds // 3))
        detail = milliseconds(times, "eigh", "numba")
        name = f"step, LeNet-300-100, blocks of {size}: eigh / numba"
        yield Row(name, *ratio(times, "eigh", "numba"), floor, goal, detail)
    yield from _network_rows("LeNet-300-100", model, batch, rounds, 10, "≤ 3.5", "≤ 1.5", pytorch_optimizer)


def lenet_5_rows(rounds: int) -> Iterator[Row]:
    """LeNet-5-Caffe against Adam, SOAP and Shampoo."""
    import pytorch_optimizer

    model, batch = lenet_5_caffe(), mnist_like((128, 1, 28, 28))
    yield from _network_rows("LeNet-5-Caffe", model, batch, rounds, 1, "≤ 1.35", "≤ 1.1", pytorch_optimizer)


def _network_rows(
    name: str, model: nn.Module, batch: Tensor, rounds: int, repeats: int, floor: str, goal: str, peers: Any
) -> Iterator[Row]:
    adam: Callable[[Any], Optimizer] = lambda params: torch.optim.Adam(params, lr=1e-4)  # noqa: E731
    whole = {
        "Adam": Training(model, batch, adam).whole(repeats),
        "Block-Adam": Training(model, batch, _block_adam()).whole(repeats),
    }
    times = take_turns(whole, rounds)
    values = ratio(times, "Block-Adam", "Adam")
    yield Row(f"training step, {name}: Block-Adam / Adam", *values, floor, goal, milliseconds(times, *whole))
    steps = {
        "Block-Adam": Training(model, batch, _block_adam()).step(repeats),
        "SOAP": Training(model, batch, lambda params: peers.SOAP(params, lr=1e-4)).step(repeats),
        "ScalableShampoo": Training(model, batch, lambda params: peers.ScalableShampoo(params, lr=1e-4)).step(repeats),
    }
    times = take_turns(steps, max(5, rounds // 3))
    for peer, peer_floor in (("SOAP", "≤ 1"), ("ScalableShampoo", "–")):
        values = ratio(times, "Block-Adam", peer)
        detail = milliseconds(times, "Block-Adam", peer)
        yield Row(f"step, {name}: Block-Adam / {peer}", *values, peer_floor, "≤ 1", detail)


def scaling_rows(rounds: int) -> Iterator[Row]:
    """What a parameter costs in a large model, and what the model costs in memory."""
    steps = {}
    for name, side in (("1 M", 1000), ("10 M", 3160)):
        param, optimizer = _square(side)
        steps[name] = _timed_step(optimizer, param)
    times = take_turns(steps, max(5, rounds // 3))
    per_parameter = {name: [t / side**2 for t in times[name]] for name, side in (("1 M", 1000), ("10 M", 3160))}
    detail = ", ".join(f"{name}: {1e9 * median(per_parameter[name]):.3g} ns a parameter" for name in per_parameter)
    yield Row("time a parameter, 10 M / 1 M", *ratio(per_parameter, "10 M", "1 M"), "≤ 1.3", "≤ 1.1", detail)

    model = lenet_300_100()
    optimizer = BlockAdam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    held = sum(t.numel() for state in optimizer.state.values() for t in state.values() if t.is_floating_point())
    floats = held / sum(p.numel() for p in model.parameters())
    name = "state, LeNet-300-100, blocks of 10: floats a parameter"
    yield Row(name, floats, floats, floats, "≤ 6.9", "≤ 6.6", "m included")

    param, optimizer = _square(3160)
    shares = [100 * _extra_memory(optimizer) / state_bytes_of(optimizer) for _ in range(5)]
    detail = f"state {state_bytes_of(optimizer) / 1e6:.0f} MB, 10 M parameters, peak resident memory"
    name = "extra memory in a step, % of the state"
    yield Row(name, median(shares), min(shares), max(shares), "≤ 35", "≤ 10", detail)


def option_rows(rounds: int) -> Iterator[Row]:
    """What a closed clip interval and a kept basis save."""
    model, batch = lenet_300_100(), mnist_like((128, 784))
    sgd: Callable[[Any], Optimizer] = lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9)  # noqa: E731
    closed = SpectrumClip(final_lr=1e-3, gamma=1e3)
    contenders = {
        "SGD": Training(model, batch, sgd).step(20),
        "closed": Training(model, batch, _block_adam(clip=closed)).step(20),
        "every step": Training(model, batch, _block_adam()).step(20),
        "refresh_every=10": Training(model, batch, _block_adam(refresh_every=10)).step(20),
    }
    times = take_turns(contenders, rounds)
    detail = milliseconds(times, "closed", "SGD")
    yield Row("step: closed clip / SGD with momentum", *ratio(times, "closed", "SGD"), "≤ 4", "≤ 1.5", detail)
    detail = milliseconds(times, "refresh_every=10", "every step")
    values = ratio(times, "refresh_every=10", "every step")
    yield Row("step: refresh_every=10 / every step", *values, "≤ 0.5", "≤ 0.25", detail)


def limit_rows(rounds: int) -> Iterator[Row]:
    """How near the kernel is to what the machine can do: arithmetic and memory against simple peaks of the same run."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source, target = torch.randn(2**25), torch.empty(2**25)
    peaks = {"matmul": _timed(lambda: torch.mm(a, b)), "copy": _timed(lambda: target.copy_(source))}
    steps = {}
    for size in (10, 25):
        param, optimizer = _square(1000, block_size=size)
        steps[f"blocks of {size}"] = _timed_step(optimizer, param)
    times = take_turns({**peaks, **steps}, max(5, rounds // 3))
    peak_flops, peak_bytes = 2 * 1024**3 / median(times["matmul"]), 8 * 2**25 / median(times["copy"])
    for size in (10, 25):
        seconds = median(times[f"blocks of {size}"])
        blocks = 1000 * 1000 // size
        flops = blocks * block_flops(size) / seconds
        # V, m and x are read and written, g is read.
        moved = blocks * 4 * (2 * packed_length(size) + 5 * size) / seconds
        for what, reached, peak, unit in (
            ("arithmetic", flops, peak_flops, "GFLOP/s"),
            ("memory", moved, peak_bytes, "GB/s"),
        ):
            share = 100 * reached / peak
            detail = f"{reached / 1e9:.3g} of {peak / 1e9:.3g} {unit}"
            yield Row(f"blocks of {size}: {what}, % of peak", share, share, share, "–", "–", detail)


SECTIONS: dict[str, Callable[[int], Iterator[Row]]] = {
    "LeNet-300-100": lenet_300_rows,
    "LeNet-5-Caffe": lenet_5_rows,
    "large models": scaling_rows,
    "options": option_rows,
    "limits": limit_rows,
}


def _square(side: int, **options: Any) -> tuple[Tensor, BlockAdam]:
    """One weight of side × side with a gradient, and an optimizer that has taken a step."""
    param = nn.Parameter(torch.zeros(side, side))
    param.grad = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    optimizer = BlockAdam([param], **options)
    optimizer.step()
    return param, optimizer


def _timed(call: Callable[[], Any]) -> Turn:
    def turn() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return turn


def _timed_step(optimizer: Optimizer, param: Tensor) -> Turn:
    def turn() -> float:
        param.grad = torch.randn_like(param)
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return turn


def _extra_memory(optimizer: Optimizer) -> int:
    """Bytes by which the resident memory peaks during a step (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or memory freed earlier would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    optimizer.step()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")
