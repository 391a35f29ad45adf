"""Measures what one step did to a set of coordinates, in numbers that join with those of other coordinates."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockadapt.diagnostics.operators import BlockState, Operator, applied, block_state, latest_coefficients, parts
from blockadapt.kernels import Coefficients, Dispatcher
from blockadapt.optimizers import BlockOptimizer
from blockadapt.optimizers.unit import Unit
from blockadapt.spectrum import INVERSE_ROOT, Spectrum

PORTION = 2**19
"""The most numbers in the matrices that are looked at together: some ten arrays of 4 MB."""

Figures = dict[str, float]


def _largest(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _smallest(a: float, b: float) -> float:
    return -_largest(-a, -b)


JOINS: dict[str, Callable[[float, float], float]] = {
    "term_a": operator.add,
    "term_b_spectral": _largest,
    "term_b_nuclear": operator.add,
    "smallest_eigenvalue": _smallest,
    "largest_eigenvalue": _largest,
    "condition": _largest,
    "rank": operator.add,
    "coordinates": operator.add,
    "clipped_low": operator.add,
    "clipped_high": operator.add,
    "final_lr": lambda a, b: a if a == b else math.nan,
    "along": operator.add,
    "square": operator.add,
    "step_norm": math.hypot,
}
"""It says how the figures of two sets of coordinates give those of both. The clipped ones are counts until the end;
`along` and `square` are pᵀm̂ and m̂ᵀm̂, whose ratio is told.

A figure that is NaN for some coordinates is NaN for all of them.
"""


def joined(parts: Sequence[Figures]) -> Figures:
    """Join the figures of several disjoint sets of coordinates."""
    total = dict(parts[0])
    for part in parts[1:]:
        total = {name: join(total[name], part[name]) for name, join in JOINS.items()}
    return total


class Before(NamedTuple):
    """Holds a unit before the step: its parameters, its blocks' state, and the s of the step that left them, if any."""

    x: Sequence[Tensor]
    state: BlockState
    spectrum: Spectrum | None


def measure(optimizer: BlockOptimizer, unit: Unit, before: Before, used: Sequence[float | None]) -> Figures:
    """Measure what the step just taken did to a unit; `used` has the α* of each group in it."""
    now = latest_coefficients(optimizer, unit, used)
    assert now is not None
    state, gradients = block_state(optimizer, unit), _gradients(unit, before.x, now)
    averages = [
        optimizer.state[p]["exp_avg"].double() if optimizer.averages_gradient else g
        for p, g in zip(unit.params, gradients, strict=True)
    ]
    looks = [
        _look(optimizer, now, before.spectrum, *portion)
        for (g, kept), (m, _) in zip(parts(unit, gradients, state, before.state), parts(unit, averages), strict=True)
        for portion in _portions(g, m, *kept)
    ]
    moved = [(p.detach().double() - x.double()).norm().item() for p, x in zip(unit.params, before.x, strict=True)]
    final_lr = used[unit.index]
    return {
        **joined(looks),
        "final_lr": math.nan if final_lr is None else final_lr,
        "step_norm": math.hypot(*moved),
    }


def _gradients(unit: Unit, x: Sequence[Tensor], now: Coefficients) -> list[Tensor]:
    """Give g as the moments took it: sign · grad + coupled · x; zero where a parameter in spanning blocks has none."""
    return [
        torch.zeros(p.shape, dtype=torch.float64, device=p.device)
        if p.grad is None
        else now.descent.sign * p.grad.detach().double() + now.descent.coupled * old.double()
        for p, old in zip(unit.params, x, strict=True)
    ]


def _portions(
    g: Tensor, m: Tensor, now: BlockState, before: BlockState
) -> Iterator[tuple[Tensor, Tensor, BlockState, BlockState]]:
    """Yield the same blocks, so few at a time that their matrices fit into `PORTION`."""
    size = max(1, PORTION // g.shape[1] ** 2)
    for start in range(0, len(g), size):
        some = slice(start, start + size)
        states = [{name: rows[some] for name, rows in state.items()} for state in (now, before)]
        yield g[some], m[some], states[0], states[1]


def _look(
    optimizer: BlockOptimizer,
    now: Coefficients,
    then: Spectrum | None,
    g: Tensor,
    m: Tensor,
    state: BlockState,
    before: BlockState,
) -> Figures:
    """Give the figures of some blocks, but for those of the whole unit."""
    kernels, function = optimizer.kernels, optimizer.spectral_function
    P = applied(kernels, function, now.spectrum, state, g)
    change = None if then is None else _change(kernels, P, applied(kernels, function, then, before, g)).abs()
    return {
        "term_a": P.apply(g).square().sum().item(),
        "term_b_spectral": math.nan if change is None else change.max().item(),
        "term_b_nuclear": math.nan if change is None else change.sum().item(),
        "coordinates": g.numel(),
        "final_lr": math.nan,
        "step_norm": 0.0,
        **_look_at_spectrum(P, now, state),
        **_look_at_projection(P, m, now),
    }


def _change(kernels: Dispatcher, now: Operator, before: Operator) -> Tensor:
    """Find the eigenvalues of Pₜ − Pₜ₋₁ [num_blocks, k]."""
    if now.basis is None and before.basis is None:
        return now.s - before.s
    D = now.matrix() - before.matrix()
    k = D.shape[1]
    shift: Tensor = torch.linalg.vector_norm(D, dim=(1, 2)).unsqueeze(1)  # kernels expect semidefinite matrices
    D.diagonal(dim1=1, dim2=2).add_(shift)
    rows, columns = torch.tril_indices(k, k, device=D.device)
    return kernels.decompose(D[:, rows, columns], k, INVERSE_ROOT)[0] - shift


def _look_at_spectrum(P: Operator, now: Coefficients, state: BlockState) -> Mapping[str, float]:
    """Give the figures of V̂ and of the clip."""
    if P.eigenvalues is None or P.unclipped is None:
        unknown = dict.fromkeys(("smallest_eigenvalue", "largest_eigenvalue", "condition", "rank"), math.nan)
        return {**unknown, "clipped_low": P.s.numel(), "clipped_high": P.s.numel()}
    spectrum, λ = now.spectrum, P.eigenvalues
    low, high = λ.amin(1), λ.amax(1)
    β, δ = now.second.decay, spectrum.damping
    κ = ((β * high).sqrt() + δ) / ((β * low).sqrt() + δ)
    tolerance = λ.shape[1] * torch.finfo(state["second_moment"].dtype).eps
    s, clips = P.unclipped, spectrum.lower > 0
    return {
        "smallest_eigenvalue": low.min().item(),
        "largest_eigenvalue": high.max().item(),
        "condition": κ.max().item(),
        "rank": float((λ > tolerance * high.unsqueeze(1)).sum()),
        "clipped_low": float((s <= spectrum.lower).sum()) if clips else 0.0,
        "clipped_high": float((s >= spectrum.upper).sum()) if clips else 0.0,
    }


def _look_at_projection(P: Operator, m: Tensor, now: Coefficients) -> Mapping[str, float]:
    """Give pᵀm̂ and m̂ᵀm̂, with p the step before any clip; see `spectrum.Estimate`."""
    if P.unclipped is None:
        return {"along": math.nan, "square": math.nan}
    power, c = P.to_basis(m).square(), float(now.first.correction)
    return {"along": (P.unclipped * power).sum().item() / c, "square": power.sum().item() / c**2}
