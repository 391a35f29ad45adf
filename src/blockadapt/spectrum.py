"""Stage 3 makes the effective spectrum, and its bounds over time.

With V̂ = U Λ Uᵀ, a step is x ← x − U diag(s) Uᵀ m, where

    s = clip(α / (√Λ + δ), λₗ, λᵤ)
    λₗ = α* (1 − 1/(γt + 1))        λᵤ = α* (1 + 1/(γt))

α* follows the schedule. It is given, α* = final_lr · lr / peak_lr, or measured, α* = lr · mean of pᵀm̂ / (lr m̂ᵀm̂) with
p the step before any clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from blockadapt.terms import Term, at_most
from blockadapt.validation import is_finite, is_number, require, require_beta, require_integer, require_number

CLOSED = 1e-2
"""The interval counts as closed once λᵤ/λₗ − 1 is below this.

λᵤ/λₗ = (1 + 1/(γt))², so that is at γt > 200.5. All of the spectrum is then within 1% of α*: replacing it by α* moves
a step by less than 1%, far less than minibatch noise does. The paper's CIFAR run (γt = 235 at its end) closes at 85%.
"""


UNBOUNDED = torch.finfo(torch.float32).max
"""λᵤ without clipping. Finite, so that a zero m stays zero under the largest s."""


MEMORY = 0.999
"""The decay of the mean over steps that a measured α* is: it looks back about a thousand steps, as V does."""


@dataclass(frozen=True)
class SpectrumClip:
    """Clip the effective spectrum into an interval that closes on a single step size, that of SGD.

    Args:
        final_lr: α*, the step size at the end, as it is for SGD on the averaged momentum m. Heavy-ball SGD with
            learning rate η has final_lr = η / (1 − β₁). A number is what α* is at the largest lr so far; as lr falls
            from there, α* falls with it. With `"auto"` each param group measures its own α*, see `Estimate`.
        gamma: γ, how fast the interval closes. After t steps its ends are within a factor 1 + 1/(γt) of α*.

    Example:
        >>> SpectrumClip(final_lr=0.1, gamma=1e-3).bounds(step=1000)
        (0.05, 0.2)
    """

    final_lr: float | Literal["auto"] = 0.1
    gamma: float = 1e-3

    def __post_init__(self) -> None:
        if self.final_lr != "auto":
            ok = is_number(self.final_lr) and is_finite(self.final_lr) and self.final_lr > 0
            require(ok, "SpectrumClip", "final_lr", "a finite number > 0 or 'auto'", self.final_lr)
            object.__setattr__(self, "final_lr", float(self.final_lr))
        require_number("SpectrumClip", "gamma", self.gamma, above=0)
        object.__setattr__(self, "gamma", float(self.gamma))

    @classmethod
    def like_sgd(cls, lr: float, *, momentum: float = 0.9, steps: int, adaptive: float = 1.0) -> SpectrumClip:
        """Make the clip that ends as an SGD whose settings you know.

        α* = lr / (1 − momentum), because m is a running mean of the gradient where SGD's momentum is a sum.
        γ = 1 / (adaptive · steps), so that the interval is [α*/2, 2α*] when that share of training is over.

        Args:
            lr: The learning rate that SGD would use.
            momentum: SGD's momentum.
            steps: Steps in the whole of training.
            adaptive: The share of training that stays adaptive. With 1 the interval ends a factor of four wide;
                below 0.005 it closes before the end.

        Example:
            >>> SpectrumClip.like_sgd(lr=0.5, momentum=0.5, steps=10_000, adaptive=0.5)
            SpectrumClip(final_lr=1.0, gamma=0.0002)
        """
        owner = "SpectrumClip.like_sgd"
        require_number(owner, "lr", lr, above=0)
        require_beta(owner, "momentum", momentum)
        return cls(final_lr=lr / (1 - momentum), gamma=_gamma(owner, steps, adaptive))

    @classmethod
    def auto(cls, *, steps: int, adaptive: float = 1.0) -> SpectrumClip:
        """Make the clip that measures α* by itself, and closes at the pace of your training.

        γ = 1 / (adaptive · steps), as in `like_sgd`.

        Args:
            steps: Steps in the whole of training.
            adaptive: The share of training that stays adaptive.

        Example:
            >>> SpectrumClip.auto(steps=10_000)
            SpectrumClip(final_lr='auto', gamma=0.0001)
        """
        return cls(final_lr="auto", gamma=_gamma("SpectrumClip.auto", steps, adaptive))

    def bounds(self, step: Term, target: Term | None = None) -> tuple[Term, Term]:
        """Give (λₗ, λᵤ) at this step around α* = target, by default `final_lr`."""
        if target is None:
            require(self.final_lr != "auto", "SpectrumClip.bounds", "target", "given where α* is measured", None)
            target = float(self.final_lr)
        progress = self.gamma * step
        return target * (1 - 1 / (progress + 1)), at_most(target * (1 + 1 / progress), UNBOUNDED)

    def is_closed(self, step: int) -> bool:
        """Say whether the interval is so narrow that the step is SGD's."""
        width = 1 / (self.gamma * step)
        return width * (2 + width) < CLOSED  # λᵤ/λₗ − 1


def _gamma(owner: str, steps: int, adaptive: float) -> float:
    require_integer(owner, "steps", steps, least=1)
    require_number(owner, "adaptive", adaptive, above=0, most=1)
    return 1 / (adaptive * steps)


class Estimate(NamedTuple):
    """Holds α* / lr as the steps so far have shown it: the running mean of pᵀm̂ / (lr m̂ᵀm̂), and how many steps it is of.

    p = U f(Λ) Uᵀ m is the step before any clip, so what the clip does to a step does not come back as a measurement.
    The ratio is the mean of f over the eigendirections, weighted by how much of m̂ lies in each: the step size of the
    SGD whose step is as long as p in the direction of m̂. It is kept per unit of lr, because f grows with lr: α* then
    follows every schedule.
    """

    mean: float = 0.0
    steps: int = 0

    @classmethod
    def of(cls, owner: str, kept: Any) -> Estimate:
        """Read one as a param group keeps it, a plain pair.

        Raises:
            ValueError: It is none.
        """
        as_left = type(kept) is tuple and [*map(type, kept)] == [float, int]  # by a step: several ask at each one
        if as_left and 0 <= kept[0] < math.inf and 0 <= kept[1] < 2**63:
            return cls(*kept)
        pair = isinstance(kept, (tuple, list)) and len(kept) == 2
        ok = pair and is_number(kept[0]) and is_finite(kept[0]) and kept[0] >= 0
        ok = ok and type(kept[1]) is int and 0 <= kept[1] < 2**63
        require(ok, owner, "estimate", "a pair of a finite number >= 0 and a count of steps", kept)
        return cls(*kept)

    def with_step(self, along: float, square: float, lr: float) -> Estimate:
        """Take in one step: along = pᵀm̂, square = m̂ᵀm̂. A step that says nothing changes nothing."""
        ratio = along / square / lr if square > 0 and lr > 0 else 0.0
        if not 0 < ratio < math.inf:
            return self
        return Estimate(MEMORY * self.mean + (1 - MEMORY) * ratio, self.steps + 1)

    @property
    def ratio(self) -> float | None:
        """Give α* / lr; None if no step has shown it yet."""
        return self.mean / (1 - MEMORY**self.steps) if self.steps else None


class Spectrum(NamedTuple):
    """Holds the numbers of s(λ) = clip(lr / (√(λ / correction) + damping), lower, upper) at one step.

    `lr` already holds the first moment's bias correction, so s acts on the plain m and the clip sees the
    corrected step. Eigenvalues count as no less than `resolution` · λ_max, see `resolution_of`.
    """

    lr: Term
    correction: Term
    damping: Term
    lower: Term = 0.0
    upper: Term = UNBOUNDED
    resolution: float = 0.0


@lru_cache(maxsize=2)
def resolution_of(dtype: torch.dtype) -> float:
    """Give ε/2 of the dtype that V is kept in: an eigenvalue below this times λ_max is noise of either sign.

    Taken at its word, noise would let a direction of which nothing is known move by lr/δ times its share of m. In exact
    arithmetic no direction u can: V = Σ bₖ gₖgₖᵀ and m = Σ aₖ gₖ give |uᵀm| ≤ c √(uᵀVu) with c = √(Σ aₖ²/bₖ), so a step
    is at most c lr long in it. The floor keeps that true, to a small factor, also when a gradient is a thousand times
    the one before.
    """
    return torch.finfo(dtype).eps / 2


class SpectralFunction:
    """Gives f in s(λ) = clip(f(λ̂), λₗ, λᵤ): the step size in an eigendirection, from what is known of it.

    A user's own needs the formula for torch alone, and then runs through `eigh`. With one for lanes the CPU kernel
    compiles it in. Either gets λ̂ ≥ 0, floored and unbiased already; clipping comes after it.

    Example:
        >>> class FourthRoot(SpectralFunction):
        ...     def torch(self, eigenvalues, lr, damping):
        ...         return lr / (eigenvalues**0.25 + damping)
        >>> class BlockAdamFourthRoot(BlockAdam):
        ...     spectral_function = FourthRoot()
        >>> optimizer = BlockAdamFourthRoot(torch.nn.Linear(784, 10).parameters(), lr=1e-3)
    """

    lanes: ClassVar[Callable[[Any, Any, Any], Any] | None] = None
    """It is the same formula in the vocabulary of `kernels.cpu.simd`, a plain function; None where there is none."""

    def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
        """Compute f for eigenvalues [num_blocks, n], lr and damping [num_blocks, 1]."""
        raise NotImplementedError


class InverseRoot(SpectralFunction):
    """Gives f(λ) = α / (√λ + δ), the paper's."""

    def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
        """See `SpectralFunction.torch`."""
        return lr / (eigenvalues.sqrt() + damping)


INVERSE_ROOT = InverseRoot()


def unclipped(eigenvalues: Tensor, spectrum: Spectrum, function: SpectralFunction) -> Tensor:
    """Compute f(λ̂) for eigenvalues [num_blocks, n]; the terms of `spectrum` are columns [num_blocks, 1] or numbers."""
    terms: Any = spectrum
    floor = terms.resolution * eigenvalues.amax(dim=-1, keepdim=True).clamp(min=0)
    return function.torch(torch.maximum(eigenvalues, floor) / terms.correction, terms.lr, terms.damping)


def clipped(f: Tensor, spectrum: Spectrum) -> Tensor:
    """Compute s(λ) = clip(f(λ̂), λₗ, λᵤ) from what is `unclipped`."""
    terms: Any = spectrum
    return f.clamp(terms.lower, terms.upper)
