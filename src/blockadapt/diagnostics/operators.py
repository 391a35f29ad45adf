"""The operators that an optimizer applied, read from its state: P = U diag(s(Λ)) Uᵀ for each block, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockadapt.kernels import Coefficients, Dispatcher
from blockadapt.moments import packed_length, statistics_dtype
from blockadapt.optimizers import BlockOptimizer
from blockadapt.optimizers.base import Group, cut_of, steps_taken
from blockadapt.optimizers.storage import WIDTHS, state_rows
from blockadapt.partition import IndexGroups, index_groups
from blockadapt.spectrum import SpectralFunction, Spectrum, effective

BlockState = Mapping[str, Tensor]
"""The state tensors of blocks by their names in `WIDTHS`; empty before the first step and once the clip has closed."""


@dataclass(frozen=True)
class Unit:
    """What keeps its blocks together: one parameter, or all parameters of a group whose blocks span them.

    Attributes:
        key: "group.position" of the owner, the parameter that keeps the blocks' state.
        name: What rows call it.
        group: Its param group.
        params: Its parameters, the owner first.
    """

    key: str
    name: str
    group: Group
    params: Sequence[Tensor]

    def block_state(self, optimizer: BlockOptimizer) -> BlockState:
        """The state of its blocks as it is now."""
        state = optimizer.state.get(self.params[0], {})
        return {name: state[name] for name in WIDTHS if name in state}

    def coefficients(self, optimizer: BlockOptimizer) -> Coefficients | None:
        """The numbers of its latest step, under the group's present options; None before its first step."""
        step = steps_taken(optimizer.state.get(self.params[0], {}))
        if not step:
            return None
        return optimizer.coefficients(self.group, step, statistics_dtype(self.params[0]))

    def parts(self, tensors: Sequence[Tensor], *states: BlockState) -> Iterator[tuple[Tensor, list[BlockState]]]:
        """All blocks with runs of one length k at a time.

        Args:
            tensors: One for each parameter, of its shape.
            *states: Block states at one time or another.

        Yields:
            The coordinates of `tensors` [num_blocks, k], and with them each state as rows [num_blocks, width].
        """
        cut = cut_of(self.group, self.params)
        if isinstance(cut, IndexGroups):
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            coordinates = [flat[table.to(flat.device)] for table in cut.tables.values()]
        else:
            coordinates = [view.flatten(0, 1) for view in cut.views(tensors[0].contiguous()) or ()]
        rows = [{name: state_rows(name, cut, t) for name, t in state.items()} for state in states]
        for i, part in enumerate(coordinates):
            yield part, [{name: parts[i] for name, parts in state.items()} for state in rows]


def units(optimizer: BlockOptimizer) -> Iterator[Unit]:
    """All units of an optimizer that have coordinates."""
    for index, group in enumerate(optimizer.param_groups):
        params = group["params"]
        keys = [f"{index}.{position}" for position in range(len(params))]
        names = group.get("param_names") or keys
        if index_groups(group["grouping"], params):
            if any(param.numel() for param in params):
                name = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
                yield Unit(keys[0], name, group, params)
            continue
        for key, name, param in zip(keys, names, params, strict=True):
            if param.numel():
                yield Unit(key, name, group, [param])


@dataclass(frozen=True)
class Operator:
    """P = U diag(s) Uᵀ on blocks of k coordinates.

    Attributes:
        s: The effective spectrum [num_blocks, w].
        basis: U [num_blocks, k, w]; None is the identity. w > k only where a short run is kept as a longer block.
        eigenvalues: Those of V̂ [num_blocks, k]; None once the clip has closed, because V is gone then.
    """

    s: Tensor
    basis: Tensor | None
    eigenvalues: Tensor | None

    def apply(self, g: Tensor) -> Tensor:
        """P g for g [num_blocks, k]."""
        if self.basis is None:
            return self.s * g
        return (self.basis @ (self.s * (self.basis.mT @ g.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)).squeeze(-1)

    def matrix(self) -> Tensor:
        """P [num_blocks, k, k]."""
        if self.basis is None:
            return torch.diag_embed(self.s)
        return (self.basis * self.s.unsqueeze(1)) @ self.basis.mT


def applied(
    kernels: Dispatcher, function: SpectralFunction, spectrum: Spectrum, rows: BlockState, like: Tensor
) -> Operator:
    """The operator of the step that left this state.

    Args:
        kernels: Find eigenvectors where the state does not keep them.
        function: The f of its s.
        spectrum: The step's s.
        rows: The state after the step, as from `Unit.parts`.
        like: Coordinates [num_blocks, k] of the same blocks.
    """
    k = like.shape[1]
    basis: Tensor | None
    if "second_moment" not in rows:
        s = torch.full(like.shape, spectrum.upper, dtype=torch.float64, device=like.device)
        return Operator(s, None, None)
    if "basis" in rows and (n := rows["eigenvalues"].shape[1]) > 1:
        eigenvalues, basis = rows["eigenvalues"].double(), rows["basis"].double().view(-1, n, n)[:, :k]
    else:  # the first k rows of a packed triangle are the block without the coordinates that a short run lacks
        packed = rows["second_moment"].double()[:, : packed_length(k)]
        eigenvalues, basis = kernels.decompose(packed, k, function) if k > 1 else (packed, None)
    if "largest" in rows:  # AMSGrad: Σ̂ ascending, dealt out in the order of Λ; what a short run lacks is its zeros
        largest = rows["largest"].double()[:, -eigenvalues.shape[1] :]
        eigenvalues = torch.empty_like(largest).scatter_(1, eigenvalues.argsort(dim=1), largest)
    s = effective(eigenvalues, spectrum, function)
    if basis is not None and eigenvalues.shape[1] > k:  # leave out the eigenvectors that lie where the run has ended
        inside = basis.square().sum(1).argsort(dim=1, descending=True)[:, :k]
        eigenvalues = eigenvalues.gather(1, inside)
    return Operator(s, basis, eigenvalues.clamp(min=0) / spectrum.correction)
