"""The reference kernel solves with `torch.linalg.eigh`, on any device, in float32 and float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockadapt.kernels.contract import Batch, Coefficients, Kernel, Place, Segment
from blockadapt.kernels.layout import by_block, write_by_block_
from blockadapt.kernels.reflections import reflections_length, reflections_of, turned
from blockadapt.kernels.transfer import term_table
from blockadapt.moments import unpack, updated_second_moment
from blockadapt.spectrum import clipped, unclipped
from blockadapt.validation import has_numbers


class EighKernel(Kernel):
    """Moves all blocks of a size with one `eigh`. Everything is computed first and written last."""

    name = "eigh"
    measures = True

    def takes(self, batch: Batch) -> bool:
        """Say yes to any blocks on a device that has `torch.linalg.eigh`."""
        return solves(batch.device)

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
        eigenvalues = V if basis is None else basis.eigenvalues(g, second.decay, second.weight)
        adapted = list(eigenvalues.split(counts))
        largest: list[Tensor | None] = [None] * len(segments)
        for i, place in enumerate(places):
            if place.largest is not None:
                adapted[i], largest[i] = _amsgrad(adapted[i], place.largest.reshape(-1, n))

        f = unclipped(torch.cat(adapted), spectrum, batch.function)
        s = clipped(f, spectrum)
        y = m if basis is None else basis.turn(m)
        direction = s * y if basis is None else basis.turn(s * y, back=True)
        measured = any(segment.tally is not None for segment in segments)
        sums = _sums(f, y).split(counts, dim=1) if measured else []
        reflections = [None] * len(segments) if basis is None else basis.to_keep()
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
    """Holds the result of a step on blocks of one size, one entry a segment, not yet written."""

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
                tally.add(self.sums[i], float(coefficients.first.correction))


def _rows(views: Sequence[Tensor], n: int | None = None) -> Tensor:
    """Lay all blocks of these views under one another, [num_blocks, width], short runs padded to n with zeros."""
    rows = [view.reshape(-1, view.shape[-1]) for view in views]
    if n is not None:
        rows = [F.pad(row, (0, n - row.shape[1])) for row in rows]
    return torch.cat(rows)


def _sums(f: Tensor, y: Tensor) -> Tensor:
    """Sum f y² and y² over each block, [2, num_blocks]; in float64, where no square is lost."""
    square = y.double().square()
    return torch.stack([(f.double() * square).sum(1), square.sum(1)])


def _columns(segments: Sequence[Segment], like: Tensor) -> Any:
    """Give each block its coefficients: `Coefficients` with columns [num_blocks, 1] for numbers."""
    table = term_table([segment.coefficients for segment in segments], like.device, like.dtype)
    rows = [row.expand(segment.place.num_blocks, -1) for row, segment in zip(table.unbind(), segments, strict=True)]
    return Coefficients.of(torch.cat(rows).unsqueeze(-1).unbind(1))


@dataclass(frozen=True)
class _Basis:
    """Holds U of each block: found anew, or, between refreshes, kept as reflections.

    Attributes:
        segments: Whose blocks they are.
        found: Λ [fresh, n] of those that have it anew.
        U: Theirs [fresh, n, n].
        kept: Reflections of the others [others, n(n−1)/2].
    """

    segments: Sequence[Segment]
    found: Tensor
    U: Tensor
    kept: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], V: Tensor) -> _Basis | None:
        """Find that of all blocks; None for blocks of 1."""
        n = segments[0].place.n
        if n == 1:
            return None
        kept = [by_block(p.basis, n, p.num_blocks) for p in _kept_places(segments) if p.basis is not None]
        fresh = unpack(_picked(V, segments, fresh=True), n)
        found = _eigh(fresh) if len(fresh) else (V.new_empty(0, n), fresh)
        return cls(segments, *found, torch.cat([V.new_empty(0, reflections_length(n)), *kept]))

    def turn(self, vectors: Tensor, back: bool = False) -> Tensor:
        """Compute Uᵀ times vectors [num_blocks, n], or U times them on the way back."""
        fresh, kept = (_picked(vectors, self.segments, fresh).unsqueeze(-1) for fresh in (True, False))
        fresh = (self.U if back else self.U.mT) @ fresh
        if len(kept):
            kept = turned(self.kept, kept, back)
        return _joined(fresh.squeeze(-1), kept.squeeze(-1), self.segments)

    def eigenvalues(self, g: Tensor, decay: Tensor, weight: Tensor) -> Tensor:
        """Compute Λ [num_blocks, n]. A kept basis does not turn, so Λ = diag(Uᵀ V U) follows V: λ ← d λ + w (Uᵀ g)²."""
        g, decay, weight = (_picked(t, self.segments, fresh=False) for t in (g, decay, weight))
        if not len(g):
            return self.found
        places = _kept_places(self.segments)
        old = torch.cat([by_block(p.eigenvalues, p.n, p.num_blocks) for p in places if p.eigenvalues is not None])
        square = turned(self.kept, g.unsqueeze(-1)).squeeze(-1).square()
        return _joined(self.found, decay * old + weight * square, self.segments)

    def to_keep(self) -> list[Tensor | None]:
        """Give each segment the reflections that it is to keep anew; None where it keeps those that it has, or none."""
        keeps = [segment.refresh and segment.place.basis is not None for segment in self.segments]
        if not any(keeps):
            return [None] * len(keeps)
        rest = iter(reflections_of(self.U).split([s.place.num_blocks for s in self.segments if s.refresh]))
        new = [next(rest) if segment.refresh else None for segment in self.segments]
        return [rows if keep else None for rows, keep in zip(new, keeps, strict=True)]


def _kept_places(segments: Sequence[Segment]) -> list[Place]:
    return [segment.place for segment in segments if not segment.refresh]


def _picked(rows: Tensor, segments: Sequence[Segment], fresh: bool) -> Tensor:
    """Pick of rows [num_blocks, …] those of segments that find U anew, or of the others."""
    if all(segment.refresh is fresh for segment in segments):
        return rows
    by_segment = zip(rows.split([segment.place.num_blocks for segment in segments]), segments, strict=True)
    return torch.cat([rows[:0], *(some for some, segment in by_segment if segment.refresh is fresh)])


def _joined(fresh: Tensor, others: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Undo `_picked`."""
    if all(segment.refresh for segment in segments):
        return fresh
    by_segment = {
        refresh: iter(rows.split([s.place.num_blocks for s in segments if s.refresh is refresh]))
        for refresh, rows in ((True, fresh), (False, others))
    }
    return torch.cat([next(by_segment[segment.refresh]) for segment in segments])


@lru_cache(maxsize=16)
def solves(device: torch.device) -> bool:
    """Tell whether a device has `torch.linalg.eigh`. One that is not there at all is to say so itself, in a step."""
    try:
        torch.linalg.eigh(torch.eye(2, dtype=torch.float32, device=device))
    except NotImplementedError:
        return False
    except (AssertionError, RuntimeError):
        pass
    return True


def _eigh(V: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues and vectors. A block that is not finite gives NaN and does not stop the others.

    What cannot be solved in float32 is solved in float64. LAPACK may raise, and it may also return NaN for a finite
    block. On other devices `torch.linalg.eigh` itself looks for failures, and nothing here waits for a second look.
    """
    finite = V.isfinite().all(-1).all(-1)
    safe = torch.where(finite[:, None, None], V, 0)
    try:
        eigenvalues, basis = torch.linalg.eigh(safe)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        eigenvalues, basis = (t.to(V.dtype) for t in torch.linalg.eigh(safe.double()))
    if V.is_cpu and has_numbers(V):
        _solve_again_(safe, eigenvalues, basis)
    return torch.where(finite[:, None], eigenvalues, torch.nan), basis


def _solve_again_(V: Tensor, eigenvalues: Tensor, basis: Tensor) -> None:
    """Solve in float64 the blocks of which something is not finite."""
    unsolved = ~(eigenvalues.isfinite().all(-1) & basis.isfinite().all(-1).all(-1))
    if unsolved.any():
        eigenvalues[unsolved], basis[unsolved] = (t.to(V.dtype) for t in torch.linalg.eigh(V[unsolved].double()))


def _amsgrad(eigenvalues: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Σ̂ ← max(Σ̂, Σ) with both ascending; returns Σ̂ in the order of `eigenvalues`, and ascending."""
    ascending, positions = eigenvalues.sort(dim=-1)
    largest = torch.maximum(largest, ascending)
    return torch.empty_like(largest).scatter_(-1, positions, largest), largest
