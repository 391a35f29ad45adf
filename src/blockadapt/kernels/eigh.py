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
from blockadapt.kernels.reflections import reflections_length, reflections_of, turned
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

        basis = _Basis.of(segments, V)
        eigenvalues = V if basis is None else basis.eigenvalues(segments, g, second.decay, second.weight)
        adapted = list(eigenvalues.split(counts))
        largest: list[Tensor | None] = [None] * len(segments)
        for i, place in enumerate(places):
            if place.largest is not None:
                adapted[i], largest[i] = _amsgrad(adapted[i], place.largest.reshape(-1, n))

        f = unclipped(torch.cat(adapted), spectrum, batch.function)
        s = f.clamp(spectrum.lower, spectrum.upper)
        y = m if basis is None else basis.turn(m)
        direction = s * y if basis is None else basis.turn(s * y, back=True)
        measured = any(segment.tally is not None for segment in segments)
        sums = _sums(f, y, first.correction).split(counts, dim=1) if measured else []
        reflections = [None] * len(segments) if basis is None else basis.to_keep(segments)
        new = [list(t.split(counts)) for t in (direction, m, V, eigenvalues)]
        for i, place in enumerate(places):  # as the places have them: what is written later makes no new tensor
            k = place.x.shape[-1]
            for rows in new[:2]:
                rows[i] = rows[i][:, :k].reshape(place.x.shape)
            new[2][i] = new[2][i].reshape(place.second_moment.shape)
        return EighChange(segments, *new, reflections, largest, sums)  # type: ignore[call-arg]

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
    eigenvalues: list[Tensor]
    basis: Sequence[Tensor | None]
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
            basis = self.basis[i]
            if place.basis is not None and basis is not None:
                write_by_block_(place.basis, place.n, basis)
            if place.eigenvalues is not None and place.n > 1:
                write_by_block_(place.eigenvalues, place.n, self.eigenvalues[i])
            if tally is not None:
                tally.add(self.sums[i])


def _rows(views: Sequence[Tensor], n: int | None = None) -> Tensor:
    """All blocks of these views under one another, [num_blocks, width], short runs padded to n with zeros."""
    rows = [view.reshape(-1, view.shape[-1]) for view in views]
    if n is not None:
        rows = [F.pad(row, (0, n - row.shape[1])) for row in rows]
    return torch.cat(rows)


def _sums(f: Tensor, y: Tensor, correction: Tensor) -> Tensor:
    """Sum f y² / c and y² / c² over each block, [2, num_blocks]; in float64, where no square is lost."""
    square = (y.double() / correction).square()
    return torch.stack([(f.double() * correction * square).sum(1), square.sum(1)])


def _columns(segments: Sequence[Segment], like: Tensor) -> Any:
    """The coefficients of each block: `Coefficients` with columns [num_blocks, 1] for numbers."""
    table = [segment.coefficients.terms for segment in segments]
    counts = torch.tensor([s.place.num_blocks for s in segments])
    columns = torch.tensor(table, dtype=torch.float64).repeat_interleave(counts, dim=0).to(like)
    return Coefficients.of(columns.unsqueeze(-1).unbind(1))


@dataclass(frozen=True)
class _Basis:
    """U of each block: found anew, or, between refreshes, kept as reflections.

    Attributes:
        fresh: Which blocks have it anew [num_blocks].
        found: Λ [fresh, n] of these.
        U: Theirs [fresh, n, n].
        kept: Reflections of the others [others, n(n−1)/2].
    """

    fresh: Tensor
    found: Tensor
    U: Tensor
    kept: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], V: Tensor) -> _Basis | None:
        """That of all blocks; None for blocks of 1."""
        n = segments[0].place.n
        if n == 1:
            return None
        counts = torch.tensor([s.place.num_blocks for s in segments])
        fresh = torch.tensor([s.refresh for s in segments]).repeat_interleave(counts).to(V.device)
        found, U = _eigh(unpack(V[fresh], n))
        kept = [
            by_block(s.place.basis, n, s.place.num_blocks)
            for s in segments
            if not s.refresh and s.place.basis is not None
        ]
        return cls(fresh, found, U, torch.cat([V.new_empty(0, reflections_length(n)), *kept]))

    def turn(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Uᵀ times vectors [num_blocks, n], or U times them on the way back."""
        result, columns = torch.empty_like(vectors), vectors.unsqueeze(-1)
        result[self.fresh] = ((self.U if back else self.U.mT) @ columns[self.fresh]).squeeze(-1)
        if len(self.kept):
            result[~self.fresh] = turned(self.kept, columns[~self.fresh], back).squeeze(-1)
        return result

    def eigenvalues(self, segments: Sequence[Segment], g: Tensor, decay: Tensor, weight: Tensor) -> Tensor:
        """Λ [num_blocks, n]. A kept basis does not turn, so Λ = diag(Uᵀ V U) follows V: λ ← d λ + w (Uᵀ g)²."""
        result = torch.empty_like(g)
        result[self.fresh] = self.found
        if len(self.kept):
            places = [s.place for s in segments if not s.refresh]
            old = [by_block(p.eigenvalues, p.n, p.num_blocks) for p in places if p.eigenvalues is not None]
            others = ~self.fresh
            square = self.turn(g)[others].square()
            result[others] = decay[others] * torch.cat(old) + weight[others] * square
        return result

    def to_keep(self, segments: Sequence[Segment]) -> list[Tensor | None]:
        """The reflections that each segment is to keep anew; None where it keeps those that it has, or none."""
        keeps = [s.refresh and s.place.basis is not None for s in segments]
        if not any(keeps):
            return [None] * len(segments)
        rest = iter(reflections_of(self.U).split([s.place.num_blocks for s in segments if s.refresh]))
        new = [next(rest) if s.refresh else None for s in segments]
        return [rows if keep else None for rows, keep in zip(new, keeps, strict=True)]


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
