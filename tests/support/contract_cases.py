"""One table of optimizers that feeds every contract test, and the small world they are tested in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blockadapt import BlockAdaFom, BlockAdagrad, BlockAdam, BlockAdamW, BlockRMSprop, IndexGroups, SpectrumClip
from blockadapt.optimizers import BlockOptimizer

CLASSES: tuple[type[BlockOptimizer], ...] = (BlockAdam, BlockAdamW, BlockRMSprop, BlockAdagrad, BlockAdaFom)

OPEN = SpectrumClip(final_lr=0.1, gamma=0.05)
"""Stays open for thousands of steps."""

CLOSING = SpectrumClip(final_lr=0.1, gamma=80.0)
"""Open at steps 1 and 2; closed (γt > 200.5) from step 3 on."""

STEPS_TO_CLOSE = 3


class Net(nn.Module):
    """Every kind of shape in 76 coordinates: a kernel, a matrix, vectors, a scalar.

    With blocks of 4 the matrix [5, 8] has short runs along its outputs.
    """

    COORDINATES = 76

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.linear = nn.Linear(8, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.conv(x)).flatten(1)
        return self.norm(self.linear(hidden)) * self.scale


def scattered_groups(total: int) -> IndexGroups:
    """Blocks of 1 to 5 coordinates, shuffled over all parameters."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(7)).tolist()
    groups: list[list[int]] = []
    while order:
        size = len(groups) % 5 + 1
        groups.append(order[:size])
        order = order[size:]
    return IndexGroups(groups)


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer class with options, by name."""

    cls: type[BlockOptimizer]
    kwargs: dict[str, Any] = field(repr=False)
    id: str

    def build(self, params: Any, **options: Any) -> BlockOptimizer:
        """The optimizer over these parameters; `options` overrule the case's."""
        return self.cls(params, **{**self.kwargs, **options})

    @property
    def clip(self) -> SpectrumClip | None:
        return self.kwargs.get("clip")

    @property
    def spans(self) -> bool:
        """Whether blocks span parameters, so that all of a group's parameters step together."""
        grouping = self.kwargs.get("grouping")
        return grouping == "joint" or isinstance(grouping, IndexGroups)


def _cases() -> Iterable[OptimizerCase]:
    explicit = scattered_groups(Net.COORDINATES)
    for cls in CLASSES:
        variants: dict[str, dict[str, Any]] = {
            "plain": {},
            "clip": {"clip": OPEN},
            "closing": {"clip": CLOSING},
            "refresh": {"refresh_every": 3, "block_size": 2},
            "decay": {"weight_decay": 0.1, "maximize": True},
        }
        if issubclass(cls, BlockAdam):
            variants["amsgrad"] = {"amsgrad": True}
        if cls is BlockAdam:
            variants |= {name: {"grouping": name} for name in ("input", "output", "chunk", "tensor", "diagonal")}
            variants |= {
                "amsgrad-clip": {"amsgrad": True, "clip": OPEN},
                "amsgrad-refresh": {"amsgrad": True, "refresh_every": 3, "block_size": 2},
                "paper": {"bias_correction": False, "beta1_decay": 0.9},
                "joint-refresh": {"grouping": "joint", "refresh_every": 3},
            }
        variants["eigh"] = {"backend": "eigh"}
        if cls is BlockAdam:
            variants["eigh-kept"] = {"backend": "eigh", "amsgrad": True, "refresh_every": 3, "block_size": 2}
        if cls in (BlockAdam, BlockAdagrad):
            variants["joint"] = {"grouping": "joint"}
        if cls in (BlockAdam, BlockRMSprop):
            variants["explicit"] = {"grouping": explicit, "weight_decay": 0.1}
        if cls is BlockAdaFom:
            variants["explicit-closing"] = {"grouping": explicit, "clip": CLOSING}
        for name, kwargs in variants.items():
            yield OptimizerCase(cls, {"block_size": 4, **kwargs}, f"{cls.__name__}-{name}")


CASES: list[OptimizerCase] = list(_cases())
PLAIN: list[OptimizerCase] = [case for case in CASES if case.id.endswith("-plain")]


def case(case_id: str) -> OptimizerCase:
    """The case of this name."""
    return next(case for case in CASES if case.id == case_id)


# Gradients and training --------------------------------------------------------------------------------------------


def give_gradients_(params: Iterable[Tensor], step: int) -> None:
    """Fresh gradients that depend on the step and on the parameters, and on nothing else."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.device)
        param.grad = (noise + 0.1 * param.detach().double()).to(param.dtype)


def run(optimizer: BlockOptimizer, steps: Iterable[int]) -> None:
    """Give gradients and step, once for each number in `steps`."""
    for step in steps:
        give_gradients_((p for group in optimizer.param_groups for p in group["params"]), step)
        optimizer.step()


def data(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A minibatch for `Net`."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(shape, generator=generator) for shape in ((6, 1, 4, 4), (6, 5)))
    return x.to(dtype), y.to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of `Net` on the step's minibatch."""
    x, y = data(step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x), y)


def train(model: nn.Module, optimizer: BlockOptimizer, steps: Iterable[int]) -> None:
    """Ordinary training, one minibatch a step."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def twins(*, dtype: torch.dtype = torch.float32, count: int = 2) -> list[Net]:
    """Equal models that share nothing."""
    models = []
    for _ in range(count):
        torch.manual_seed(3)
        models.append(Net().to(dtype))
    return models


# Comparison, bit for bit -------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> bytes:
    """The tensor's content as bytes: NaN equals NaN, and −0 differs from 0."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def param_bits(params: Iterable[Tensor]) -> list[bytes]:
    """The content of all parameters."""
    return [bits(param) for param in params]


def state_bits(optimizer: BlockOptimizer) -> list[dict[str, tuple[Any, ...]]]:
    """The state of each parameter in order, by block as a checkpoint has it; {} where there is none."""
    saved = optimizer.state_dict()
    states = [saved["state"].get(key, {}) for group in saved["param_groups"] for key in group["params"]]
    return [{name: (v.dtype, tuple(v.shape), bits(v)) for name, v in sorted(state.items())} for state in states]


def everything(optimizer: BlockOptimizer) -> tuple[Any, ...]:
    """Parameters, state and options, to be compared before and after."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = state_bits(optimizer)  # first, because it also reads what a clip has measured
    options = [
        {name: repr(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    return param_bits(params), state, options, len(optimizer.state)


def bits_of_all(optimizer: BlockOptimizer) -> tuple[Any, ...]:
    """`everything`, for lists and states that may hold what does not belong there."""
    optimizer._estimates.read()
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Tensor)]
    states = [
        {
            name: (id(value), value.to_dense().tolist() if isinstance(value, Tensor) else value)
            for name, value in (held.items() if isinstance(held, dict) else [("", held)])
        }
        for held in (optimizer.state.get(p, {}) for p in params)
    ]
    options = [{name: repr(v) for name, v in g.items() if name != "params"} for g in optimizer.param_groups]
    return repr([p.tolist() for p in params]), repr(states), options, len(optimizer.state)


def grad_bits(params: Sequence[Tensor]) -> list[bytes | None]:
    """The content of all gradients."""
    return [None if p.grad is None else bits(p.grad) for p in params]
