"""Measure many processes: a step on two ranks against the same step on one, with one thread for each rank.

Real processes over gloo take turns within one run: the first rank steps alone while the other waits; both step with
their blocks shared out; both send each other as many bytes as such a step sends, and do nothing else.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

from blockadapt import BlockAdam
from blockadapt_experiments.commands.bench.measuring import Row, Training, milliseconds, mnist_like, ratio
from blockadapt_experiments.models.lenets import lenet_300_100

RANKS = 2


def two_layers() -> nn.Sequential:
    """Build a network of 4 million weights, more like those that people share out."""
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"LeNet-300-100": lenet_300_100, "4 M weights": two_layers}


def rank_rows(rounds: int) -> Iterator[Row]:
    """Measure a small network and a larger one, on one rank and on two.

    Yields:
        A ratio for each network and block size.
    """
    for network, size, repeats in (("LeNet-300-100", 10, 10), ("4 M weights", 10, 2), ("4 M weights", 25, 1)):
        times = step_times(network, max(5, rounds // 3), repeats, block_size=size)
        name = f"step, {network}, blocks of {size}, one thread a rank: 1 rank / {RANKS} ranks"
        yield Row(name, *ratio(times, "1 rank", "2 ranks"), "≥ 1.5", "≥ 1.8", milliseconds(times, *times))


def step_times(network: str, rounds: int, repeats: int, **options: Any) -> dict[str, list[float]]:
    """Return the seconds of a step on one rank and on two, and of the messages alone, in each round."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = folder, network, rounds, repeats, options
        processes.spawn(_rank, arguments, nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]
        times: dict[str, list[float]] = json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
    return times


def _rank(rank: int, folder: str, network: str, rounds: int, repeats: int, options: dict[str, Any]) -> None:
    """Measure in one of the processes. The first one writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model, batches = NETWORKS[network](), mnist_like((128, 784))
    alone = Training(model, batches, lambda params: BlockAdam(params, lr=1e-4, **options))
    together = Training(
        model, batches, lambda params: BlockAdam(params, lr=1e-4, process_group=dist.group.WORLD, **options)
    )
    times: dict[str, list[float]] = {"1 rank": [], "2 ranks": [], "messages": []}
    for number in range(rounds + 2):
        dist.barrier()
        seconds = {
            "1 rank": alone.step(repeats)() if rank == 0 else 0.0,
            "2 ranks": _step(together, repeats),
            "messages": _messages(model, repeats),
        }
        for name in times if number >= 2 else ():
            times[name].append(seconds[name])
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times), encoding="utf-8")
    dist.destroy_process_group()


def _step(training: Training, repeats: int) -> float:
    """Time a step of all ranks, which begin it together; mean of `repeats`."""
    seconds = 0.0
    for _ in range(repeats):
        training.backward()
        dist.barrier()
        start = time.perf_counter()
        training.optimizer.step()
        seconds += time.perf_counter() - start
    return seconds / repeats


def _messages(model: nn.Module, repeats: int) -> float:
    """Time two ranks that send each other as many numbers as in a step; mean of `repeats`."""
    sent = torch.zeros(sum(param.numel() for param in model.parameters()) // RANKS)
    received, other, seconds = torch.empty_like(sent), 1 - dist.get_rank(), 0.0
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        going = dist.isend(sent, other)
        dist.recv(received, other)
        if going is not None:  # None is for ranks outside of the group
            going.wait()
        seconds += time.perf_counter() - start
    return seconds / repeats
