"""What the oracle and equivalence tests share: backends, methods, parameters, gradients, and the run side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from blockadapt import BlockAdaFom, BlockAdagrad, BlockAdam, BlockAdamW, BlockRMSprop, IndexGroups, SpectrumClip
from support.oracle import Array, DenseOracle, Kind, Shape, explicit_blocks

BACKENDS = ["eigh", "numba"]
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]
each_backend = pytest.mark.parametrize("backend", BACKENDS)

Options = dict[str, Any]
Gradients = list[list[Array | None]]
"""For each step, for each parameter: its gradient, or None where it misses one."""


@dataclass(frozen=True)
class Method:
    """A class of the library and what the oracle calls it; `defaults` are those of the published signatures."""

    cls: Callable[..., Optimizer]
    kind: Kind
    defaults: Options
    options: Options = field(default_factory=dict)


METHODS: Mapping[str, Method] = {
    "adam": Method(BlockAdam, "adam", {"lr": 1e-3, "bias_correction": True}),
    "amsgrad": Method(BlockAdam, "adam", {"lr": 1e-3, "bias_correction": True}, {"amsgrad": True}),
    "adamw": Method(BlockAdamW, "adamw", {"lr": 1e-3, "bias_correction": True, "weight_decay": 1e-2}),
    "rmsprop": Method(BlockRMSprop, "rmsprop", {"lr": 1e-2, "bias_correction": False, "alpha": 0.99}),
    "adagrad": Method(BlockAdagrad, "adagrad", {"lr": 1e-2, "bias_correction": False}),
    "adafom": Method(BlockAdaFom, "adafom", {"lr": 1e-2, "bias_correction": False, "beta1": 0.9}),
}

PER_PARAMETER_GROUPINGS = ["auto", "input", "output", "filter", "chunk", "tensor", "diagonal"]


# -------------------------------------------------------------------------------------------- parameters and gradients


def dense(*shape: int, seed: int = 0) -> Parameter:
    """A float64 parameter with entries of order one."""
    values = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return Parameter(torch.from_numpy(np.asarray(values)))


def transposed(*shape: int) -> Parameter:
    """As `dense`, its storage in reverse order of dimensions."""
    backwards = list(reversed(range(len(shape))))
    return Parameter(dense(*shape).detach().permute(backwards).contiguous().permute(backwards))


def strided(*shape: int) -> Parameter:
    """As `dense`, every other entry of a storage twice as large."""
    storage = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=torch.float64)
    storage[..., ::2] = dense(*shape).detach()
    return Parameter(storage[..., ::2])


def channels_last(*shape: int) -> Parameter:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return Parameter(dense(*shape).detach().contiguous(memory_format=formats[len(shape)]))


def mixture(convolutions_only: bool = False) -> list[Parameter]:
    """A convolution and a matrix, 18 coordinates; the second has runs of 3 and 2 under block size 3."""
    matrix = dense(5, 2, 1) if convolutions_only else dense(5, 2)
    return [channels_last(2, 2, 1, 2), matrix]


def mixed_index_groups(total: int, seed: int = 0) -> IndexGroups:
    """Blocks of one to six coordinates drawn from all over."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(total).tolist()
    groups = []
    while order:
        size = int(rng.integers(1, 7))
        groups.append(order[:size])
        order = order[size:]
    return IndexGroups(groups)


def gradients(shapes: Sequence[Shape], steps: int, seed: int = 0) -> Gradients:
    """Correlated gradients whose scales differ by coordinate; each seventh coordinate never has one.

    The first parameter has a zero gradient at the first step.
    """
    rng = np.random.default_rng(seed)
    scales = [np.exp(rng.standard_normal(shape)) for shape in shapes]
    mixers = [rng.standard_normal((math.prod(shape),) * 2) for shape in shapes]
    drawn: Gradients = []
    for step in range(steps):
        row: list[Array | None] = []
        for index, (shape, scale, mixer) in enumerate(zip(shapes, scales, mixers, strict=True)):
            z = rng.standard_normal(math.prod(shape))
            g = np.asarray(scale * (z + 0.3 * mixer @ z).reshape(shape))
            g.reshape(-1)[2::7] = 0.0
            row.append(g if step or index else np.zeros(shape))
        drawn.append(row)
    return drawn


AsGradient = Callable[[Array, Tensor], Tensor]


def like_layout(values: Array, param: Tensor) -> Tensor:
    """A gradient in its parameter's dtype and memory layout, as autograd would make it."""
    return torch.empty_like(param).copy_(torch.from_numpy(np.asarray(values)))


def flat(tensors: Sequence[Tensor]) -> Array:
    """All coordinates, in the order in which a param group counts them."""
    return np.concatenate([t.detach().resolve_neg().double().reshape(-1).numpy() for t in tensors])


# ------------------------------------------------------------------------------------------------------- the two sides


def blocks_of(
    grouping: str | IndexGroups, block_size: int, shapes: Sequence[Shape]
) -> tuple[list[list[int]], list[int]]:
    """Explicit blocks of a whole param group, and for each the step up to which its basis is always fresh.

    That is the size of the largest block it shares a step count with: of its parameter, or of an IndexGroups.
    """
    total = sum(math.prod(shape) for shape in shapes)
    if isinstance(grouping, IndexGroups) or grouping == "joint":
        blocks = grouping.groups if isinstance(grouping, IndexGroups) else [list(range(total))]
        return blocks, [max(map(len, blocks), default=0)] * len(blocks)
    every: list[list[int]] = []
    ranks: list[int] = []
    offset = 0
    for shape in shapes:
        own = explicit_blocks(shape, grouping, block_size)
        every += [[offset + coordinate for coordinate in block] for block in own]
        ranks += [max(map(len, own), default=0)] * len(own)
        offset += math.prod(shape)
    return every, ranks


def make_oracle(method: Method, options: Options, params: Sequence[Tensor]) -> DenseOracle:
    """The oracle for one param group under the library's options."""
    given = {"grouping": "auto", "block_size": 10, **method.defaults, **method.options, **options}
    shapes = [tuple(p.shape) for p in params]
    blocks, ranks = blocks_of(given.pop("grouping"), given.pop("block_size"), shapes)
    betas = given.pop("betas", (0.9, 0.999))
    betas = (given.pop("beta1", betas[0]), given.pop("alpha", betas[1]))
    momentum = given.pop("momentum", None)
    clip: SpectrumClip | None = given.pop("clip", None)
    bounds = None if clip is None else (clip.final_lr, clip.gamma)
    oracle = DenseOracle(flat(params), blocks, method.kind, betas=betas, clip=bounds, ranks=ranks, **given)
    if momentum is not None:  # takes the place of β₁, or gives the method one
        oracle.beta1 = momentum
    return oracle


@dataclass
class Race:
    """The library and the oracle over the same gradients, one param group. Trajectories are [steps, coordinates]."""

    params: list[Parameter]
    oracle: DenseOracle
    library: list[Array] = field(default_factory=list)
    expected: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.oracle.x.copy()

    def record(self) -> None:
        self.library.append(flat(self.params))
        self.expected.append(self.oracle.x.copy())

    @property
    def error(self) -> float:
        """The largest deviation anywhere on the way, in units of the largest distance from the start."""
        distance = np.abs(np.stack(self.expected) - self.start).max()
        assert distance > 0, "nothing moved"
        return float(np.abs(np.stack(self.library) - np.stack(self.expected)).max() / distance)


Groups = Mapping[str, tuple[list[Parameter], Options]]
"""Param groups by name: parameters and options."""

Schedule = Callable[[int], float]
"""lr at step t (from 1), in units of its first value."""


def race(
    method: Method,
    groups: Groups,
    grads: Gradients,
    backend: str,
    *,
    schedule: Schedule = lambda step: 1.0,
    as_gradient: AsGradient = like_layout,
) -> dict[str, float]:
    """Run one optimizer, and one oracle a param group, from the same start; return each group's `Race.error`.

    Gradients run through the parameters of all groups.
    """
    races = [Race(params, make_oracle(method, options, params)) for params, options in groups.values()]
    given = [{"params": params, **method.options, **options} for params, options in groups.values()]
    optimizer = method.cls(given, backend=backend)
    for step, row in enumerate(grads, start=1):
        values = iter(row)
        for one, group in zip(races, optimizer.param_groups, strict=True):
            one.oracle.lr = group["lr"] = one.oracle.initial_lr * schedule(step)
            for param in one.params:
                value = next(values)
                param.grad = None if value is None else as_gradient(value, param)
            one.oracle.step(*joined_gradients(one.params))
        optimizer.step()
        for one in races:
            one.record()
    return {name: one.error for name, one in zip(groups, races, strict=True)}


def joined_gradients(params: Sequence[Tensor]) -> tuple[Array, NDArray[np.bool_]]:
    """Gradient (zero where missing) and presence over a group's flat coordinates."""
    g = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in params])
    return g, np.concatenate([np.full(p.numel(), p.grad is not None) for p in params])
