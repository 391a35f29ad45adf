"""What one step did to a set of coordinates, as numbers that join with those of other coordinates."""

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

CHUNK = 2**19
"""Numbers in the matrices that are looked at together: some ten arrays of 4 MB."""

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
    "step_norm": math.hypot,
}
"""Each figure, and how those of two sets of coordinates give that of both. The clipped ones are counts until the end.

A figure that is NaN for some coordinates is NaN for all of them.
"""


def joined(parts: Sequence[Figures]) -> Figures:
    """The figures of several disjoint sets of coordinates together."""
    total = dict(parts[0])
    for part in parts[1:]:
        total = {name: join(total[name], part[name]) for name, join in JOINS.items()}
    return total


class Before(NamedTuple):
    """A unit before the step: its parameters, its blocks' state, and the s of the step that left them, if any."""

    x: Sequence[Tensor]
    state: BlockState
    spectrum: Spectrum | None


def measure(optimizer: BlockOptimizer, unit: Unit, before: Before) -> Figures:
    """What the step just taken did to a unit."""
    now = latest_coefficients(optimizer, unit)
    assert now is not None
    state = block_state(optimizer, unit)
    looks = [
        _look(optimizer, now, before.spectrum, *chunk)
        for g, kept in parts(unit, _gradients(unit, before.x, now), state, before.state)
        for chunk in _chunks(g, *kept)
    ]
    moved = [(p.detach().double() - x.double()).norm().item() for p, x in zip(unit.params, before.x, strict=True)]
    return {**joined(looks), "step_norm": math.hypot(*moved)}


def _gradients(unit: Unit, x: Sequence[Tensor], now: Coefficients) -> list[Tensor]:
    """g as the moments took it: sign · grad + coupled · x; zero where a parameter within spanning blocks has none."""
    return [
        torch.zeros(p.shape, dtype=torch.float64, device=p.device)
        if p.grad is None
        else now.descent.sign * p.grad.detach().double() + now.descent.coupled * old.double()
        for p, old in zip(unit.params, x, strict=True)
    ]


def _chunks(g: Tensor, now: BlockState, before: BlockState) -> Iterator[tuple[Tensor, BlockState, BlockState]]:
    """Yield the same blocks, so few at a time that their matrices fit into `CHUNK`."""
    size = max(1, CHUNK // g.shape[1] ** 2)
    for start in range(0, len(g), size):
        piece = slice(start, start + size)
        states = [{name: rows[piece] for name, rows in state.items()} for state in (now, before)]
        yield g[piece], states[0], states[1]


def _look(
    optimizer: BlockOptimizer,
    now: Coefficients,
    then: Spectrum | None,
    g: Tensor,
    state: BlockState,
    before: BlockState,
) -> Figures:
    """The figures of some blocks, but for the step norm."""
    kernels, function = optimizer.kernels, optimizer.spectral_function
    P = applied(kernels, function, now.spectrum, state, g)
    change = None if then is None else _change(kernels, P, applied(kernels, function, then, before, g)).abs()
    return {
        "term_a": P.apply(g).square().sum().item(),
        "term_b_spectral": math.nan if change is None else change.max().item(),
        "term_b_nuclear": math.nan if change is None else change.sum().item(),
        "coordinates": g.numel(),
        "step_norm": 0.0,
        **_look_at_spectrum(P, now, state),
    }


def _change(kernels: Dispatcher, now: Operator, before: Operator) -> Tensor:
    """The eigenvalues of Pₜ − Pₜ₋₁ [num_blocks, k]."""
    if now.basis is None and before.basis is None:
        return now.s - before.s
    D = now.matrix() - before.matrix()
    k = D.shape[1]
    shift: Tensor = torch.linalg.vector_norm(D, dim=(1, 2)).unsqueeze(1)  # kernels expect semidefinite matrices
    D.diagonal(dim1=1, dim2=2).add_(shift)
    rows, columns = torch.tril_indices(k, k, device=D.device)
    return kernels.decompose(D[:, rows, columns], k, INVERSE_ROOT)[0] - shift


def _look_at_spectrum(P: Operator, now: Coefficients, state: BlockState) -> Mapping[str, float]:
    """The figures of V̂ and of the clip."""
    if P.eigenvalues is None:
        unknown = dict.fromkeys(("smallest_eigenvalue", "largest_eigenvalue", "condition", "rank"), math.nan)
        return {**unknown, "clipped_low": P.s.numel(), "clipped_high": P.s.numel()}
    spectrum, λ = now.spectrum, P.eigenvalues
    low, high = λ.amin(1), λ.amax(1)
    β, δ = now.second.decay, spectrum.damping
    κ = ((β * high).sqrt() + δ) / ((β * low).sqrt() + δ)
    tolerance = λ.shape[1] * torch.finfo(state["second_moment"].dtype).eps
    s, clips = spectrum.lr / (λ.sqrt() + δ), spectrum.lower > 0
    return {
        "smallest_eigenvalue": low.min().item(),
        "largest_eigenvalue": high.max().item(),
        "condition": κ.max().item(),
        "rank": float((λ > tolerance * high.unsqueeze(1)).sum()),
        "clipped_low": float((s <= spectrum.lower).sum()) if clips else 0.0,
        "clipped_high": float((s >= spectrum.upper).sum()) if clips else 0.0,
    }
