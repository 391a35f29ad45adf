"""Judges whether a step can use its gradients. Nothing is changed here."""

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

_grad, _dtype, _device, _is_cpu, _is_meta = map(attrgetter, ("grad", "dtype", "device", "is_cpu", "is_meta"))
_form = attrgetter("dtype", "layout", "device")
_is_none = functools.partial(is_, None)


class Gradients(NamedTuple):
    """Holds the parameters of a group that have a gradient, and their gradients, taken once a step.

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
        """Take the gradients of a group."""
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
    """Tell whether all gradients are as they should be, in a few passes that run in C, for there may be many."""
    params, grads, _ = gradients
    kinds: set[type[Tensor]] = {*map(type, grads)}
    if kinds != _PLAIN and any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in kinds):
        return False
    devices = {*map(_device, params)}
    for dtype, layout, device in {*map(_form, grads)}:
        if layout is not torch.strided or not dtype.is_floating_point:
            return False
        devices.add(device)
    return len(devices) <= 1 and all(map(eq, map(Tensor.size, grads), map(Tensor.size, params)))


_PLAIN = {Tensor}


def _lie_alike(grad: Any, param: Any) -> bool:
    """Tell whether both are plain, or both DTensors with one placement on one mesh."""
    if not is_sharded(param):
        return is_plain(grad)
    alike = is_sharded(grad) and grad.device_mesh == param.device_mesh and grad.placements == param.placements
    return alike and is_plain(local(grad))


def are_usable(groups: Sequence[tuple[Gradients, float]]) -> list[bool]:
    """Say of each group whether every g = grad + coupled · x is finite and so small that the trace of g gᵀ is too.

    One fast pass tells it of all groups, and waits once for each device: a small norm has no large entry.
    """
    moved = [(_with_numbers(gradients), coupled) for gradients, coupled in groups]
    return [
        is_small or all(bool((_magnitudes(param, coupled) <= _limit(all_of.params)).all()) for param in some.params)
        for is_small, (some, coupled), (all_of, _) in zip(are_small(moved), moved, groups, strict=True)
    ]


def are_small(groups: Sequence[tuple[Gradients, float]]) -> list[bool]:
    """Say of each group whether one pass shows it usable: its gradients have numbers, and a small norm."""
    norms = _read([_bound(gradients, coupled) for gradients, coupled in groups])
    return [norm * norm <= _MOST for norm in norms]  # a power of a float raises where a product is infinite


_MOST = torch.finfo(torch.float32).max


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
    if len(tensors) > _FEW or not {*map(_dtype, tensors)} <= _EXACT:
        tensors = _joined(tensors)
    flat = [*map(Tensor.ravel, tensors)]
    return math.sqrt(sum(map(Tensor.item, map(torch.dot, flat, flat))))


_EXACT = {torch.float32, torch.float64}


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy small tensors side by side, many at a time: that is quicker than a call for each."""
    sizes = [*map(Tensor.numel, tensors)]
    large = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size > _SMALL]
    small = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size <= _SMALL]
    for first in range(0, len(small), _TOGETHER):
        joined = _flatten_dense_tensors(small[first : first + _TOGETHER])
        large.append(joined if joined.itemsize >= 4 else joined.float())  # a sum of halves would soon be infinite
    return large


_FEW, _SMALL, _TOGETHER = 16, 4096, 256
"""More tensors than the first are copied side by side, those of at most this size, and not more than the last at once.

A call for each would take longer.
"""


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
