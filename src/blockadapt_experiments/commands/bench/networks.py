"""Measure whole networks: a training step against Adam's, the optimizer's step against other kernels and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blockadapt import BlockAdamW, param_groups
from blockadapt_experiments.commands.bench.measuring import (
    NONE,
    WARM,
    Row,
    Training,
    block_adam,
    milliseconds,
    mnist_like,
    ratio,
    take_turns,
    timed,
    timed_step,
)
from blockadapt_experiments.models.gpt import Gpt
from blockadapt_experiments.models.lenets import lenet_5_caffe, lenet_300_100
from blockadapt_experiments.running.runner import threads


def lenet_300_rows(rounds: int) -> Iterator[Row]:
    """Measure LeNet-300-100 against eigh, Adam, SOAP and Shampoo.

    Yields:
        A ratio for each.
    """
    import pytorch_optimizer

    model, batches = lenet_300_100(), mnist_like((128, 784))
    options = {"eigh": {"backend": "eigh"}, "numba": {"backend": "numba"}}
    for size, floor, goal in ((10, "≥ 25", "≥ 60"), (25, "≥ 14", "≥ 30")):
        contenders = {
            name: Training(model, batches, block_adam(block_size=size, **option)).step(1 if name == "eigh" else 20)
            for name, option in options.items()
        }
        times = take_turns(contenders, max(5, rounds // 3))
        detail = milliseconds(times, "eigh", "numba")
        name = f"step, LeNet-300-100, blocks of {size}: eigh / numba"
        yield Row(name, *ratio(times, "eigh", "numba"), floor, goal, detail)
    yield from _network_rows("LeNet-300-100", model, batches, rounds, 10, "≤ 2.3", "≤ 1.5", pytorch_optimizer)


def lenet_5_rows(rounds: int) -> Iterator[Row]:
    """Measure LeNet-5-Caffe against Adam, SOAP and Shampoo.

    Yields:
        A ratio for each.
    """
    import pytorch_optimizer

    model, batches = lenet_5_caffe(), mnist_like((128, 1, 28, 28))
    yield from _network_rows("LeNet-5-Caffe", model, batches, rounds, 1, "≤ 1.12", "≤ 1.05", pytorch_optimizer)


def _network_rows(
    name: str, model: nn.Module, batches: Tensor, rounds: int, repeats: int, floor: str, goal: str, peers: Any
) -> Iterator[Row]:
    adam: Callable[[Any], Optimizer] = lambda params: torch.optim.Adam(params, lr=1e-4)  # noqa: E731
    whole = {
        "Adam": Training(model, batches, adam).whole(repeats),
        "Block-Adam": Training(model, batches, block_adam()).whole(repeats),
    }
    times = take_turns(whole, rounds)
    values = ratio(times, "Block-Adam", "Adam")
    yield Row(f"training step, {name}: Block-Adam / Adam", *values, floor, goal, milliseconds(times, *whole))
    steps = {
        "Block-Adam": Training(model, batches, block_adam()).step(repeats),
        "SOAP": Training(model, batches, lambda params: peers.SOAP(params, lr=1e-4)).step(repeats),
        "ScalableShampoo": Training(model, batches, lambda params: peers.ScalableShampoo(params, lr=1e-4)).step(
            repeats
        ),
    }
    times = take_turns(steps, max(5, rounds // 3))
    for peer, peer_floor in (("SOAP", "≤ 1"), ("ScalableShampoo", "–")):
        values = ratio(times, "Block-Adam", peer)
        detail = milliseconds(times, "Block-Adam", peer)
        yield Row(f"step, {name}: Block-Adam / {peer}", *values, peer_floor, "≤ 1", detail)


def gpt_rows(rounds: int) -> Iterator[Row]:
    """Measure a GPT-2 of 30 M parameters with its vocabulary, on 4 × 128 tokens and one thread.

    Tokens are as frequent as words are by Zipf's law: the one of rank r comes 1/r as often as the first.

    Yields:
        The ratio to AdamW's training step.
    """
    torch.manual_seed(0)
    often = 1 / torch.arange(1, GPT["vocabulary"] + 1)
    batches = often.multinomial(WARM * 4 * (GPT["context"] + 1), replacement=True).view(WARM, 4, -1)

    def training(make: Callable[[nn.Module], Optimizer]) -> Callable[[], None]:
        model = Gpt(**GPT)
        optimizer, endless = make(model), cycle(batches)

        def step() -> None:
            tokens = next(endless)
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()

        for _ in range(WARM):
            step()
        return step

    with threads(1):
        contenders = {
            "AdamW": timed(training(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4))),
            "Block-AdamW": timed(training(lambda model: BlockAdamW(param_groups(model), lr=1e-4))),
        }
        times = take_turns(contenders, max(5, rounds // 6))
    values = ratio(times, "Block-AdamW", "AdamW")
    name = "training step, GPT-2 of 30 M, param_groups, one thread: Block-AdamW / AdamW"
    yield Row(name, *values, "≤ 1.15", "≤ 1.08", milliseconds(times, *contenders))


GPT = {"vocabulary": 50_257, "context": 128, "width": 256, "layers": 6, "heads": 4}
"""30.5 M parameters, of which 25.8 M belong to tokens."""


def filter_rows(rounds: int) -> Iterator[Row]:
    """Measure the 3 × 3 convolutions of a ResNet-18, which have 11 M parameters in blocks of 9.

    Yields:
        The ratio to Adam's step, and that of `refresh_every`.
    """
    widths = [(64, 64)] * 4 + [(128, 64)] + [(128, 128)] * 3 + [(256, 128)] + [(256, 256)] * 3 + [(512, 256)]
    shapes = [(*pair, 3, 3) for pair in (*widths, *[(512, 512)] * 3)]
    adam: Callable[[Any], Optimizer] = lambda params: torch.optim.Adam(params, lr=1e-4)  # noqa: E731
    contenders = {}
    for name, make in {"Adam": adam, "Block-Adam": block_adam(), "refresh": block_adam(refresh_every=10)}.items():
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        contenders[name] = timed_step(make(params), params, 10 if name == "refresh" else 1)
    times = take_turns(contenders, max(5, rounds // 3))
    for name, above, below in (("Block-Adam / Adam", "Block-Adam", "Adam"), (REFRESH, "refresh", "Block-Adam")):
        values = ratio(times, above, below)
        yield Row(f"step, 3 × 3 filters of a ResNet-18: {name}", *values, NONE, NONE, milliseconds(times, above, below))


REFRESH = "refresh_every=10 / every step"
