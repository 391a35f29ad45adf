"""The reference kernel: `torch.linalg.eigh`, any device, float32 and float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockadapt.kernels.contract import Batch, Coefficients, Kernel, Segment
from blockadapt.kernels.layout import by_block, write_by_block_
from blockadapt.moments import unpack, updated_second_moment
from blockadapt.spectrum import unclipped


class EighKernel(Kernel):
    """One `eigh` over all blocks of a size. Everything is computed first and written last."""

    name = "eigh"
    measures = True

    def takes(self, batch: Batch) -> bool:
        """Any blocks."""
        return True

    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> EighChange:
        """See `Kernel.prepare`."""
        n, places = batch.n, [segment.place for segment in segments]
        counts = [place.num_blocks for place in places]
        parts = [place.part(segment.grad) for place, segment in zip(places, segments, strict=True)]
        x, grad = _rows([place.x for place in places], n), _rows(parts, n)
        descent, first, second, spectrum = _columns(segments, grad)

        g = descent.sign * grad + descent.coupled * x
        old = [part if place.m is None else place.m for place, part in zip(places, parts, strict=True)]
        m = torch.lerp(g, _rows(old, n), first.beta)
        V = updated_second_moment(_rows([place.second_moment for place in places]), g, second.decay, second.weight)

        eigenvalues, basis = _decompose(segments, V, g, second.decay, second.weight)
        adapted = list(eigenvalues.split(counts))
        largest: list[Tensor | None] = [None] * len(segments)
        for i, place in enumerate(places):
            if place.largest is not None:
                adapted[i], largest[i] = _amsgrad(adapted[i], place.largest.reshape(-1, n))

        f = unclipped(torch.cat(adapted), spectrum, batch.function)
        s = f.clamp(spectrum.lower, spectrum.upper)
        y = m if basis is None else (basis.mT @ m.unsqueeze(-1)).squeeze(-1)
        direction = s * y if basis is None else (basis @ (s * y).unsqueeze(-1)).squeeze(-1)
        measured = any(segment.tally is not None for segment in segments)
        sums = _sums(f, y).split(counts, dim=1) if measured else []
        kept = basis.flatten(1) if basis is not None else torch.ones_like(m)
        new = [list(t.split(counts)) for t in (direction, m, V, kept, eigenvalues)]
        for i, place in enumerate(places):  # as the places have them: what is written later makes no new tensor
            k = place.x.shape[-1]
            for rows in new[:2]:
                rows[i] = rows[i][:, :k].reshape(place.x.shape)
            new[2][i] = new[2][i].reshape(place.second_moment.shape)
        return EighChange(segments, *new, largest, sums)  # type: ignore[call-arg]

    def decompose(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See `Kernel.decompose`."""
        return _eigh(unpack(packed, n))


@dataclass(frozen=True)
class EighChange:
    """The result of a step on blocks of one size, one entry a segment, not yet written."""

    segments: Sequence[Segment]
    direction: list[Tensor]
    m: list[Tensor]
    second_moment: list[Tensor]
    basis: list[Tensor]
    eigenvalues: list[Tensor]
    largest: list[Tensor | None]
    sums: Sequence[Tensor]

    def write_(self) -> None:
        """Write it where the segments lie."""
        for i, (place, _, _, coefficients, tally) in enumerate(self.segments):
            place.x.mul_(coefficients.descent.shrink).sub_(self.direction[i])
            if place.m is not None:
                place.m.copy_(self.m[i])
            place.second_moment.copy_(self.second_moment[i])
            largest = self.largest[i]
            if place.largest is not None and largest is not None:
                place.largest.copy_(largest.view(place.largest.shape))
            for kept, new in ((place.basis, self.basis[i]), (place.eigenvalues, self.eigenvalues[i])):
                if kept is not None:
                    write_by_block_(kept, new)
            if tally is not None:
                tally.add(self.sums[i], coefficients.first.correction)


def _rows(views: Sequence[Tensor], n: int | None = None) -> Tensor:
    """All blocks of these views under one another, [num_blocks, width], short runs padded to n with zeros."""
    rows = [view.reshape(-1, view.shape[-1]) for view in views]
    if n is not None:
        rows = [F.pad(row, (0, n - row.shape[1])) for row in rows]
    return torch.cat(rows)


def _sums(f: Tensor, y: Tensor) -> Tensor:
    """Sum f y² and y² over each block, [2, num_blocks]; in float64, where no square is lost."""
    square = y.double().square()
    return torch.stack([(f.double() * square).sum(1), square.sum(1)])


def _columns(segments: Sequence[Segment], like: Tensor) -> Any:
    """The coefficients of each block: `Coefficients` with columns [num_blocks, 1] for numbers."""
    table = [segment.coefficients.terms for segment in segments]
    counts = torch.tensor([s.place.num_blocks for s in segments])
    columns = torch.tensor(table, dtype=torch.float64).repeat_interleave(counts, dim=0).to(like)
    return Coefficients.of(columns.unsqueeze(-1).unbind(1))


def _decompose(
    segments: Sequence[Segment], V: Tensor, g: Tensor, decay: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Λ [num_blocks, n] and U [num_blocks, n, n] (None for n = 1), found anew or, between refreshes, kept.

    A kept basis turns with nothing, so Λ = diag(Uᵀ V U) follows V exactly: λ ← d λ + w (Uᵀ g)².
    """
    n = g.shape[1]
    if n == 1:
        return V, None
    counts = [s.place.num_blocks for s in segments]
    if all(s.refresh for s in segments):
        return _eigh(unpack(V, n))
    eigenvalues, basis = g.new_empty(g.shape), g.new_empty(*g.shape, n)
    pieces = list(zip(segments, *(t.split(counts) for t in (V, g, decay, weight, eigenvalues, basis)), strict=True))
    for segment, _, g_, d, w, eigenvalues_, basis_ in pieces:
        if not segment.refresh:
            place = segment.place
            assert place.basis is not None
            assert place.eigenvalues is not None
            basis_.copy_(by_block(place.basis, place.num_blocks).view(basis_.shape))
            turned = (basis_.mT @ g_.unsqueeze(-1)).squeeze(-1)
            eigenvalues_.copy_(d * by_block(place.eigenvalues, place.num_blocks) + w * turned * turned)
    fresh = [piece for piece in pieces if piece[0].refresh]
    if fresh:
        found = _eigh(unpack(torch.cat([piece[1] for piece in fresh]), n))
        sizes = [piece[0].place.num_blocks for piece in fresh]
        for piece, λ, U in zip(fresh, *(t.split(sizes) for t in found), strict=True):
            piece[-2].copy_(λ)
            piece[-1].copy_(U)
    return eigenvalues, basis


def _eigh(V: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors. A block that is not finite gives NaN and does not stop the others.

    What LAPACK cannot solve in float32 is solved in float64: it may raise, and it may also return NaN for a
    finite block.
    """
    finite = V.isfinite().all(-1).all(-1)
    safe = torch.where(finite[:, None, None], V, 0)
    try:
        eigenvalues, basis = torch.linalg.eigh(safe)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        eigenvalues, basis = (t.to(V.dtype) for t in torch.linalg.eigh(safe.double()))
    unsolved = ~(eigenvalues.isfinite().all(-1) & basis.isfinite().all(-1).all(-1))
    if unsolved.any():
        eigenvalues[unsolved], basis[unsolved] = (t.to(V.dtype) for t in torch.linalg.eigh(safe[unsolved].double()))
    return torch.where(finite[:, None], eigenvalues, torch.nan), basis


def _amsgrad(eigenvalues: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Σ̂ ← max(Σ̂, Σ) with both ascending; returns Σ̂ in the order of `eigenvalues`, and ascending."""
    ascending, order = eigenvalues.sort(dim=-1)
    largest = torch.maximum(largest, ascending)
    return torch.empty_like(largest).scatter_(-1, order, largest), largest
