"""Defines Block-Adam, Block-AdamW and Block-AMSGrad."""

from __future__ import annotations

from typing import Any

from blockadapt.kernels import Kernel
from blockadapt.moments import FirstMoment, SecondMoment, first_moment, running_mean
from blockadapt.optimizers.base import BlockOptimizer
from blockadapt.optimizers.unit import Group
from blockadapt.partition import Grouping
from blockadapt.spectrum import SpectrumClip
from blockadapt.terms import Term
from blockadapt.validation import require, require_beta


class BlockAdam(BlockOptimizer):
    """Runs Adam with a full matrix in each block of coordinates (Yun, Lozano and Yang 2019, Algorithm 1).

        m ← β₁ₜ m + (1 − β₁ₜ) g
        V ← β₂ V + (1 − β₂) g gᵀ                     for each block
        x ← x − α (V̂^{1/2} + δ I)^{-1} m̂            m̂ = m / (1 − β₁ᵗ), V̂ = V / (1 − β₂ᵗ)

    With blocks of one coordinate this is `torch.optim.Adam(eps=δ)`. Every option but `backend` and `process_group`
    may differ between param groups.

    Args:
        params: Parameters, named parameters or param groups, as for any torch optimizer.
        lr: α, a number or a one-element tensor.
        betas: β₁ and β₂.
        eps: δ. The default is the paper's, larger than torch's 1e-8.
        weight_decay: L2 penalty, added to the gradient.
        amsgrad: Never forget a large spectrum: V = U Σ Uᵀ, Σ̂ ← max(Σ̂, Σ) with both sorted, V̂ = U Σ̂ Uᵀ.
        grouping: How coordinates are cut into blocks: `"auto"`, `"input"`, `"output"`, `"filter"`, `"chunk"`,
            `"tensor"`, `"joint"`, `"diagonal"` or an `IndexGroups`.
        block_size: Coordinates a block, where the grouping leaves it open.
        clip: A `SpectrumClip` that turns the method into SGD over time.
        bias_correction: Divide m by 1 − β₁ᵗ and V by 1 − β₂ᵗ. False gives the paper's printed algorithm.
        beta1_decay: λ in β₁ₜ = β₁ λ^{t−1}.
        refresh_every: Keep each block's eigenbasis U for this many steps and follow only diag(Uᵀ V U) in between.
        maximize: Ascend instead of descend.
        on_nonfinite: At a non-finite gradient `"raise"` NonFiniteGradientError, `"skip"` the whole step and count it in
            `skipped_steps`, or `"propagate"` it unchecked.
        capturable: Whether a step may be captured in a CUDA graph: its counter lies with the parameter, and nothing
            waits for the device. It needs `on_nonfinite="propagate"` and `refresh_every=1`, and the clip never closes.
        backend: Who moves the blocks: `"eigh"`, `"numba"`, `"triton"`, your own `Kernel`, or `"auto"`, which takes the
            first of these that can.
        process_group: Processes that have the same parameters and gradients, as under DDP, and share the blocks out:
            each keeps the state of its own and moves them.

    Example:
        >>> model = torch.nn.Linear(784, 10)
        >>> optimizer = BlockAdam(model.parameters(), lr=1e-3)
        >>> model(torch.randn(32, 784)).square().mean().backward()
        >>> optimizer.step()
    """

    averages_gradient = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        grouping: Grouping = "auto",
        block_size: int = 10,
        clip: SpectrumClip | None = None,
        bias_correction: bool = True,
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
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
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
        super().__init__(params, defaults, backend, process_group)

    def _require_options(self, group: Group) -> None:
        owner, betas = type(self).__name__, group["betas"]
        pair = isinstance(betas, (tuple, list)) and len(betas) == 2
        require(pair, owner, "betas", "a pair of numbers", betas)
        require_beta(owner, "betas[0]", betas[0])
        require_beta(owner, "betas[1]", betas[1])

    def _first_moment(self, group: Group, step: Term) -> FirstMoment:
        return first_moment(group["betas"][0], group["beta1_decay"], step, group["bias_correction"])

    def _second_moment(self, group: Group, step: Term) -> SecondMoment:
        return running_mean(group["betas"][1], step, group["bias_correction"])


class BlockAdamW(BlockAdam):
    """Runs `BlockAdam` with decoupled weight decay: x ← (1 − α · weight_decay) x before the step.

    With blocks of one coordinate this is `torch.optim.AdamW(eps=δ)`. The options are BlockAdam's.

    Example:
        >>> optimizer = BlockAdamW(torch.nn.Linear(784, 10).parameters(), lr=1e-3, weight_decay=1e-2)
    """

    decouples_weight_decay = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        grouping: Grouping = "auto",
        block_size: int = 10,
        clip: SpectrumClip | None = None,
        bias_correction: bool = True,
        beta1_decay: float = 1.0,
        refresh_every: int = 1,
        maximize: bool = False,
        on_nonfinite: str = "raise",
        capturable: bool = False,
        backend: str | Kernel = "auto",
        process_group: Any = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            grouping=grouping,
            block_size=block_size,
            clip=clip,
            bias_correction=bias_correction,
            beta1_decay=beta1_decay,
            refresh_every=refresh_every,
            maximize=maximize,
            on_nonfinite=on_nonfinite,
            capturable=capturable,
            backend=backend,
            process_group=process_group,
        )
