"""Reads from an optimizer's state the operators that it applied: P = U diag(s(Λ)) Uᵀ for each block, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockadapt.kernels import Coefficients, Dispatcher
from blockadapt.kernels.reflections import basis_of
from blockadapt.moments import packed_length, statistics_dtype
from blockadapt.optimizers import BlockOptimizer
from blockadapt.optimizers.storage import WIDTHS, state_rows, steps_taken
from blockadapt.optimizers.unit import Unit
from blockadapt.partition import IndexGroups
from blockadapt.spectrum import SpectralFunction, Spectrum, clipped, unclipped
from blockadapt.validation import Described, require

BlockState = Mapping[str, Tensor]
"""It has state tensors by their names in `WIDTHS`, and is empty before the first step and once the clip has closed."""


def block_state(optimizer: BlockOptimizer, unit: Unit) -> BlockState:
    """Give what a unit's blocks keep now."""
    state = optimizer.state.get(unit.owner, {})
    return {name: state[name] for name in WIDTHS if name in state}


def final_lrs(optimizer: BlockOptimizer) -> list[float | None]:
    """Give α* of each param group as the next step will use it."""
    used = [optimizer.final_lr(group) for group in optimizer.param_groups]
    return [None if final_lr is None else float(final_lr) for final_lr in used]


def latest_coefficients(
    optimizer: BlockOptimizer, unit: Unit, used: Sequence[float | None] | None = None
) -> Coefficients | None:
    """Give the numbers of a unit's latest step, under the group's present options; None before its first step.

    Args:
        optimizer: The optimizer.
        unit: One of its units.
        used: The α* of each group in that step; by default those of the next one, which differ where α* is measured.
    """
    step = steps_taken(optimizer.state.get(unit.owner, {}))
    if not step:
        return None
    final_lr = (final_lrs(optimizer) if used is None else used)[unit.index]
    now = optimizer.coefficients(unit.group, step, statistics_dtype(unit.owner), final_lr)
    return Coefficients.of(map(float, now.terms))


def parts(unit: Unit, tensors: Sequence[Tensor], *states: BlockState) -> Iterator[tuple[Tensor, list[BlockState]]]:
    """Go through all blocks of a unit, those with runs of one length k at a time.

    Args:
        unit: The unit.
        tensors: One for each parameter, of its shape.
        *states: Block states at one time or another.

    Yields:
        The coordinates of `tensors` [num_blocks, k], and with them each state as rows [num_blocks, width].
    """
    cut = unit.cut
    if isinstance(cut, IndexGroups):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        coordinates = [flat[table.to(flat.device)] for table in cut.tables.values()]
    else:
        coordinates = [view.flatten(0, 1) for view in cut.views(tensors[0].contiguous()) or ()]
    rows = [{name: state_rows(name, cut, t) for name, t in state.items()} for state in states]
    for i, part in enumerate(coordinates):
        yield part, [{name: parts[i] for name, parts in state.items()} for state in rows]


def units_with_coordinates(optimizer: BlockOptimizer) -> list[Unit]:
    """Give all units of an optimizer that have any coordinates.

    Raises:
        ValueError: Several processes share its blocks.
    """
    units = optimizer.units()
    ok = all(unit.share is None for unit in units)
    require(
        ok, "diagnostics", "optimizer", "one whose blocks all lie in this process", Described("one that shares them")
    )
    return [unit for unit in units if any(param.numel() for param in unit.params)]


@dataclass(frozen=True)
class Operator:
    """Is P = U diag(s) Uᵀ on blocks of k coordinates.

    Attributes:
        s: The effective spectrum [num_blocks, k].
        basis: U [num_blocks, k, k]; None is the identity.
        eigenvalues: Those of V̂ [num_blocks, k]; None once the clip has closed, because V is gone then.
        unclipped: s as it would be without a clip [num_blocks, k]; None likewise.
    """

    s: Tensor
    basis: Tensor | None
    eigenvalues: Tensor | None
    unclipped: Tensor | None

    def to_basis(self, g: Tensor) -> Tensor:
        """Give Uᵀ g for g [num_blocks, k]."""
        return g if self.basis is None else (self.basis.mT @ g.unsqueeze(-1)).squeeze(-1)

    def apply(self, g: Tensor) -> Tensor:
        """Give P g for g [num_blocks, k]."""
        scaled = self.s * self.to_basis(g)
        return scaled if self.basis is None else (self.basis @ scaled.unsqueeze(-1)).squeeze(-1)

    def matrix(self) -> Tensor:
        """Give P [num_blocks, k, k]."""
        if self.basis is None:
            return torch.diag_embed(self.s)
        return (self.basis * self.s.unsqueeze(1)) @ self.basis.mT


def applied(
    kernels: Dispatcher, function: SpectralFunction, spectrum: Spectrum, rows: BlockState, like: Tensor
) -> Operator:
    """Give the operator of the step that left this state.

    Args:
        kernels: Find eigenvectors where the state does not keep them.
        function: The f of its s.
        spectrum: The step's s.
        rows: The state after the step, as from `parts`.
        like: Coordinates [num_blocks, k] of the same blocks.
    """
    k = like.shape[1]
    basis: Tensor | None
    if "second_moment" not in rows:
        s = torch.full(like.shape, float(spectrum.upper), dtype=torch.float64, device=like.device)
        return Operator(s, None, None, None)
    if "basis" in rows and (n := rows["eigenvalues"].shape[1]) > 1:
        eigenvalues, basis = rows["eigenvalues"].double(), basis_of(rows["basis"].double(), n)[:, :k]
    else:  # the first k rows of a packed triangle are the block without the coordinates that a short run lacks
        packed = rows["second_moment"].double()[:, : packed_length(k)]
        eigenvalues, basis = kernels.decompose(packed, k, function) if k > 1 else (packed, None)
    if "largest" in rows:  # AMSGrad: Σ̂ ascending, dealt out in the order of Λ; what a short run lacks is its zeros
        largest = rows["largest"].double()[:, -eigenvalues.shape[1] :]
        eigenvalues = torch.empty_like(largest).scatter_(1, eigenvalues.argsort(dim=1), largest)
    f = unclipped(eigenvalues, spectrum, function)
    s = clipped(f, spectrum)
    if basis is not None and eigenvalues.shape[1] > k:  # leave out the eigenvectors that lie where the run has ended
        inside = basis.square().sum(1).argsort(dim=1, descending=True)[:, :k]
        basis = basis.gather(2, inside.unsqueeze(1).expand(-1, k, -1))
        s, f, eigenvalues = (of_all.gather(1, inside) for of_all in (s, f, eigenvalues))
    return Operator(s, basis, eigenvalues.clamp(min=0) / spectrum.correction, f)
