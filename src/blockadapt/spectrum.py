"""Stage 3: the effective spectrum, and its bounds over time.

With V̂ = U Λ Uᵀ, a step is x ← x − U diag(s) Uᵀ m, where

    s = clip(α / (√Λ + δ), λₗ, λᵤ)
    λₗ = α* (1 − 1/(γt + 1))        λᵤ = α* (1 + 1/(γt))        α* = final_lr · lr / base_lr
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from blockadapt.terms import Term, at_most
from blockadapt.validation import require_beta, require_integer, require_number

CLOSED = 1e-2
"""The interval counts as closed once λᵤ/λₗ − 1 is below this.

λᵤ/λₗ = (1 + 1/(γt))², so that is at γt > 200.5. All of the spectrum is then within 1% of α*: replacing it by α* moves
a step by less than 1%, far less than minibatch noise does. The paper's CIFAR run (γt = 235 at its end) closes at 85%.
"""


UNBOUNDED = torch.finfo(torch.float32).max
"""λᵤ without clipping. Finite, so that a zero m stays zero under the largest s."""


@dataclass(frozen=True)
class SpectrumClip:
    """Clip the effective spectrum into an interval that closes on a single step size, that of SGD.

    Args:
        final_lr: α*, the step size at the end, as it is for SGD on the averaged momentum m. It follows the lr
            schedule: α* = final_lr · lr / base_lr. Heavy-ball SGD with learning rate η has final_lr = η / (1 − β₁).
        gamma: γ, how fast the interval closes. After t steps its ends are within a factor 1 + 1/(γt) of α*.

    Example:
        >>> SpectrumClip(final_lr=0.1, gamma=1e-3).bounds(step=1000)
        (0.05, 0.2)
    """

    final_lr: float = 0.1
    gamma: float = 1e-3

    def __post_init__(self) -> None:
        require_number("SpectrumClip", "final_lr", self.final_lr, above=0)
        require_number("SpectrumClip", "gamma", self.gamma, above=0)

    @classmethod
    def like_sgd(cls, lr: float, *, momentum: float = 0.9, steps: int, adaptive: float = 1.0) -> SpectrumClip:
        """The clip that ends as an SGD whose settings you know.

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
        require_integer(owner, "steps", steps, least=1)
        require_number(owner, "adaptive", adaptive, above=0, most=1)
        return cls(final_lr=lr / (1 - momentum), gamma=1 / (adaptive * steps))

    def bounds(self, step: Term, schedule: Term = 1.0) -> tuple[Term, Term]:
        """(λₗ, λᵤ) at this step, with α* = final_lr · schedule."""
        progress = self.gamma * step
        target = self.final_lr * schedule
        return target * (1 - 1 / (progress + 1)), at_most(target * (1 + 1 / progress), UNBOUNDED)

    def is_closed(self, step: int) -> bool:
        """Whether the interval is so narrow that the step is SGD's."""
        width = 1 / (self.gamma * step)
        return width * (2 + width) < CLOSED  # λᵤ/λₗ − 1


class Spectrum(NamedTuple):
    """The effective spectrum of one step: s(λ) = clip(lr / (√(λ / correction) + damping), lower, upper).

    `lr` already holds the first moment's bias correction, so s acts on the plain m and the clip sees the
    corrected step. Eigenvalues count as no less than `resolution` · λ_max, see `resolution_of`.
    """

    lr: Term
    correction: Term
    damping: Term
    lower: Term = 0.0
    upper: Term = UNBOUNDED
    resolution: float = 0.0


def resolution_of(dtype: torch.dtype) -> float:
    """ε/2 of the dtype that V is kept in, and so the share of λ_max below which an eigenvalue is noise of either sign.

    Taken at its word, noise would let a direction of which nothing is known move by lr/δ times its share of m. In exact
    arithmetic no direction u can: V = Σ bₖ gₖgₖᵀ and m = Σ aₖ gₖ give |uᵀm| ≤ c √(uᵀVu) with c = √(Σ aₖ²/bₖ), so a step
    is at most c lr long in it. The floor keeps that true, to a small factor, also when a gradient is a thousand times
    the one before.
    """
    return torch.finfo(dtype).eps / 2


class SpectralFunction:
    """f in s(λ) = clip(f(λ̂), λₗ, λᵤ): the step size in an eigendirection, from what is known of it.

    A user's own needs the torch form alone, and then runs through `eigh`. With a form for lanes the CPU kernel
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
    """The same formula in the vocabulary of `kernels.cpu.simd`, a plain function; None where there is none."""

    def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
        """f for eigenvalues [num_blocks, n], lr and damping [num_blocks, 1]."""
        raise NotImplementedError


class InverseRoot(SpectralFunction):
    """f(λ) = α / (√λ + δ), the paper's."""

    def torch(self, eigenvalues: Tensor, lr: Tensor, damping: Tensor) -> Tensor:
        """See `SpectralFunction.torch`."""
        return lr / (eigenvalues.sqrt() + damping)


INVERSE_ROOT = InverseRoot()


def effective(eigenvalues: Tensor, spectrum: Spectrum, function: SpectralFunction = INVERSE_ROOT) -> Tensor:
    """s(λ) for eigenvalues [num_blocks, n]; the terms of `spectrum` are columns [num_blocks, 1] or numbers."""
    terms: Any = spectrum
    floor = terms.resolution * eigenvalues.amax(dim=-1, keepdim=True).clamp(min=0)
    s = function.torch(torch.maximum(eigenvalues, floor) / terms.correction, terms.lr, terms.damping)
    return s.clamp(terms.lower, terms.upper)
