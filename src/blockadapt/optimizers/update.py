"""Stage 5: one step in the making. Nothing is touched until `apply_`, and that either finishes or changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockadapt.kernels import Batch, Descent, Kernel, Segment
from blockadapt.moments import FirstMoment, SecondMoment, packed_length, statistics_dtype
from blockadapt.partition import IndexGroups, Partition
from blockadapt.spectrum import Spectrum

State = dict[str, Any]


class Coefficients(NamedTuple):
    """All numbers of one step, one NamedTuple a stage."""

    descent: Descent
    first: FirstMoment
    second: SecondMoment
    spectrum: Spectrum


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of a partition keep their state: the shapes and the widths of each state tensor."""

    sizes: dict[int, int]

    def shape(self, width: Callable[[int], int]) -> tuple[int, ...]:
        """[num_blocks, width] where all blocks have one size; else all of them end to end, sizes ascending."""
        rows = [(count, width(n)) for n, count in self.sizes.items()]
        return rows[0] if len(rows) == 1 else (sum(count * width for count, width in rows),)

    def split(self, state: Tensor | None, width: Callable[[int], int]) -> dict[int, Tensor | None]:
        """The rows [num_blocks, width] of each size."""
        if state is None:
            return dict.fromkeys(self.sizes)
        pieces = state.view(-1).split([count * width(n) for n, count in self.sizes.items()])
        return {n: piece.view(-1, width(n)) for n, piece in zip(self.sizes, pieces, strict=True)}


WIDTHS: dict[str, Callable[[int], int]] = {
    "second_moment": packed_length,
    "largest": lambda n: n,
    "basis": lambda n: n * n,
    "eigenvalues": lambda n: n,
}
"""Numbers a block of n keeps in each of its state tensors."""


def block_state_names(amsgrad: bool, refresh_every: int) -> list[str]:
    """The state tensors that blocks keep under these options."""
    return ["second_moment"] + ["largest"] * amsgrad + ["basis", "eigenvalues"] * (refresh_every > 1)


class Views:
    """Views of tensors that stay from step to step, made once: making them anew is what a step would spend most on."""

    def __init__(self) -> None:
        self._held: dict[Tensor, tuple[object, list[dict[str, Any]] | None]] = {}

    def get(self, cut: Partition, param: Tensor, state: State) -> list[dict[str, Any]] | None:
        """Of each segment of a parameter, x, m and what its blocks keep; made again if any of it has moved.

        None if the parameter's strides do not allow views.
        """
        place = (cut, param.data_ptr(), param.stride(), *[tensor.data_ptr() for tensor in state.values()], len(state))
        held = self._held.get(param)
        if held is None or held[0] != place:
            held = self._held[param] = (place, _stable_views(cut, param.detach(), state))
        return held[1]

    def drop(self, param: Tensor) -> None:
        """Let go of all that `param` keeps: a view would keep its memory."""
        self._held.pop(param, None)


def _stable_views(cut: Partition, x: Tensor, state: State) -> list[dict[str, Any]] | None:
    coordinates = cut.views(x)
    if coordinates is None:
        return None
    views: dict[str, list[Tensor] | None] = {
        "x": coordinates,
        "m": cut.views(state["exp_avg"]) if "exp_avg" in state else None,
    }
    for name in WIDTHS:
        views[name] = cut.state_views(state[name]) if name in state else None
    return [{name: parts and parts[i] for name, parts in views.items()} for i in range(len(coordinates))]


@dataclass
class Update:
    """Collects what a step is to do; `apply_` does it."""

    views: Views
    batches: dict[Batch, list[Segment]] = field(default_factory=dict)
    scaled: list[tuple[Tensor, Tensor, Tensor | None, Coefficients]] = field(default_factory=list)
    counters: list[Tensor] = field(default_factory=list)
    finish: list[Callable[[], object]] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        """Put a segment into the batch of its size."""
        if segment.num_blocks:
            key = Batch(segment.n, segment.second_moment.dtype, segment.x.device)
            self.batches.setdefault(key, []).append(segment)

    def stage(self, param: Tensor, grad: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Contiguous copies of a parameter and its gradient in the statistics' dtype; the parameter is written back."""
        x = torch.empty(param.shape, dtype=dtype, device=param.device).copy_(param.detach())
        if grad is None:
            return x, torch.zeros_like(x)
        self.finish.append(lambda: param.copy_(x))
        return x, grad.to(dtype).contiguous()

    def add_parameter(
        self, cut: Partition, param: Tensor, grad: Tensor, state: State, refresh: bool, coefficients: Coefficients
    ) -> None:
        """Add all blocks of a parameter that is cut by a named grouping."""
        dtype = statistics_dtype(param)
        stable = grads = None
        if param.dtype == grad.dtype == dtype:
            stable, grads = self.views.get(cut, param, state), cut.views(grad)
        if stable is None or grads is None:
            x, g = self.stage(param, grad, dtype)
            stable, grads = _stable_views(cut, x, state), cut.views(g)
            assert stable is not None  # staged tensors are contiguous
            assert grads is not None
        for tensors, part in zip(stable, grads, strict=True):
            self.add(Segment(n=cut.n, grad=part, refresh=refresh, **tensors, **coefficients._asdict()))

    def add_group(
        self,
        groups: IndexGroups,
        params: Sequence[Tensor],
        states: Sequence[State],
        refresh: bool,
        coefficients: Coefficients,
    ) -> None:
        """Add the explicit blocks of a whole param group, gathered into rows and scattered back afterwards.

        A parameter without a gradient counts with a zero gradient, which its m takes in, and is not moved.
        """
        dtype, device = statistics_dtype(params[0]), params[0].device
        staged = [self.stage(param, param.grad, dtype) for param in params]
        x, g = (torch.cat([pair[i].flatten() for pair in staged]) for i in (0, 1))
        still = torch.cat([torch.full((p.numel(),), p.grad is None, device=device) for p in params])
        descent = coefficients.descent
        if descent.coupled:
            g += torch.where(still, 0, descent.sign * descent.coupled * x)
            coefficients = coefficients._replace(descent=descent._replace(coupled=0.0))
        averages = [state["exp_avg"].view(-1) for state in states if "exp_avg" in state]
        m = torch.cat(averages) if averages else None
        blocks = Blocks(groups.sizes)
        kept = {name: blocks.split(states[0].get(name), width) for name, width in WIDTHS.items()}
        moved: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for n, table in groups.tables.items():
            index = table.to(device)
            tensors: dict[str, Any] = {"x": x[index], "grad": g[index], "m": m[index] if m is not None else None}
            tensors.update({name: kept[name][n] for name in WIDTHS})
            rows: dict[str, Any] = {name: None if t is None else t.unsqueeze(1) for name, t in tensors.items()}
            segment = Segment(n=n, refresh=refresh, **rows, **coefficients._asdict())
            self.add(segment)
            moved.append((index, segment.x, segment.m))

        def scatter() -> None:
            for index, x_rows, m_rows in moved:
                x[index] = x_rows.squeeze(1)
                if m is not None and m_rows is not None:
                    m[index] = m_rows.squeeze(1)
            lengths = [p.numel() for p in params]
            for (staged_x, _), new in zip(staged, x.split(lengths), strict=True):
                staged_x.view(-1).copy_(new)
            if m is not None:
                for average, new in zip(averages, m.split(lengths), strict=True):
                    average.copy_(new)

        self.finish.insert(0, scatter)  # before the staged parameters are written back

    def add_scaled(self, param: Tensor, grad: Tensor | None, state: State, coefficients: Coefficients) -> None:
        """Add a parameter whose spectrum is one number: x ← shrink · x − α* m, with no linear algebra.

        A parameter without a gradient is treated as `add_group` does.
        """
        if grad is None:
            if "exp_avg" in state:
                self.finish.append(lambda: state["exp_avg"].mul_(coefficients.first.beta))
            return
        dtype = statistics_dtype(param)
        x, g = (param.detach(), grad) if param.dtype == grad.dtype == dtype else self.stage(param, grad, dtype)
        self.scaled.append((x, g, state.get("exp_avg"), coefficients))

    def apply_(self, kernel: Kernel) -> None:
        """Do the step."""
        scaled = _by_coefficients(self.scaled)
        # New tensors are made before anything is written: memory may run out.
        gradients = [_descent(entries, coefficients) for coefficients, entries in scaled.items()]
        kernel.step_(self.batches)
        for (coefficients, entries), gs in zip(scaled.items(), gradients, strict=True):
            _scaled_step_(entries, gs, coefficients)
        if self.counters:
            torch._foreach_add_(self.counters, 1)
        for action in self.finish:
            action()


def _by_coefficients(
    scaled: Sequence[tuple[Tensor, Tensor, Tensor | None, Coefficients]],
) -> dict[Coefficients, list[tuple[Tensor, Tensor, Tensor | None]]]:
    together: dict[Coefficients, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
    for *tensors, coefficients in scaled:
        together.setdefault(coefficients, []).append(tuple(tensors))  # type: ignore[arg-type]
    return together


def _descent(entries: Sequence[tuple[Tensor, Tensor, Tensor | None]], coefficients: Coefficients) -> list[Tensor]:
    """g = sign · grad + coupled · x, new tensors where that differs from grad."""
    descent = coefficients.descent
    gs = [g for _, g, _ in entries]
    if descent.sign < 0:
        gs = list(torch._foreach_neg(gs))
    if descent.coupled:
        gs = list(torch._foreach_add(gs, [x for x, _, _ in entries], alpha=descent.coupled))
    return gs


def _scaled_step_(
    entries: Sequence[tuple[Tensor, Tensor, Tensor | None]], gs: list[Tensor], coefficients: Coefficients
) -> None:
    """x ← shrink · x − α* m for many parameters at once; the clip's interval has closed on α* = spectrum.upper."""
    descent, first, _, spectrum = coefficients
    xs = [x for x, _, _ in entries]
    ms = [m for _, _, m in entries if m is not None]
    if ms:
        torch._foreach_lerp_(ms, gs, 1 - first.beta)
    if descent.shrink != 1:
        torch._foreach_mul_(xs, descent.shrink)
    torch._foreach_add_(xs, ms or gs, alpha=-spectrum.upper)
