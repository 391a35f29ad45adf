"""Defines Block-AdaGrad and Block-AdaFom: the average of all g gᵀ, and a step that falls as 1/√t."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels import Kernel
from blockadapt.moments import FirstMoment, SecondMoment, average, first_moment
from blockadapt.optimizers.base import BlockOptimizer
from blockadapt.optimizers.unit import Group
from blockadapt.partition import Grouping
from blockadapt.spectrum import SpectrumClip
from blockadapt.terms import Term, root
from blockadapt.validation import require_beta


class BlockAdagrad(BlockOptimizer):
    """Runs AdaGrad with a full matrix in each block of coordinates.

        V ← (1/t) Σ_{τ≤t} g gᵀ                       for each block
        x ← x − (α/√t) (V^{1/2} + δ I)^{-1} g

    This is AdaGrad on the sum of g gᵀ with δ√t for δ. With blocks of one coordinate and δ → 0 it is
    `torch.optim.Adagrad`. Arguments not listed are BlockAdam's.

    Args:
        params: Parameters, named parameters or param groups.
        lr: α.
        eps: δ.
        weight_decay: L2 penalty, added to the gradient.
        bias_correction: Without effect: an average is unbiased. It is there so that the family shares its options.

    Example:
        >>> optimizer = BlockAdagrad(torch.nn.Linear(784, 10).parameters(), lr=1e-2)
    """

    averages_gradient = False

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        *,
        grouping: Grouping = "auto",
        block_size: int = 10,
        clip: SpectrumClip | None = None,
        bias_correction: bool = False,
        refresh_every: int = 1,
        maximize: bool = False,
        on_nonfinite: str = "raise",
        capturable: bool = False,
        backend: str | Kernel = "auto",
        process_group: Any = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "grouping": grouping,
            "block_size": block_size,
            "clip": clip,
            "bias_correction": bias_correction,
            "refresh_every": refresh_every,
            "maximize": maximize,
            "on_nonfinite": on_nonfinite,
            "capturable": capturable,
        }
        super().__init__(params, defaults, backend, process_group)

    def _second_moment(self, group: Group, step: Term) -> SecondMoment:
        return average(step)

    def _step_size(self, lr: Term, step: Term) -> Term:
        return lr / root(step)


class BlockAdaFom(BlockAdagrad):
    """Runs AdaFom, which is AdaGrad with a first moment.

        m ← β₁ₜ m + (1 − β₁ₜ) g
        V ← (1/t) Σ_{τ≤t} g gᵀ                       for each block
        x ← x − (α/√t) (V^{1/2} + δ I)^{-1} m

    Arguments not listed are BlockAdam's.

    `OneCycleLR` and `CyclicLR` may cycle momentum: they set `momentum` in the param groups, which is None otherwise and
    takes the place of `beta1`.

    Args:
        params: Parameters, named parameters or param groups.
        lr: α.
        beta1: β₁.
        eps: δ.
        weight_decay: L2 penalty, added to the gradient.
        bias_correction: Divide m by 1 − β₁ᵗ.
        beta1_decay: λ in β₁ₜ = β₁ λ^{t−1}.

    Example:
        >>> optimizer = BlockAdaFom(torch.nn.Linear(784, 10).parameters(), lr=1e-2)
    """

    averages_gradient = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        beta1: float = 0.9,
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        *,
        grouping: Grouping = "auto",
        block_size: int = 10,
        clip: SpectrumClip | None = None,
        bias_correction: bool = False,
        beta1_decay: float = 1.0,
        refresh_every: int = 1,
        maximize: bool = False,
        on_nonfinite: str = "raise",
        capturable: bool = False,
        backend: str | Kernel = "auto",
        process_group: Any = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "momentum": None,
            "eps": eps,
            "weight_decay": weight_decay,
            "grouping": grouping,
            "block_size": block_size,
            "clip": clip,
            "bias_correction": bias_correction,
            "beta1_decay": beta1_decay,
            "refresh_every": refresh_every,
            "maximize": maximize,
            "on_nonfinite": on_nonfinite,
            "capturable": capturable,
        }
        BlockOptimizer.__init__(self, params, defaults, backend, process_group)

    def _require_options(self, group: Group) -> None:
        require_beta(type(self).__name__, "beta1", group["beta1"])

    def _first_moment(self, group: Group, step: Term) -> FirstMoment:
        beta1 = group["beta1"] if group["momentum"] is None else group["momentum"]
        return first_moment(beta1, group["beta1_decay"], step, group["bias_correction"])
