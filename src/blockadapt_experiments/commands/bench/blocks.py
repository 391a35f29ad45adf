"""Measure what blocks cost by themselves, and how near a step comes to the machine's peaks."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.moments import packed_length
from blockadapt.planning import block_flops
from blockadapt_experiments.commands.bench.measuring import (
    NONE,
    Row,
    Training,
    block_adam,
    floats_a_parameter,
    milliseconds,
    mnist_like,
    ratio,
    take_turns,
    timed,
    timed_step,
)
from blockadapt_experiments.contenders.memory import state_bytes_of
from blockadapt_experiments.models.lenets import lenet_300_100
from blockadapt_experiments.running.runner import threads


def scaling_rows(rounds: int) -> Iterator[Row]:
    """Measure what a parameter costs in a large model, and what the model costs in memory.

    Yields:
        A ratio of times, and what the state and a step hold in memory.
    """
    steps = {}
    for name, side in (("1 M", 1000), ("10 M", 3160)):
        param, optimizer = _square(side)
        steps[name] = timed_step(optimizer, [param])
    times = take_turns(steps, max(5, rounds // 3))
    per_parameter = {name: [t / side**2 for t in times[name]] for name, side in (("1 M", 1000), ("10 M", 3160))}
    detail = ", ".join(f"{name}: {1e9 * median(per_parameter[name]):.3g} ns a parameter" for name in per_parameter)
    yield Row("time a parameter, 10 M / 1 M", *ratio(per_parameter, "10 M", "1 M"), "≤ 1.3", "≤ 1.1", detail)

    model = lenet_300_100()
    for every, floor, goal in ((1, "≤ 6.9", "≤ 6.6"), (10, "≤ 13", "≤ 12.1")):
        optimizer = BlockAdam(model.parameters(), refresh_every=every)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        floats = floats_a_parameter(optimizer)
        name = f"state, LeNet-300-100, blocks of 10, refresh_every={every}: floats a parameter"
        yield Row(name, floats, floats, floats, floor, goal, "m included")

    param, optimizer = _square(3160)
    shares = [100 * _extra_memory(optimizer) / state_bytes_of(optimizer) for _ in range(5)]
    detail = f"state {state_bytes_of(optimizer) / 1e6:.0f} MB, 10 M parameters, peak resident memory"
    name = "extra memory in a step, % of the state"
    yield Row(name, median(shares), min(shares), max(shares), "≤ 35", "≤ 10", detail)


def small_rows(rounds: int) -> Iterator[Row]:
    """Measure 2,000 tensors of 16 × 16 on one thread, where the work is in Python and in tiles that tensors share.

    Yields:
        Ratios of times, and the size of the state.
    """
    makes: dict[str, Callable[[Any], Optimizer]] = {
        "Adam": lambda params: torch.optim.Adam(params, lr=1e-4, foreach=True),
        "every step": block_adam(),
        "refresh_every=10": block_adam(refresh_every=10),
    }
    contenders, optimizers = {}, {}
    for name, make in makes.items():
        params = [nn.Parameter(torch.randn(16, 16)) for _ in range(2000)]
        optimizers[name] = make(params)
        contenders[name] = timed_step(optimizers[name], params, 10 if name == "refresh_every=10" else 1)
    with threads(1):
        times = take_turns(contenders, max(5, rounds // 2))
    where = "2,000 tensors of 16 × 16, one thread"
    values, detail = ratio(times, "every step", "Adam"), milliseconds(times, "every step", "Adam")
    yield Row(f"step, {where}: Block-Adam / foreach Adam", *values, "≤ 1.2", "≤ 0.8", detail)
    values, detail = ratio(times, "refresh_every=10", "every step"), milliseconds(times, "refresh_every=10")
    yield Row(f"step, {where}: refresh_every=10 / every step", *values, "≤ 1", "≤ 0.5", detail)
    floats = floats_a_parameter(optimizers["refresh_every=10"])
    detail = "m included; runs of 10 and 6, kept as blocks of 10"
    yield Row("state, 2,000 tensors, refresh_every=10: floats a parameter", floats, floats, floats, NONE, NONE, detail)


def option_rows(rounds: int) -> Iterator[Row]:
    """Measure what a closed clip interval and a kept basis save, and what it costs to measure α*.

    Yields:
        A ratio for each.
    """
    model, batches = lenet_300_100(), mnist_like((128, 784))
    sgd: Callable[[Any], Optimizer] = lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9)  # noqa: E731
    closed = SpectrumClip(final_lr=1e-3, gamma=1e3)
    given, auto = SpectrumClip(final_lr=1e-3, gamma=1e-6), SpectrumClip("auto", gamma=1e-6)  # open all the time
    contenders = {
        "SGD": Training(model, batches, sgd).step(20),
        "closed": Training(model, batches, block_adam(clip=closed)).step(20),
        "every step": Training(model, batches, block_adam()).step(20),
        "refresh_every=10": Training(model, batches, block_adam(refresh_every=10)).step(20),
        "given α*": Training(model, batches, block_adam(clip=given)).step(20),
        "measured α*": Training(model, batches, block_adam(clip=auto)).step(20),
    }
    times = take_turns(contenders, rounds)
    detail = milliseconds(times, "closed", "SGD")
    yield Row("step: closed clip / SGD with momentum", *ratio(times, "closed", "SGD"), "≤ 4", "≤ 1.5", detail)
    detail = milliseconds(times, "refresh_every=10", "every step")
    values = ratio(times, "refresh_every=10", "every step")
    yield Row("step: refresh_every=10 / every step", *values, "≤ 0.5", "≤ 0.25", detail)
    values, detail = ratio(times, "measured α*", "given α*"), milliseconds(times, "measured α*", "given α*")
    yield Row("step, LeNet-300-100, blocks of 10: measured α* / given α*", *values, "≤ 1.02", NONE, detail)


def limit_rows(rounds: int) -> Iterator[Row]:
    """Measure how near the kernel comes to the peaks of arithmetic and of memory that the same run finds.

    Yields:
        A share of each peak, for each block size.
    """
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source, target = torch.randn(2**25), torch.empty(2**25)
    peaks = {"matmul": timed(lambda: torch.mm(a, b)), "copy": timed(lambda: target.copy_(source))}
    steps = {}
    for size in (10, 25):
        param, optimizer = _square(1000, block_size=size)
        steps[f"blocks of {size}"] = timed_step(optimizer, [param])
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
            yield Row(f"blocks of {size}: {what}, % of peak", share, share, share, NONE, NONE, detail)


def _square(side: int, **options: Any) -> tuple[Tensor, BlockAdam]:
    """Make one weight of side × side with a gradient, and an optimizer that has taken a step."""
    param = nn.Parameter(torch.zeros(side, side))
    param.grad = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    optimizer = BlockAdam([param], **options)
    optimizer.step()
    return param, optimizer


def _extra_memory(optimizer: Optimizer) -> int:
    """Measure by how many bytes the resident memory peaks during a step (Linux)."""
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
