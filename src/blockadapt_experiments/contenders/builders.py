"""Says how each contender is made, from a model, a learning rate, its settings and the number of steps to come.

AdaBound, AMSBound, Yogi, SOAP and Shampoo are pytorch_optimizer's, GGT is in `ggt.py`, Muon's two parts are put
together in `muon.py`, the rest is torch's or ours: nothing is rewritten here. The docstring of each builder states the
rule that its optimizer follows and what of it could not be set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from blockadapt import (
    BlockAdaFom,
    BlockAdagrad,
    BlockAdam,
    BlockAdamW,
    BlockRMSprop,
    IndexGroups,
    SpectrumClip,
    param_groups,
)
from blockadapt_experiments.contenders.ggt import GGT
from blockadapt_experiments.contenders.muon import Muon, embeddings_of

GGT_OPTIONS = ("beta2", "window", "complement", "scope", "momentum", "columns", "relative_cutoff", "absolute_cutoff")
"""Options of GGT that have settings of their own, `ggt_…`."""

RANDOM = "random"
"""The grouping whose blocks are `block_size` coordinates of one parameter, drawn at random."""


Builder = Callable[[nn.Module, float, Any, int], Optimizer]
"""Makes an optimizer for a model from lr, settings and the number of steps that it will take. The settings are a
namespace with what the contender names, and nothing else."""


# torch's -----------------------------------------------------------------------------------------------------------


def sgd(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """b ← μ b + g; x ← x − α b (the first b is g), or g + μ b for b under Nesterov."""
    return torch.optim.SGD(
        model.parameters(),
        lr=lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
    )


def _adam_options(lr: float, settings: Any) -> dict[str, Any]:
    betas = (settings.beta1, settings.beta2)
    return {"lr": lr, "betas": betas, "eps": settings.eps, "weight_decay": settings.weight_decay}


def adam(amsgrad: bool) -> Builder:
    """m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; x ← x − α m̂ / (√v̂ + ε) with m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ).

    Its own ε = 1e-8 is torch's. AMSGrad has the running maximum of v for v.
    """

    def build(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
        return torch.optim.Adam(model.parameters(), amsgrad=amsgrad, **_adam_options(lr, settings))

    return build


def adamw(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """x ← (1 − α λ) x, then Adam without a penalty; λ is `decoupled_weight_decay`."""
    betas = (settings.beta1, settings.beta2)
    decay = settings.decoupled_weight_decay
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, eps=settings.eps, weight_decay=decay)


def muon(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """Make `Muon`."""
    return Muon(model, lr, (settings.beta1, settings.beta2), settings.decoupled_weight_decay)


def rmsprop(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """v ← β₂ v + (1 − β₂) g²; x ← x − α g / (√v + ε)."""
    return torch.optim.RMSprop(
        model.parameters(), lr=lr, alpha=settings.rms_decay, eps=settings.eps, weight_decay=settings.weight_decay
    )


def adagrad(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """v ← v + g²; x ← x − α g / (√v + ε). The averaged form of the block methods has ε√t for ε."""
    return torch.optim.Adagrad(model.parameters(), lr=lr, eps=settings.eps, weight_decay=settings.weight_decay)


def adadelta(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """v ← ρ v + (1 − ρ) g²; d = g √(u + ε) / √(v + ε); u ← ρ u + (1 − ρ) d²; x ← x − α d.

    Its own ρ = 0.9 and ε = 1e-6: this ε is inside the roots and sets the size of the first steps, so it is no damping.
    """
    return torch.optim.Adadelta(
        model.parameters(), lr=lr, rho=settings.rho, eps=settings.eps, weight_decay=settings.weight_decay
    )


def nadam(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """Adam with bias correction, always, and m looked ahead: μₜ = β₁ (1 − 0.5 · 0.96^{0.004 t}).

    x ← x − α [μₜ₊₁ m / (1 − Π_{τ≤t+1} μτ) + (1 − μₜ) g / (1 − Π_{τ≤t} μτ)] / (√(v / (1 − β₂ᵗ)) + ε).

    torch keeps Π μ in float32, but loads it as the parameters are; in float64 a resumed run would then go another way.
    """
    optimizer = torch.optim.NAdam(model.parameters(), **_adam_options(lr, settings))
    optimizer.register_load_state_dict_post_hook(_narrow_mu_product)
    return optimizer


def _narrow_mu_product(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["mu_product"] = state["mu_product"].to(torch.get_default_dtype())


# pytorch_optimizer's -----------------------------------------------------------------------------------------------


def _theirs(name: str, params: Any, **options: Any) -> Optimizer:
    """Make an optimizer of pytorch_optimizer. With weight decay it adds that to `p.grad` in place.

    Raises:
        TypeError: Its constructor does not name an option. It would take any and leave it unused.
    """
    import pytorch_optimizer  # here, because it takes most of a second

    optimizer_class = getattr(pytorch_optimizer, name)
    unknown = sorted(options.keys() - inspect.signature(optimizer_class).parameters.keys())
    if unknown:
        raise TypeError(f"{name}: the installed pytorch_optimizer has no {', '.join(f'`{key}`' for key in unknown)}.")
    optimizer: Optimizer = optimizer_class(params, **options)
    return optimizer


def adabound(ams: bool) -> Builder:
    """η = clip(α √(1 − β₂ᵗ) / (1 − β₁ᵗ) / (√v + ε), α*(1 − 1/(γt + 1)), α*(1 + 1/(γt))); x ← x − η m.

    α* follows the schedule, final_lr · lr/lr₀. lr₀ is what it was made with and is not in its state: to resume, make it
    with the first learning rate again. Bias correction is always on. √v is √(v + 1e-15). AMSBound has the running
    maximum of v.
    """

    def build(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
        return _theirs(
            "AdaBound",
            model.parameters(),
            **_adam_options(lr, settings),
            final_lr=settings.final_lr,
            gamma=settings.clip_progress / steps,
            weight_decouple=False,
            ams_bound=ams,
        )

    return build


def yogi(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """v ← v + (1 − β₂) sign(g² − v) g²; x ← x − α m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε).

    Its own ε = 1e-3 and v₀ = 1e-6; this version starts m from 1e-6 too. Bias correction is always on.
    """
    options = {**_adam_options(lr, settings), "initial_accumulator": 1e-6, "weight_decouple": False}
    return _theirs("Yogi", model.parameters(), **options)


def soap(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """Adam, with bias correction, in the eigenbases of running means of G Gᵀ and Gᵀ G; plain Adam for vectors.

    Its own β = (0.95, 0.95), ε = 1e-8 and a new basis every 10 steps; ε is added before v is corrected. The first
    gradient only sets the basis and moves nothing. Weight decay is decoupled, λ is `decoupled_weight_decay`. Embeddings
    are left diagonal, and so is every axis longer than `soap_largest_axis`.
    """
    embeddings = embeddings_of(model)
    others, diagonal = (
        [parameter for parameter in model.parameters() if (parameter in embeddings) == inside]
        for inside in (False, True)
    )
    groups = [
        {"params": params, "max_precondition_dim": largest}
        for params, largest in ((others, settings.soap_largest_axis), (diagonal, 0))
        if params
    ]
    options = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps, "precondition_frequency": 10}
    return _theirs("SOAP", groups, lr=lr, weight_decay=settings.decoupled_weight_decay, **options)


def shampoo(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """L ← L + G Gᵀ; R ← R + Gᵀ G; X ← X − α L^{−1/4} G R^{−1/4}, from L = R = 1e-6 I; a tensor of k axes has −1/(2k).

    The algorithm as published, with roots at every step: on LeNet-300-100 that takes as long as 60 times forward and
    backward. No momentum, because this version's mixes preconditioned gradients into the next plain one. The same
    package's ScalableShampoo is no substitute: by default its first 1,000 steps are SGD's, and `torch.load` refuses its
    state under `weights_only=True`.
    """
    options = {"momentum": 0.0, "weight_decouple": False, "preconditioning_compute_steps": 1, "matrix_eps": 1e-6}
    return _theirs("Shampoo", model.parameters(), lr=lr, weight_decay=settings.weight_decay, **options)


# ours --------------------------------------------------------------------------------------------------------------


def ggt(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """Make `GGT`."""
    return GGT(
        model.named_parameters(),
        lr=lr,
        beta1=settings.beta1,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        **{name: getattr(settings, f"ggt_{name}") for name in GGT_OPTIONS},
    )


def _block_options(model: nn.Module, lr: float, settings: Any, decay: str = "weight_decay") -> dict[str, Any]:
    """Give what all block methods get; `decay` is the setting that their weight decay has."""
    return {
        "params": _block_groups(model, settings),
        "lr": lr,
        "eps": settings.eps,
        "weight_decay": getattr(settings, decay),
        "grouping": "auto" if settings.grouping == RANDOM else settings.grouping,
        "block_size": settings.block_size,
        "refresh_every": settings.refresh_every,
    }


def _block_groups(model: nn.Module, settings: Any) -> Any:
    if settings.grouping == "auto":
        return param_groups(model, embeddings=settings.embeddings)
    if settings.grouping != RANDOM:
        return model.named_parameters()
    drawn = torch.Generator().manual_seed(0)  # one draw for all seeds, which then differ in nothing but their seed
    orders = ((each, torch.randperm(each[1].numel(), generator=drawn)) for each in model.named_parameters())
    return [
        {"params": [each], "grouping": IndexGroups(part.tolist() for part in order.split(settings.block_size))}
        for each, order in orders
    ]


Clip = Callable[[Any, int], SpectrumClip | None]


def block_adam(amsgrad: bool = False, clip: Clip = lambda settings, steps: None) -> Builder:
    """Make `BlockAdam`."""

    def build(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
        return BlockAdam(
            **_block_options(model, lr, settings),
            **_block_adam_options(settings),
            clip=clip(settings, steps),
            amsgrad=amsgrad,
        )

    return build


def to_final_lr(settings: Any, steps: int) -> SpectrumClip:
    """Make the clip that closes on the settings' `final_lr`."""
    return SpectrumClip(settings.final_lr, settings.clip_progress / steps)


def to_what_it_measures(settings: Any, steps: int) -> SpectrumClip:
    """Make the clip that closes on the step size that it measures."""
    return SpectrumClip("auto", settings.auto_clip_progress / steps)


def _block_adam_options(settings: Any) -> dict[str, Any]:
    return {"betas": (settings.beta1, settings.beta2), "bias_correction": settings.bias_correction}


def block_adamw(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """Make `BlockAdamW`; its λ is `decoupled_weight_decay`."""
    return BlockAdamW(**_block_options(model, lr, settings, "decoupled_weight_decay"), **_block_adam_options(settings))


def paper_adam(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; x ← x − α m / (√v + δ), as the paper prints it, with δ = 1e-4.

    `BlockAdam` in blocks of one coordinate: torch's Adam cannot leave out the bias correction.
    """
    return BlockAdam(
        model.named_parameters(),
        lr=lr,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        grouping="diagonal",
        **_block_adam_options(settings),
    )


def block_rmsprop(clipped: bool) -> Builder:
    """Make `BlockRMSprop`, without bias correction like torch's RMSprop.

    It moves by the gradient itself, not by an average of it, so it ends on (1 − β₁) α*, SGD's own learning rate.
    """

    def build(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
        clip = None
        if clipped:
            clip = SpectrumClip((1 - settings.beta1) * settings.final_lr, settings.clip_progress / steps)
        return BlockRMSprop(**_block_options(model, lr, settings), alpha=settings.rms_decay, clip=clip)

    return build


def block_adagrad(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """Make `BlockAdagrad`, the averaged form: it has δ√t for δ."""
    return BlockAdagrad(**_block_options(model, lr, settings))


def block_adafom(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """Make `BlockAdaFom`, without bias correction as published."""
    return BlockAdaFom(**_block_options(model, lr, settings), beta1=settings.beta1)


def full_adagrad(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """Make `BlockAdagrad` with one block over all parameters, which may be at most 4,096."""
    options = {name: getattr(settings, name) for name in ("eps", "weight_decay", "refresh_every")}
    return BlockAdagrad(model.named_parameters(), lr=lr, grouping="joint", **options)
