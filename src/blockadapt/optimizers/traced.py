"""Shows a step to torch.compile: one operation, with all that it reads and all that it changes.

    blockadapt::step_(params!, grads, kept!, lrs, positions, moved, optimizer)

The compiler looks no further, so a compiled step is the eager one to the last bit. It may hand over copies of the
optimizer's own tensors, and takes from them what it wants to keep. So the operation moves a twin: an optimizer of the
same options whose parameters and state are the tensors that were handed over.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from blockadapt.optimizers.ranks import are_sharded
from blockadapt.optimizers.unit import Group

_OPTIMIZERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_NUMBERS = count()
_TAGS: dict[str, Any] = {"tags": [torch.Tag.cudagraph_unsafe]} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
"""torch 2.6 knows neither the tag nor tags."""


def registered(optimizer: Any) -> str:
    """Give this optimizer the name by which the operation finds it."""
    name = f"{type(optimizer).__name__} {next(_NUMBERS)}"
    _OPTIMIZERS[name] = optimizer
    return name


@torch.library.custom_op(
    "blockadapt::step_",
    mutates_args=("params", "kept"),
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] kept, Tensor[] lrs, int[] positions, int[] moved, "
    "str optimizer) -> ()",
    **_TAGS,
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
    """Do nothing: nothing comes back, and shapes stay."""


class Twin:
    """Stands for an optimizer: it has the same options, and its parameters and state are given tensors.

    It holds them, so that a tensor at the same address later is the same one.

    Args:
        original: The optimizer.
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
        self._key = _key(original, params, kept, positions)
        rest, state = iter(kept), defaultdict[Tensor, dict[str, Tensor]](dict)
        for param, owner in zip(self._params, self._owners, strict=True):
            state[param] = {name: next(rest) for name in original.state[owner]}
        others = iter(stand_ins)
        groups = [{**group, "params": [next(others) for _ in group["params"]]} for group in original.param_groups]
        self._optimizer = original.alike(groups, state)

    def fits(self, original: Any, params: Sequence[Tensor], kept: Sequence[Tensor], positions: Sequence[int]) -> bool:
        """Tell whether the twin was made of these tensors, and its param groups are those of the original."""
        return self._key == _key(original, params, kept, positions)

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
        self._optimizer._estimates.read()
        for group, twin in zip(groups, twins, strict=True):
            group.update({name: twin[name] for name in ("skipped_steps", "estimate", "peak_lr")})
        for param, owner in zip(self._params, self._owners, strict=True):
            now, state = self._optimizer.state[param], original.state[owner]
            for name in [name for name in state if name not in now]:
                del state[name]  # as when a clip has closed


def _key(original: Any, params: Sequence[Tensor], kept: Sequence[Tensor], positions: Sequence[int]) -> list[Any]:
    forms = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (*params, *kept)]
    return [[len(group["params"]) for group in original.param_groups], list(positions), forms]


class TracedStep:
    """Is the part of an optimizer that dynamo traces.

    It reads the param groups as `_groups`: dynamo would set their `capturable` if it saw them as `param_groups`.
    """

    _groups: list[Group]
    _process_group: Any
    _twin: Twin | None
    _name: str

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `_groups` are always the present `param_groups`, also when these are another list."""
        super().__setattr__(name, value)
        if name == "param_groups":
            super().__setattr__("_groups", value)

    def _forget_twin(self, anew: bool = False) -> None:
        """Let go of the tensors of the last compiled step; with a new name if the optimizer is a new one."""
        self._twin = None
        if anew:
            self._name = registered(self)

    def _traced_step(self, closure: Callable[[], Any] | None) -> Any:
        """Take the step as one operation of a graph. Where processes share it, the graph ends before it."""
        if self._process_group is not None or any(are_sharded(group["params"]) for group in self._groups):
            return self._untraced_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params: list[Tensor] = []
        grads: list[Tensor] = []
        kept: list[Tensor] = []
        positions: list[int] = []
        moved: list[int] = []
        self._init_group(params, grads, kept, positions, moved)
        lrs = [group["lr"] for group in self._groups]
        # A product stays one when lr becomes another number; a new tensor of it would be compiled anew.
        lrs = [lr if isinstance(lr, Tensor) else torch.ones((), dtype=torch.float64, device="cpu") * lr for lr in lrs]
        if params:
            step_(params, grads, kept, lrs, positions, moved, self._name)
        return loss

    @torch._disable_dynamo  # type: ignore[attr-defined]  # the public one imports for 1 s
    def _untraced_step(self: Any, closure: Callable[[], Any] | None) -> Any:
        return self.take_step(closure)

    def _init_group(
        self: Any,
        params: list[Tensor],
        grads: list[Tensor],
        kept: list[Tensor],
        positions: list[int],
        moved: list[int],
    ) -> None:
        """Make the state that is missing, and fill the lists that `step_` takes.

        It has the name by which dynamo knows it in torch's own optimizers: it is run and not traced, and the graph is
        guarded by the options, the parameters and the state.
        """
        units = self.make_state_()
        every = [param for group in self.param_groups for param in group["params"]]
        position = {param: number for number, param in enumerate(every)}
        for param in [param for unit in units for param in unit.params]:
            if param.grad is not None:
                moved.append(len(params))
                grads.append(param.grad)
            params.append(param)
            positions.append(position[param])
            kept += self.state[param].values()

    def step_given(
        self: Any,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        kept: Sequence[Tensor],
        lrs: Sequence[Tensor],
        positions: Sequence[int],
        moved: Sequence[int],
    ) -> None:
        """Do what `step_` promises."""
        with self._alone:
            twin = self._twin
            if twin is None or not twin.fits(self, params, kept, positions):
                twin = self._twin = Twin(self, params, kept, positions)
            twin.step(self, grads, lrs, moved)

    def alike(self: Any, param_groups: list[Group], state: Any) -> Any:
        """Make an optimizer as this one, with other param groups and another state."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), param_groups=param_groups, _groups=param_groups, state=state)
        twin._set_up()
        return twin
