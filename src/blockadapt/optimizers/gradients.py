"""Whether the gradients of a step can be used. Nothing is changed here."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn import Parameter

from blockadapt.errors import NonFiniteGradientError
from blockadapt.moments import statistics_dtype
from blockadapt.optimizers.ranks import are_sharded, is_sharded, local
from blockadapt.optimizers.unit import Group, describe
from blockadapt.partition import MAX_BLOCK
from blockadapt.terms import Term
from blockadapt.validation import Described, has_numbers, is_plain, refusal

_grad, _layout, _dtype, _device, _is_cpu, _is_meta = map(
    attrgetter, ("grad", "layout", "dtype", "device", "is_cpu", "is_meta")
)
_is_none = functools.partial(is_, None)


class Gradients(NamedTuple):
    """The parameters of a group that have a gradient, and their gradients, taken once a step.

    Attributes:
        params: The parameters.
        grads: The gradient of each.
        are_all: Whether no parameter of the group is without one.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    are_all: bool = True

    @classmethod
    def of(cls, group: Group) -> Gradients:
        """Take those of a group."""
        params: Sequence[Tensor] = group["params"]
        grads: list[Any] = [*map(_grad, params)]
        if not any(map(_is_none, grads)):
            return cls(params, grads)
        params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
        return cls(params, [grad for grad in grads if grad is not None], are_all=False)


def require_gradients(owner: str, group: Group, index: int, gradients: Gradients) -> None:
    """Raise at a gradient that no step can take, or that no longer belongs to its parameter.

    Raises:
        RuntimeError: A gradient is sparse.
        ValueError: A gradient has another shape, device or kind than its parameter, whose data may have been replaced.
    """
    sharded = are_sharded(group["params"])
    if not sharded and _fit(gradients):
        return
    for position, param in enumerate(group["params"]):
        grad = param.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            rule = f"dense (for {describe(group, index, position)})"
            raise RuntimeError(refusal(owner, "grad", rule, grad.layout))
        alike = grad.shape == param.shape and grad.device == param.device
        alike = alike and (type(grad) is Tensor or has_numbers(grad) is has_numbers(param))
        if alike and grad.dtype.is_floating_point and (_lie_alike(grad, param) if sharded else is_plain(grad)):
            continue
        whose = describe(group, index, position)
        kind = f"a DTensor with placements {tuple(param.placements)}" if is_sharded(param) else "a plain tensor"
        rule = f"{kind} of shape {tuple(param.shape)} on {param.device}, as its parameter is now (for {whose})"
        found = f"{type(grad).__name__} of shape {tuple(grad.shape)} and {grad.dtype} on {grad.device}"
        raise ValueError(refusal(owner, "grad", rule, Described(found)))


def _fit(gradients: Gradients) -> bool:
    """Whether all gradients are as they should be: in a few passes that run in C, for there may be many."""
    params, grads, _ = gradients
    kinds: set[type[Tensor]] = {*map(type, grads)}
    if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in kinds):
        return False
    if {*map(_layout, grads)} - {torch.strided} or not all(kind.is_floating_point for kind in {*map(_dtype, grads)}):
        return False
    devices = {*map(_device, grads), *map(_device, params)}
    return len(devices) <= 1 and all(map(eq, map(Tensor.size, grads), map(Tensor.size, params)))


def _lie_alike(grad: Any, param: Any) -> bool:
    """Whether both are plain, or both DTensors that lie on their mesh alike."""
    if not is_sharded(param):
        return is_plain(grad)
    alike = is_sharded(grad) and grad.device_mesh == param.device_mesh and grad.placements == param.placements
    return alike and is_plain(local(grad))


def are_usable(groups: Sequence[tuple[Gradients, float]]) -> list[bool]:
    """Say of each group whether every g = grad + coupled · x is finite and so small that the trace of g gᵀ is too.

    One fast pass tells it of all groups, and waits once for each device: a small norm has no large entry.
    """
    moved = [_with_numbers(gradients) for gradients, _ in groups]
    norms = _read([_bound(each, coupled) for each, (_, coupled) in zip(moved, groups, strict=True)])
    return [
        norm**2 <= torch.finfo(torch.float32).max
        or all(bool((_magnitudes(param, coupled) <= _limit(all_of.params)).all()) for param in some.params)
        for norm, some, (all_of, coupled) in zip(norms, moved, groups, strict=True)
    ]


def _with_numbers(gradients: Gradients) -> Gradients:
    """Keep those that have numbers: almost always all."""
    params, grads, _ = gradients
    plain = {*map(type, params)} <= {Parameter, Tensor} and not any(map(_is_meta, params))
    if plain and all(map(Tensor.numel, grads)):
        return gradients
    pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g.numel() and has_numbers(p)]
    return Gradients([param for param, _ in pairs], [grad for _, grad in pairs])


def _bound(gradients: Gradients, coupled: float) -> Term:
    """Compute ‖grad‖₂ + coupled · ‖x‖₂ over all of them, which no |g| exceeds."""
    params, grads, _ = gradients
    if not params:
        return 0.0
    xs = [param.detach() for param in params] if coupled else []
    if are_sharded(params):
        xs, grads = [*map(local, xs)], [*map(local, grads)]
    return _norm(grads) + (coupled * _norm(xs) if coupled else 0.0)


def refuse(owner: str, group: Group, index: int, coupled: float) -> None:
    """Name the first parameter whose gradient is not usable, and how many of its entries are bad.

    Raises:
        NonFiniteGradientError: Always.
    """
    limit = _limit(group["params"])
    what = "gradient with its weight decay" if coupled else "gradient"
    counts = (
        (position, int((~(_magnitudes(param, coupled) <= limit)).sum()), param.numel())
        for position, param in enumerate(group["params"])
        if param.grad is not None
    )
    position, bad, total = next(entry for entry in counts if entry[1])
    raise NonFiniteGradientError(
        f"{owner}: the {what} of {describe(group, index, position)} has {bad} of {total} entries that are not finite "
        f"or exceed {limit:.2g}; parameters and state are unchanged."
    )


def _magnitudes(param: Tensor, coupled: float) -> Tensor:
    """Compute |grad| + coupled · |x|, which no |g| exceeds."""
    assert param.grad is not None
    magnitudes = local(param.grad).to(statistics_dtype(param)).abs()
    return magnitudes + coupled * local(param.detach()).abs() if coupled else magnitudes


def _norm(tensors: Sequence[Tensor]) -> Term:
    """Compute ‖·‖₂ over all; it is not finite if an entry is not, or if the squares overflow. Nobody waits for it."""
    if not all(map(_is_cpu, tensors)) or not all(map(Tensor.is_contiguous, tensors)):
        return torch.nn.utils.get_total_norm(tensors)
    sizes = [*map(Tensor.numel, tensors)]
    flat = [tensor.view(-1) for tensor, size in zip(tensors, sizes, strict=True) if size > _SMALL]
    small = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size <= _SMALL]
    for first in range(0, len(small), _TOGETHER):
        joined = _flatten_dense_tensors(small[first : first + _TOGETHER])
        flat.append(joined if joined.itemsize >= 4 else joined.float())  # a sum of halves would soon be infinite
    return math.sqrt(sum(float(torch.dot(entries, entries)) for entries in flat))


_SMALL, _TOGETHER = 4096, 256
"""Tensors of so many numbers are copied side by side, so many at a time: that is quicker than a call for each."""


def _read(terms: Sequence[Term]) -> list[float]:
    """Read their numbers, with one wait for all that lie on one device."""
    numbers = [0.0 if isinstance(term, Tensor) else term for term in terms]
    together: dict[torch.device, list[int]] = {}
    for position, term in enumerate(terms):
        if isinstance(term, Tensor):
            together.setdefault(term.device, []).append(position)
    for positions in together.values():
        norms = [cast(Tensor, terms[position]) for position in positions]
        dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
        found = torch.stack([norm.to(dtype) for norm in norms]).tolist()
        for position, number in zip(positions, found, strict=True):
            numbers[position] = number
    return numbers


def _limit(params: Sequence[Tensor]) -> float:
    """Tell up to which |g| the trace of g gᵀ is finite in the statistics' dtype, in a block of any size."""
    smallest = min(torch.finfo(statistics_dtype(param)).max for param in params)
    return math.sqrt(smallest / MAX_BLOCK)
