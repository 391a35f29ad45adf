"""Makes one step, of stage 5. Nothing is touched until `write_`, and all that may raise comes before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockadapt.kernels import Batch, Change, Coefficients, Dispatcher, Place, Segment, Tally
from blockadapt.kernels.segments import Segments
from blockadapt.kernels.transfer import sent
from blockadapt.moments import statistics_dtype
from blockadapt.optimizers.storage import State, part_states
from blockadapt.optimizers.unit import Unit
from blockadapt.partition import IndexGroups, Partition
from blockadapt.spectrum import SpectralFunction


class Scaled(NamedTuple):
    """Holds parameters that move without linear algebra, their gradients, and their first moments if they have any."""

    xs: list[Tensor]
    gs: list[Tensor]
    ms: list[Tensor]


def _places_of(cut: Partition, x: Tensor, state: State, function: SpectralFunction) -> list[Place] | None:
    """Find the places of a parameter's blocks, one for each part of the cut; None if its strides do not allow views."""
    coordinates = cut.views(x)
    if coordinates is None:
        return None
    m = cut.views(state["exp_avg"]) if "exp_avg" in state else None
    assert m is not None or "exp_avg" not in state  # state is contiguous
    start = x.storage_offset()
    return [
        Place(cut.n, part, m[i] if m else None, **kept, function=function, offset=int(part.storage_offset() - start))
        for i, (part, kept) in enumerate(zip(coordinates, part_states(cut, state), strict=True))
    ]


@dataclass
class Update:
    """Collects what a step is to do; `prepare` makes it ready, `write_` does it."""

    function: SpectralFunction
    batches: dict[Batch, list[Segment]] = field(default_factory=dict)
    standing: dict[Batch, Segments] = field(default_factory=dict)
    scaled: dict[tuple[Coefficients, bool], Scaled] = field(default_factory=dict)
    counters: list[Tensor] = field(default_factory=list)
    counted: list[tuple[Sequence[np.ndarray], Sequence[int]]] = field(default_factory=list)
    moved: list[Tensor] = field(default_factory=list)
    finish: list[Callable[[], object]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    moves: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        """Put a segment into the batch of its size."""
        if segment.place.num_blocks:
            self.batches.setdefault(segment.place.batch, []).append(segment)

    def stage(self, param: Tensor, grad: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copy a parameter and its gradient, contiguous and in the statistics' dtype; the parameter is written back."""
        x = torch.empty(param.shape, dtype=dtype, device=param.device).copy_(param.detach())
        if grad is None:
            return x, torch.zeros_like(x)
        self.finish.append(lambda: param.copy_(x))
        return x, grad.to(dtype).contiguous()

    def add_parameter(
        self, unit: Unit, state: State, refresh: bool, coefficients: Coefficients, tally: Tally | None
    ) -> None:
        """Add all blocks of a parameter that is cut by a named grouping."""
        owner, cut = unit.owner, unit.cut
        param, grad = unit.local(owner), _readable(unit.gradient(owner))
        assert isinstance(cut, Partition)
        dtype = statistics_dtype(param)
        places = unit.places
        if places is None and param.dtype == dtype:
            places = unit.places = _places_of(cut, param.detach(), state, self.function)
        if places is None or grad.dtype != dtype:
            x, grad = self.stage(param, grad, dtype)
            places = _places_of(cut, x, state, self.function)
            assert places is not None  # staged tensors are contiguous
        elif grad.stride() != param.stride() and not (grad.is_contiguous() and param.is_contiguous()):
            grad = torch.empty_strided(param.shape, param.stride(), dtype=dtype, device=grad.device).copy_(grad)
        self.moved.append(owner)
        for place in places:
            self.add(Segment(place, grad, refresh, coefficients, tally))

    def add_group(
        self, unit: Unit, states: Sequence[State], refresh: bool, coefficients: Coefficients, tally: Tally | None
    ) -> None:
        """Add the explicit blocks of a whole param group, gathered into rows and scattered back afterwards.

        A parameter without a gradient counts with a zero gradient, which its m takes in, and is not moved.
        """
        groups = unit.cut
        assert isinstance(groups, IndexGroups)
        dtype, device = statistics_dtype(unit.owner), unit.owner.device
        params, grads = [unit.local(param) for param in unit.params], [unit.gradient(param) for param in unit.params]
        staged = [self.stage(param, grad, dtype) for param, grad in zip(params, grads, strict=True)]
        self.moved += [param for param in unit.params if param.grad is not None]
        x, g = (torch.cat([pair[i].flatten() for pair in staged]) for i in (0, 1))
        still = [torch.full((x.numel(),), g is None, device=device) for x, g in zip(params, grads, strict=True)]
        descent = coefficients.descent
        if descent.coupled:
            g += torch.where(torch.cat(still), 0, descent.sign * descent.coupled * x)
            coefficients = coefficients._replace(descent=descent._replace(coupled=0.0))
        averages = [state["exp_avg"].view(-1) for state in states if "exp_avg" in state]
        m = torch.cat(averages) if averages else None
        if unit.tables is None:
            unit.tables = [_on_device_of(unit.owner, table).unsqueeze(1) for table in groups.tables.values()]
        places = []
        for n, index, kept in zip(groups.sizes, unit.tables, part_states(groups, states[0]), strict=True):
            place = Place(n, x[index], m[index] if m is not None else None, **kept, function=self.function)
            self.add(Segment(place, g[index], refresh, coefficients, tally))
            places.append(place)
        back = [partial(_scatter_, [place.x for place in places], unit.tables, x, [pair[0] for pair in staged])]
        if m is not None:
            back.append(partial(_scatter_, [p.m for p in places if p.m is not None], unit.tables, m, averages))
        self.finish[:0] = back  # before the staged parameters are written back

    def add_scaled(self, unit: Unit, owner: Tensor, state: State, coefficients: Coefficients) -> None:
        """Add a parameter whose spectrum is one number: x ← shrink · x − α* m, with no linear algebra.

        A parameter without a gradient is treated as `add_group` does.
        """
        param, grad = unit.local(owner), unit.gradient(owner)
        if grad is None:
            if "exp_avg" in state:
                self.finish.append(lambda: state["exp_avg"].mul_(coefficients.first.beta))
            return
        grad, dtype = _readable(grad), statistics_dtype(param)
        self.moved.append(owner)
        x, g = (param.detach(), grad) if param.dtype == grad.dtype == dtype else self.stage(param, grad, dtype)
        self.scale(coefficients, [x], [g], [state["exp_avg"]] if "exp_avg" in state else [])

    def scale(
        self, coefficients: Coefficients, xs: Sequence[Tensor], gs: Sequence[Tensor], ms: Sequence[Tensor]
    ) -> None:
        """Put parameters among those that move without linear algebra.

        Those with a first moment stand apart: at β₁ = 0 their coefficients are those of parameters without one.
        """
        scaled = self.scaled.setdefault((coefficients, bool(ms)), Scaled([], [], []))
        for held, more in zip(scaled, (xs, gs, ms), strict=True):
            held += more

    def prepare(self, kernels: Dispatcher) -> None:
        """Make the step ready. New tensors are made here, before anything is written: memory may run out."""
        batches: dict[Batch, Sequence[Segment]] = {**self.standing}
        batches |= {batch: [*self.standing.get(batch, ()), *segments] for batch, segments in self.batches.items()}
        if batches:
            self.changes = kernels.prepare(batches)
        for (coefficients, _), scaled in self.scaled.items():
            gs = _descent(scaled, coefficients)
            self.moves.append((gs, _scaled_on_device(scaled._replace(gs=gs), coefficients)))

    def write_(self) -> None:
        """Do the step that was made ready."""
        for change in self.changes:
            change.write_()
        for ((coefficients, _), scaled), (gs, moves) in zip(self.scaled.items(), self.moves, strict=True):
            _scaled_step_(scaled._replace(gs=gs), coefficients, moves)
        if self.counters:
            torch._foreach_add_(self.counters, 1)
        for counters, steps in self.counted:
            any(map(np.ndarray.fill, counters, steps))  # `fill` returns None, so all of them are filled
        for action in self.finish:
            action()
        if self.moved:  # autograd does not see what is written through addresses
            torch.autograd.graph.increment_version(self.moved)


def _on_device_of(param: Any, table: Tensor) -> Tensor:
    """Return a table on its way to the device of a parameter; a FakeTensor where that is one."""
    fake: Any = getattr(param, "fake_mode", None)
    return sent(table if fake is None else fake.from_tensor(table), param.device)


def _scatter_(rows: Sequence[Tensor], tables: Sequence[Tensor], flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Put gathered rows back to the coordinates that their tables name: into `flat`, and all of that into tensors."""
    for index, some in zip(tables, rows, strict=True):
        flat[index] = some
    for tensor, new in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.view(-1).copy_(new)


def _readable(grad: Tensor | None) -> Tensor:
    """Return the gradient with its numbers in memory as they are: no sign that waits, no zeros that nobody wrote."""
    assert grad is not None
    return grad.clone().resolve_neg() if grad.is_neg() or grad._is_zerotensor() else grad


def _descent(scaled: Scaled, coefficients: Coefficients) -> list[Tensor]:
    """Compute g = sign · grad + coupled · x, new tensors where that differs from grad."""
    descent, gs = coefficients.descent, scaled.gs
    if descent.sign < 0:
        gs = list(torch._foreach_neg(gs))
    if descent.coupled:
        gs = list(torch._foreach_add(gs, scaled.xs, alpha=descent.coupled))
    return gs


def _scaled_on_device(scaled: Scaled, coefficients: Coefficients) -> list[Tensor]:
    """Compute α* m, with m as it will be, where only the device knows α*: torch has no way to do it in place."""
    (_, gs, ms), (_, first, _, spectrum) = scaled, coefficients
    if not isinstance(spectrum.upper, Tensor):
        return []
    ms = list(torch._foreach_lerp(ms, gs, 1 - float(first.beta))) if ms else gs
    return list(torch._foreach_mul(ms, spectrum.upper))


def _scaled_step_(scaled: Scaled, coefficients: Coefficients, moves: list[Tensor]) -> None:
    """Take x ← shrink · x − α* m for many parameters at once; the clip's interval has closed on α* = spectrum.upper.

    `moves` are α* m where they are known already.
    """
    (xs, gs, ms), (descent, first, _, spectrum) = scaled, coefficients
    if ms:
        torch._foreach_lerp_(ms, gs, 1 - float(first.beta))
    if isinstance(spectrum.upper, Tensor):
        torch._foreach_mul_(xs, descent.shrink)
        torch._foreach_sub_(xs, moves)
        return
    if descent.shrink != 1:
        torch._foreach_mul_(xs, descent.shrink)
    torch._foreach_add_(xs, ms or gs, alpha=-spectrum.upper)
