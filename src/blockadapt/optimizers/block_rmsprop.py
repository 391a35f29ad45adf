"""Defines Block-RMSprop."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels import Kernel
from blockadapt.moments import FirstMoment, SecondMoment, first_moment, running_mean
from blockadapt.optimizers.base import BlockOptimizer
from blockadapt.optimizers.unit import Group
from blockadapt.partition import Grouping
from blockadapt.spectrum import SpectrumClip
from blockadapt.terms import Term
from blockadapt.validation import require_beta


class BlockRMSprop(BlockOptimizer):
    """Runs RMSprop with a full matrix in each block of coordinates.

        V ← β₂ V + (1 − β₂) g gᵀ                     for each block, β₂ = alpha
        x ← x − α (V^{1/2} + δ I)^{-1} g             α = lr

    With blocks of one coordinate this is `torch.optim.RMSprop(eps=δ)`. Arguments not listed are BlockAdam's.

    `OneCycleLR` and `CyclicLR` may cycle momentum, as they do for torch's RMSprop. They set `momentum` in the param
    groups, which is None otherwise. It is β₁ then: the step takes m ← β₁ m + (1 − β₁) g in place of g.

    Args:
        params: Parameters, named parameters or param groups.
        lr: α.
        alpha: β₂, by the name that torch gives it.
        eps: δ.
        weight_decay: L2 penalty, added to the gradient.
        bias_correction: Divide V by 1 − β₂ᵗ.

    Example:
        >>> optimizer = BlockRMSprop(torch.nn.Linear(784, 10).parameters(), lr=1e-2)
    """

    averages_gradient = False

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        alpha: float = 0.99,
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
            "alpha": alpha,
            "momentum": None,
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

    def _require_options(self, group: Group) -> None:
        require_beta(type(self).__name__, "alpha", group["alpha"])

    def _first_moment(self, group: Group, step: Term) -> FirstMoment:
        beta1: float | None = group["momentum"]
        return FirstMoment(0.0, 1.0) if beta1 is None else first_moment(beta1, 1.0, step, group["bias_correction"])

    def _second_moment(self, group: Group, step: Term) -> SecondMoment:
        return running_mean(group["alpha"], step, group["bias_correction"])
