"""Defines what a kernel is given, and what it promises.

    Batch     blocks of one size, dtype, device and spectral function: what one call takes
    Place     where some of them lie, kept while nothing moves
    Segment   a place, and what one step brings: gradient, coefficients
    Tally     where a kernel that measures says what a step shows of α*
    Change    a step that is computed or made ready, and not yet written

A step has two phases. `Kernel.prepare` may raise and changes nothing; `Change.write_` changes everything and cannot
raise. So a step that fails leaves parameters and state as they were, whichever kernels took part in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol, get_type_hints

import torch
from torch import Tensor

from blockadapt.moments import FirstMoment, SecondMoment
from blockadapt.spectrum import INVERSE_ROOT, SpectralFunction, Spectrum
from blockadapt.terms import Term
from blockadapt.validation import has_numbers


class Descent(NamedTuple):
    """Says how the gradient enters and how the parameter shrinks: g = sign · grad + coupled · x; x ← shrink · x − …"""

    sign: float
    coupled: float
    shrink: Term


class Coefficients(NamedTuple):
    """Holds all numbers of one step, one NamedTuple a stage. The host or the device knows them: see `terms.Term`."""

    descent: Descent
    first: FirstMoment
    second: SecondMoment
    spectrum: Spectrum

    @property
    def terms(self) -> tuple[Term, ...]:
        """Give all of them in a row, in the order of `TERMS`."""
        return (*self.descent, *self.first, *self.second, *self.spectrum)

    @classmethod
    def of(cls, terms: Iterable[Any]) -> Coefficients:
        """Undo `terms`. Columns of tensors may stand for the numbers."""
        rest = iter(terms)
        return cls(*(stage(*islice(rest, len(stage._fields))) for stage in _STAGES))

    def split(self, number: int) -> list[Coefficients]:
        """Give each of `number` parameters its coefficients, where a tensor holds one number for each of them."""
        columns = [term.unbind() if isinstance(term, Tensor) and term.ndim else (term,) * number for term in self.terms]
        return [Coefficients.of(terms) for terms in zip(*columns, strict=True)]


_STAGES: tuple[Any, ...] = tuple(get_type_hints(Coefficients).values())

TERMS = tuple(
    f"{name}.{term}" for name, stage in zip(Coefficients._fields, _STAGES, strict=True) for term in stage._fields
)
"""Names each of the `terms`, such as "spectrum.damping": a table of terms has its columns in this order."""


class Batch(NamedTuple):
    """Says what blocks have in common that go to a kernel together, whatever parameters they are from.

    Blocks that have no numbers, such as those of a FakeTensor, count as on the device "meta".
    """

    n: int
    dtype: torch.dtype
    device: torch.device
    function: SpectralFunction


@dataclass(frozen=True, eq=False)
class Place:
    """Says where blocks of one size lie: all runs of one length in one parameter. It stays while its tensors stay.

    Tensors are views [major, minor, width]; a block is one (major, minor). Coordinates have k <= n entries: a short
    last run is a block of n whose missing coordinates are zero. What is kept between refreshes lies in tiles, see
    `kernels.layout`.

    Attributes:
        n: Block size.
        x: Coordinates [major, minor, k], moved in place.
        m: First moment [major, minor, k], updated in place; None where the gradient itself is used (β₁ = 0).
        second_moment: Packed V [major, minor, n(n+1)/2], updated in place.
        largest: AMSGrad's Σ̂ [major, minor, n], ascending, updated in place; None without AMSGrad.
        basis: U kept between refreshes, as reflections (`kernels.reflections`), n(n−1)/2 numbers a block, by tile; None
            with `refresh_every=1`.
        eigenvalues: diag(Uᵀ V U) kept with it, n numbers a block, by tile. Blocks of 1 keep neither: both are empty.
        function: s(λ) of these blocks.
        offset: Elements from the parameter's first to the first of x.
    """

    n: int
    x: Tensor
    m: Tensor | None
    second_moment: Tensor
    largest: Tensor | None
    basis: Tensor | None
    eigenvalues: Tensor | None
    function: SpectralFunction = INVERSE_ROOT
    offset: int = 0

    def part(self, grad: Tensor) -> Tensor:
        """View its part of the whole parameter's gradient, [major, minor, k]: it lies there as x in the parameter."""
        return grad.as_strided(self.x.shape, self.x.stride(), grad.storage_offset() + self.offset)

    @cached_property
    def num_blocks(self) -> int:
        """Count the blocks that lie here."""
        return self.x.shape[0] * self.x.shape[1]

    @cached_property
    def batch(self) -> Batch:
        """Say what these blocks have in common with others of their batch."""
        device = self.x.device if has_numbers(self.x) else torch.device("meta")
        return Batch(self.n, self.second_moment.dtype, device, self.function)

    @cached_property
    def keeps(self) -> tuple[bool, bool, bool]:
        """Say whether there are m, Σ̂ and a basis."""
        return self.m is not None, self.largest is not None, self.basis is not None


class Tally:
    """Collects what the blocks of a step show of α*: pᵀm̂ and m̂ᵀm̂, where p = U f(Λ) Uᵀ m is the step before any clip.

    With y = Uᵀ m, a block has pᵀm̂ = Σ f(λᵢ) yᵢ² / c and m̂ᵀm̂ = Σ yᵢ² / c², where c is m's correction. The tally stays
    from step to step, and its identity says which blocks are counted together.

    Args:
        device: Where the sums are added up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: list[tuple[Tensor, float]] = []

    def clear(self) -> None:
        """Forget the step before."""
        self._sums.clear()

    def add(self, sums: Tensor, correction: float) -> None:
        """Count some blocks when they are moved; it cannot raise.

        Args:
            sums: Σ f(λᵢ) yᵢ² and Σ yᵢ² over these blocks, float64 [2, …], in as many parts as the kernel likes.
            correction: c, which is the same for all of them.
        """
        self._sums.append((sums, correction))

    def pair(self) -> tuple[float, float] | Tensor:
        """Add up all that was counted, as `total` does, but in plain numbers where the host has it all in one place.

        Almost always it has, and calls of torch would take longer than all else about them.
        """
        if self._device.type != "cpu" or len(self._sums) != 1:
            return self.total()
        sums, c = self._sums[0]
        along, square = (sums if sums.dim() == 1 else sums.reshape(2, -1).sum(1)).tolist()
        return along / c, square / (c * c)

    def total(self) -> Tensor:
        """Add up all that was counted: pᵀm̂ and m̂ᵀm̂, [2]. Nothing is sent to the device."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for sums, c in self._sums:
            along, square = sums.reshape(2, -1).sum(1).to(self._device)
            total[0] += along / c
            total[1] += square / (c * c)
        return total


class Segment(NamedTuple):
    """Holds one step for the blocks of one place.

    Attributes:
        place: Where they lie.
        grad: Gradient of the whole parameter, with the parameter's strides.
        refresh: Whether this step finds U anew.
        coefficients: The step's numbers.
        tally: Where to count them when the step is written; None if nobody asks. Only kernels that measure get one.
    """

    place: Place
    grad: Tensor
    refresh: bool
    coefficients: Coefficients
    tally: Tally | None = None


class Change(Protocol):
    """Is a step made ready for all blocks of a batch."""

    def write_(self) -> None:
        """Take it: x, m, V and what else the places hold. It cannot raise: all that may fail lies behind it."""
        ...


class Kernel(ABC):
    """Moves blocks: for each block of each segment

        g ← sign · grad + coupled · x
        m ← β₁ m + (1 − β₁) g
        V ← d V + w g gᵀ
        x ← shrink · x − U diag(s(Λ)) Uᵀ m,    V = U Λ Uᵀ

    A kernel *applies* the spectral function s to m; it never forms an inverse root.

    Example:
        >>> from blockadapt.kernels.eigh import EighKernel
        >>> class Watched(EighKernel):
        ...     def prepare(self, batch, segments):
        ...         print(f"{sum(s.place.num_blocks for s in segments)} blocks of {batch.n}")
        ...         return super().prepare(batch, segments)
        >>> weight = torch.nn.Parameter(torch.ones(20, 3))
        >>> weight.grad = torch.ones(20, 3)
        >>> BlockAdam([weight], backend=Watched()).step()
        6 blocks of 10
    """

    name: str
    """People call it by this name, in `backend=` and in records."""

    measures: ClassVar[bool] = False
    """It says whether the kernel fills the tally of a segment that has one, as `SpectrumClip("auto")` needs it."""

    @abstractmethod
    def takes(self, batch: Batch) -> bool:
        """Say whether this kernel can move such blocks here.

        An optimizer asks once for each batch and keeps the answer, so it may depend on nothing but the batch.
        """

    @abstractmethod
    def prepare(self, batch: Batch, segments: Sequence[Segment]) -> Change:
        """Make the step of these segments ready. It may raise; it changes nothing that the segments hold."""

    @abstractmethod
    def decompose(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Solve V = U Λ Uᵀ for packed V [num_blocks, n(n+1)/2].

        Returns:
            Λ [num_blocks, n], in no order, and U [num_blocks, n, n].
        """
