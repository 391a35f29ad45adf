"""A step as torch.compile sees it: one operation, with all that it reads and all that it changes.

    blockadapt::step_(params!, grads, kept!, lrs, positions, moved, optimizer)

The compiler looks no further, so a compiled step is the eager one to the last bit. It may hand over copies of the
optimizer's own tensors, and takes from them what it wants to keep. So the operation moves a twin: an optimizer of the
same options whose parameters and state are the tensors that were handed over.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

_OPTIMIZERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_NUMBERS = count()
_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)]


def registered(optimizer: Any) -> str:
    """The name by which the operation finds this optimizer."""
    name = f"{type(optimizer).__name__} {next(_NUMBERS)}"
    _OPTIMIZERS[name] = optimizer
    return name


@torch.library.custom_op(
    "blockadapt::step_",
    mutates_args=("params", "kept"),
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] kept, Tensor[] lrs, int[] positions, int[] moved, "
    "str optimizer) -> ()",
    tags=_TAGS,
)
def step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    kept: Sequence[Tensor],
    lrs: Sequence[Tensor],
    positions: Sequence[int],
    moved: Sequence[int],
    optimizer: str,
) -> None:
    """Take one step.

    Args:
        params: Parameters that have a gradient, and those that share blocks with them.
        grads: Their gradients.
        kept: Their state, one parameter after another, in the order of the optimizer's own.
        lrs: The learning rate of each param group.
        positions: Where in the optimizer each of `params` is, counted through all groups.
        moved: Which of `params` each of `grads` belongs to.
        optimizer: The name of the optimizer.
    """
    _OPTIMIZERS[optimizer].step_given(params, grads, kept, lrs, positions, moved)


@step_.register_fake
def _(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    kept: Sequence[Tensor],
    lrs: Sequence[Tensor],
    positions: Sequence[int],
    moved: Sequence[int],
    optimizer: str,
) -> None:
    """Nothing comes back, and shapes stay."""


class Twin:
    """An optimizer of the same options as another, whose parameters and state are given tensors.

    It holds them, so that a tensor at the same address later is the same one.

    Args:
        original: The other one.
        params: Some of its parameters, or copies of them.
        kept: Their state.
        positions: Which parameters these are.
    """

    def __init__(
        self, original: Any, params: Sequence[Tensor], kept: Sequence[Tensor], positions: Sequence[int]
    ) -> None:
        own = [param for group in original.param_groups for param in group["params"]]
        stand_ins = [param.detach() for param in own]
        for position, param in zip(positions, params, strict=True):
            stand_ins[position] = param.detach()
        self._params = [stand_ins[position] for position in positions]
        self._owners = [own[position] for position in positions]
        self._key = _key(params, kept, positions)
        rest, state = iter(kept), defaultdict[Tensor, dict[str, Tensor]](dict)
        for param, owner in zip(self._params, self._owners, strict=True):
            state[param] = {name: next(rest) for name in original.state[owner]}
        others, groups = iter(stand_ins), []
        for group in original.param_groups:
            groups.append({**group, "params": [next(others) for _ in group["params"]]})
        self._optimizer = original.alike(groups, state)

    def fits(self, params: Sequence[Tensor], kept: Sequence[Tensor], positions: Sequence[int]) -> bool:
        """Whether it was made of these tensors."""
        return self._key == _key(params, kept, positions)

    def step(self, original: Any, grads: Sequence[Tensor], lrs: Sequence[Tensor], moved: Sequence[int]) -> None:
        """Take one step under the options that the original has now, and tell it what else has changed by it."""
        groups, twins = original.param_groups, self._optimizer.param_groups
        for group, twin, lr in zip(groups, twins, lrs, strict=True):
            options = {name: value for name, value in group.items() if name != "params"}
            twin.update(options, lr=lr if isinstance(group["lr"], Tensor) else lr.item())
        for position, grad in zip(moved, grads, strict=True):
            self._params[position].grad = grad
        try:
            self._optimizer.take_step()
        finally:
            for param in self._params:
                param.grad = None
        for group, twin in zip(groups, twins, strict=True):
            group["skipped_steps"] = twin["skipped_steps"]
        for param, owner in zip(self._params, self._owners, strict=True):
            now, state = self._optimizer.state[param], original.state[owner]
            for name in [name for name in state if name not in now]:
                del state[name]  # as when a clip has closed


def _key(params: Sequence[Tensor], kept: Sequence[Tensor], positions: Sequence[int]) -> list[Any]:
    return [list(positions), [(tensor.data_ptr(), tensor.shape) for tensor in (*params, *kept)]]
