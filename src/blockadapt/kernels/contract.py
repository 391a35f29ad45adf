"""What a kernel is given, and what it promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from blockadapt.moments import FirstMoment, SecondMoment
from blockadapt.spectrum import Spectrum


class Descent(NamedTuple):
    """How the gradient enters and how the parameter shrinks: g = sign · grad + coupled · x; x ← shrink · x − …"""

    sign: float
    coupled: float
    shrink: float


class Coefficients(NamedTuple):
    """All numbers of one step, one NamedTuple a stage."""

    descent: Descent
    first: FirstMoment
    second: SecondMoment
    spectrum: Spectrum

    @property
    def terms(self) -> tuple[float, ...]:
        """All of them in a row, in the order of the NamedTuples."""
        return (*self.descent, *self.first, *self.second, *self.spectrum)


class Batch(NamedTuple):
    """What one kernel call takes: every block of this size, dtype and device, whatever parameter it is from."""

    n: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Place:
    """Where blocks of one size lie: all runs of one length in one parameter. It stays while its tensors stay.

    Tensors are views [major, minor, width]; a block is one (major, minor). Coordinates have k <= n entries: a short
    last run is a block of n whose missing coordinates are zero. What is kept between refreshes lies in tiles, see
    `kernels.layout`.

    Attributes:
        n: Block size.
        x: Coordinates [major, minor, k], moved in place.
        m: First moment [major, minor, k], updated in place; None where the gradient itself is used (β₁ = 0).
        second_moment: Packed V [major, minor, n(n+1)/2], updated in place.
        largest: AMSGrad's Σ̂ [major, minor, n], ascending, updated in place; None without AMSGrad.
        basis: U kept between refreshes [tiles, n·n, TILE], rows of U one after another; None with `refresh_every=1`.
        eigenvalues: diag(Uᵀ V U) kept with it [tiles, n, TILE].
        offset: Elements from the parameter's first to the first of x.
    """

    n: int
    x: Tensor
    m: Tensor | None
    second_moment: Tensor
    largest: Tensor | None
    basis: Tensor | None
    eigenvalues: Tensor | None
    offset: int = 0

    def part(self, grad: Tensor) -> Tensor:
        """Of the gradient of the whole parameter, [major, minor, k]: it lies there as x lies in the parameter."""
        return grad.as_strided(self.x.shape, self.x.stride(), grad.storage_offset() + self.offset)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that lie here."""
        return self.x.shape[0] * self.x.shape[1]

    @cached_property
    def batch(self) -> Batch:
        """What these blocks are called with."""
        return Batch(self.n, self.second_moment.dtype, self.x.device)

    @cached_property
    def keeps(self) -> tuple[bool, bool, bool]:
        """Whether there are m, Σ̂ and a basis."""
        return self.m is not None, self.largest is not None, self.basis is not None


class Segment(NamedTuple):
    """One step for the blocks of one place.

    Attributes:
        place: Where they lie.
        grad: Gradient of the whole parameter, with the parameter's strides.
        refresh: Whether this step finds U anew.
        coefficients: The step's numbers.
    """

    place: Place
    grad: Tensor
    refresh: bool
    coefficients: Coefficients


Batches = Mapping[Batch, Sequence[Segment]]


class Kernel(Protocol):
    """Moves blocks: for each block of each segment

        g ← sign · grad + coupled · x
        m ← β₁ m + (1 − β₁) g
        V ← d V + w g gᵀ
        x ← shrink · x − U diag(s(Λ)) Uᵀ m,    V = U Λ Uᵀ

    A kernel *applies* the spectral function s to m; it never forms an inverse root.
    """

    name: str

    def step_(self, batches: Batches) -> None:
        """Do the whole step, or raise with nothing changed."""
        ...
