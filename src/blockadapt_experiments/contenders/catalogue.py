"""The optimizers that experiments compare, by name, each made from the same settings.

AdaBound, AMSBound, Yogi, SOAP and Shampoo are pytorch_optimizer's, GGT is in `ggt.py`, Muon's two parts are put
together in `muon.py`, the rest is torch's or ours: nothing is rewritten here. The docstring of each builder states the
rule that its optimizer follows and what of it could not be set; `tests/laboratory/contenders/test_catalogue.py` holds
every one to its rule.

`adam`, `adamw` and `amsgrad` are torch's with torch's ε and bias correction, as people use them. `paper-adam` is Adam
as the paper prints it: `block-adam` with blocks of one coordinate, so that only the shape of V differs.

A setting means the same wherever a method has it: `eps` is added to √v, `weight_decay` times x to the gradient. The
builders name the exceptions. Methods whose decay is decoupled, x ← (1 − α λ) x, have `decoupled_weight_decay` instead.
A contender names the settings that it shares with the others and those that have a default of its own. Nothing else
reaches its builder, so a setting that it does not have can be refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, get_type_hints

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
from blockadapt.errors import NonFiniteGradientError
from blockadapt.partition import NAMED_GROUPINGS
from blockadapt.validation import require, require_beta, require_bool, require_choice, require_integer, require_number
from blockadapt_experiments.contenders.ggt import COLUMNS, COMPLEMENTS, GGT, MOMENTA, SCOPES
from blockadapt_experiments.contenders.muon import Muon, embeddings_of
from blockadapt_experiments.names import nearest

LOST = (NonFiniteGradientError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
"""What an optimizer raises where a run has diverged: ours and GGT at the gradient, Shampoo and SOAP at its factors."""

Family = Literal["adam", "rmsprop", "adagrad", "sgd", "other"]
Kind = Literal["scalar", "diagonal", "block", "full", "low-rank", "kronecker", "orthogonal", "own"]

GGT_OPTIONS = ("beta2", "window", "complement", "scope", "momentum", "columns", "relative_cutoff", "absolute_cutoff")
"""Options of GGT that have settings of their own, `ggt_…`."""

RANDOM = "random"
"""The grouping whose blocks are `block_size` coordinates of one parameter, drawn at random."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What optimizers are made with, besides their learning rate.

    Attributes:
        eps: δ of the block methods and ε of the paper's diagonal ones: what differs is the shape of V. `adam`, `adamw`,
            `amsgrad` and `soap` have their own 1e-8, `adadelta` and `yogi` their authors'.
        beta1: Decay of m in the Adam family and in GGT.
        beta2: Decay of V in the Adam family.
        rms_decay: Decay of V in the RMSprop family.
        bias_correction: Of `paper-adam` and of the block forms of Adam alike; the paper prints none.
        block_size: Coordinates in a block, where the grouping leaves it open.
        grouping: How the block methods cut parameters; "auto" gives each kind of layer its own rule. "random" draws the
            coordinates of each block from all of a parameter: what is left when it does not matter who shares one.
        momentum: Of SGD.
        nesterov: Of SGD.
        weight_decay: L2 penalty.
        decoupled_weight_decay: λ of `adamw`, `block-adamw`, `muon` and `soap`, which shrink x by 1 − α λ at each step.
        final_lr: α*, where the clipped spectrum, AdaBound and AMSBound end: a step size on the averaged momentum. SGD
            with learning rate η and momentum 0.9 has 10η.
        clip_progress: γT, how far the interval has closed at the end, for any number of steps T. The paper's CIFAR runs
            have γ = 1e-3 and 234,600 steps.
        auto_clip_progress: γT of the clip that measures α*. It knows nothing at first, so it is to close more slowly.
        refresh_every: Steps that the block methods keep an eigenbasis for.
        soap_largest_axis: The longest axis of a tensor that SOAP has a basis for; along longer ones it stays diagonal.
        ggt_window: r of GGT, the gradients it keeps.
        ggt_beta2: Decay of their weight with age.
        ggt_complement: What GGT does outside their span.
        ggt_scope: Whether GGT sees the whole model or each tensor by itself.
        ggt_momentum: Whether the m of GGT is an average or a sum.
        ggt_columns: What GGT keeps.
        ggt_relative_cutoff: Where eigenvalues count as zero in GGT, as a share of the largest.
        ggt_absolute_cutoff: The same as a number.
    """

    eps: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    rms_decay: float = 0.99
    bias_correction: bool = False
    block_size: int = 10
    grouping: str = "auto"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.01
    final_lr: float = 0.1
    clip_progress: float = 235.0
    auto_clip_progress: float = 1.0
    refresh_every: int = 1
    soap_largest_axis: int = 10_000
    ggt_window: int = 50
    ggt_beta2: float = 1.0
    ggt_complement: str = "drop"
    ggt_scope: str = "model"
    ggt_momentum: str = "average"
    ggt_columns: str = "gradient"
    ggt_relative_cutoff: float = 1e-10
    ggt_absolute_cutoff: float = 0.0

    def __post_init__(self) -> None:
        owner = "optimizer"
        for name in ("eps", "final_lr", "clip_progress", "auto_clip_progress"):
            require_number(owner, name, getattr(self, name), above=0)
        for name in ("beta1", "beta2", "rms_decay", "momentum"):
            require_beta(owner, name, getattr(self, name))
        for name in ("weight_decay", "decoupled_weight_decay"):
            require_number(owner, name, getattr(self, name), least=0)
        for name in ("bias_correction", "nesterov"):
            require_bool(owner, name, getattr(self, name))
        for name in ("block_size", "refresh_every", "soap_largest_axis", "ggt_window"):
            require_integer(owner, name, getattr(self, name), least=1)
        require_number(owner, "ggt_beta2", self.ggt_beta2, above=0, most=1)
        require_number(owner, "ggt_relative_cutoff", self.ggt_relative_cutoff, least=0, below=1)
        require_number(owner, "ggt_absolute_cutoff", self.ggt_absolute_cutoff, least=0)
        require(not self.nesterov or self.momentum > 0, owner, "momentum", "> 0 where `nesterov` is set", self.momentum)
        require_choice(owner, "grouping", self.grouping, (*NAMED_GROUPINGS, RANDOM))
        require_choice(owner, "ggt_complement", self.ggt_complement, COMPLEMENTS)
        require_choice(owner, "ggt_scope", self.ggt_scope, SCOPES)
        require_choice(owner, "ggt_momentum", self.ggt_momentum, MOMENTA)
        require_choice(owner, "ggt_columns", self.ggt_columns, COLUMNS)


TORCH_EPS = 1e-8
"""The ε that torch's Adam has unless told otherwise."""

Builder = Callable[[nn.Module, float, Any, int], Optimizer]
"""Makes an optimizer for a model from lr, settings and the number of steps that it will take. The settings are a
namespace with what the contender names, and nothing else."""


@dataclass(frozen=True)
class Contender:
    """An optimizer that experiments can name.

    Attributes:
        name: As in settings and on the command line.
        label: For people.
        family: Whose moments it keeps.
        kind: What it multiplies the step with: a number, a diagonal, blocks, a full matrix, one of low rank, a
            Kronecker product, what makes the step an orthogonal matrix, or something of its own.
        clipped: Whether its spectrum is clipped to that of SGD.
        lr: The learning rate to start from where none was tuned.
        builder: Makes it.
        shared: Settings that it has from the experiment's `optimizer.*`, unless an arm says otherwise.
        own: Settings that have a default of its own, which only an arm changes.
    """

    name: str
    label: str
    family: Family
    kind: Kind
    clipped: bool
    lr: float
    builder: Builder
    shared: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def types(self) -> dict[str, Any]:
        """The type of each of its settings, by name."""
        known = get_type_hints(OptimizerSettings)
        return {name: known.get(name, type(self.own.get(name))) for name in (*self.shared, *self.own)}


def make_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    settings: OptimizerSettings,
    steps: int,
    changes: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Make the contender of this name for this model.

    Args:
        name: One of `CONTENDERS`.
        model: Its parameters are optimized.
        lr: The learning rate; a schedule may move it later, and the ends of clipped spectra follow.
        settings: What the contenders of an experiment share.
        steps: How many steps the run will take in all. The speed of clipping depends on it.
        changes: The settings that an arm has of its own.

    Raises:
        ValueError: There is no such contender, or it has no such setting; the sentence names the nearest.
    """
    contender = find_contender("make_optimizer", name)
    require_number("make_optimizer", "lr", lr, above=0)
    require_integer("make_optimizer", "steps", steps, least=1)
    shared = {key: getattr(settings, key) for key in contender.shared}
    chosen = SimpleNamespace(**{**shared, **contender.own, **(changes or {})})
    return contender.builder(model, lr, chosen, steps)


def arm_label(name: str, table: Mapping[str, Any]) -> str:
    """Name an arm for people, from its table in the settings.

    >>> arm_label("b25", {"optimizer": "block-adam", "block_size": 25, "lr": 0.001})
    'b25 (Block-Adam, block_size 25)'
    >>> arm_label("b25", {"optimizer": "block-adam", "block_size": 25, "label": "Blocks of 25"})
    'Blocks of 25'
    """
    if table.get("label"):
        return str(table["label"])
    optimizer = str(table.get("optimizer"))
    words = [CONTENDERS[optimizer].label if optimizer in CONTENDERS else optimizer]
    words += [f"{key} {value}" for key, value in table.items() if key not in ("optimizer", "lr", "label")]
    return f"{name} ({', '.join(words)})"


def find_contender(owner: str, name: str) -> Contender:
    """Look a contender up by its name.

    Raises:
        ValueError: There is none; the sentence names the nearest.
    """
    if name not in CONTENDERS:
        raise ValueError(f"{owner}: there is no optimizer {name!r}; the nearest is {nearest(name, CONTENDERS)!r}.")
    return CONTENDERS[name]


# torch's -----------------------------------------------------------------------------------------------------------


def _sgd(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
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


def _adam(amsgrad: bool) -> Builder:
    """m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; x ← x − α m̂ / (√v̂ + ε) with m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ).

    Its own ε = 1e-8 is torch's. AMSGrad has the running maximum of v for v.
    """

    def build(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
        return torch.optim.Adam(model.parameters(), amsgrad=amsgrad, **_adam_options(lr, settings))

    return build


def _adamw(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """x ← (1 − α λ) x, then Adam without a penalty; λ is `decoupled_weight_decay`."""
    betas = (settings.beta1, settings.beta2)
    decay = settings.decoupled_weight_decay
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, eps=settings.eps, weight_decay=decay)


def _muon(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """`Muon`."""
    return Muon(model, lr, (settings.beta1, settings.beta2), settings.decoupled_weight_decay)


def _rmsprop(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """v ← β₂ v + (1 − β₂) g²; x ← x − α g / (√v + ε)."""
    return torch.optim.RMSprop(
        model.parameters(), lr=lr, alpha=settings.rms_decay, eps=settings.eps, weight_decay=settings.weight_decay
    )


def _adagrad(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """v ← v + g²; x ← x − α g / (√v + ε). The averaged form of the block methods has ε√t for ε."""
    return torch.optim.Adagrad(model.parameters(), lr=lr, eps=settings.eps, weight_decay=settings.weight_decay)


def _adadelta(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """v ← ρ v + (1 − ρ) g²; d = g √(u + ε) / √(v + ε); u ← ρ u + (1 − ρ) d²; x ← x − α d.

    Its own ρ = 0.9 and ε = 1e-6: this ε is inside the roots and sets the size of the first steps, so it is no damping.
    """
    return torch.optim.Adadelta(
        model.parameters(), lr=lr, rho=settings.rho, eps=settings.eps, weight_decay=settings.weight_decay
    )


def _nadam(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
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


def _adabound(ams: bool) -> Builder:
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


def _yogi(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """v ← v + (1 − β₂) sign(g² − v) g²; x ← x − α m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε).

    Its own ε = 1e-3 and v₀ = 1e-6; this version starts m from 1e-6 too. Bias correction is always on.
    """
    options = {**_adam_options(lr, settings), "initial_accumulator": 1e-6, "weight_decouple": False}
    return _theirs("Yogi", model.parameters(), **options)


def _soap(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
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


def _shampoo(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """L ← L + G Gᵀ; R ← R + Gᵀ G; X ← X − α L^{−1/4} G R^{−1/4}, from L = R = 1e-6 I; a tensor of k axes has −1/(2k).

    The algorithm as published, with roots at every step: on LeNet-300-100 that takes as long as 60 times forward and
    backward. No momentum, because this version's mixes preconditioned gradients into the next plain one. The same
    package's ScalableShampoo is no substitute: by default its first 1,000 steps are SGD's, and `torch.load` refuses its
    state under `weights_only=True`.
    """
    options = {"momentum": 0.0, "weight_decouple": False, "preconditioning_compute_steps": 1, "matrix_eps": 1e-6}
    return _theirs("Shampoo", model.parameters(), lr=lr, weight_decay=settings.weight_decay, **options)


# ours --------------------------------------------------------------------------------------------------------------


def _ggt(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """`GGT`."""
    return GGT(
        model.named_parameters(),
        lr=lr,
        beta1=settings.beta1,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        **{name: getattr(settings, f"ggt_{name}") for name in GGT_OPTIONS},
    )


def _block_options(
    model: nn.Module,
    lr: float,
    settings: Any,
    decay: Literal["weight_decay", "decoupled_weight_decay"] = "weight_decay",
) -> dict[str, Any]:
    """Give what all block methods get."""
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
        return param_groups(model)
    if settings.grouping != RANDOM:
        return model.named_parameters()
    drawn = torch.Generator().manual_seed(0)  # one draw for all seeds, which then differ in nothing but their seed
    orders = ((each, torch.randperm(each[1].numel(), generator=drawn)) for each in model.named_parameters())
    return [
        {"params": [each], "grouping": IndexGroups(part.tolist() for part in order.split(settings.block_size))}
        for each, order in orders
    ]


Clip = Callable[[Any, int], SpectrumClip | None]


def _block_adam(amsgrad: bool = False, clip: Clip = lambda settings, steps: None) -> Builder:
    """`BlockAdam`."""

    def build(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
        return BlockAdam(
            **_block_options(model, lr, settings),
            **_block_adam_options(settings),
            clip=clip(settings, steps),
            amsgrad=amsgrad,
        )

    return build


def _to_final_lr(settings: Any, steps: int) -> SpectrumClip:
    return SpectrumClip(settings.final_lr, settings.clip_progress / steps)


def _to_what_it_measures(settings: Any, steps: int) -> SpectrumClip:
    return SpectrumClip("auto", settings.auto_clip_progress / steps)


def _block_adam_options(settings: Any) -> dict[str, Any]:
    return {"betas": (settings.beta1, settings.beta2), "bias_correction": settings.bias_correction}


def _block_adamw(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """`BlockAdamW`; its λ is `decoupled_weight_decay`."""
    return BlockAdamW(**_block_options(model, lr, settings, "decoupled_weight_decay"), **_block_adam_options(settings))


def _paper_adam(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
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


def _block_rmsprop(clipped: bool) -> Builder:
    """`BlockRMSprop`, without bias correction like torch's RMSprop.

    It moves by the gradient itself, not by an average of it, so it ends on (1 − β₁) α*, SGD's own learning rate.
    """

    def build(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
        clip = None
        if clipped:
            clip = SpectrumClip((1 - settings.beta1) * settings.final_lr, settings.clip_progress / steps)
        return BlockRMSprop(**_block_options(model, lr, settings), alpha=settings.rms_decay, clip=clip)

    return build


def _block_adagrad(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """`BlockAdagrad`, the averaged form: δ√t for δ."""
    return BlockAdagrad(**_block_options(model, lr, settings))


def _block_adafom(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """`BlockAdaFom`, without bias correction as published."""
    return BlockAdaFom(**_block_options(model, lr, settings), beta1=settings.beta1)


def _full_adagrad(model: nn.Module, lr: float, settings: Any, steps: int) -> Optimizer:
    """`BlockAdagrad` with one block over all parameters; for at most 4,096 of them."""
    options = {name: getattr(settings, name) for name in ("eps", "weight_decay", "refresh_every")}
    return BlockAdagrad(model.named_parameters(), lr=lr, grouping="joint", **options)


ADAM = ("beta1", "beta2", "eps", "weight_decay")
TORCH_ADAM = ("beta1", "beta2", "weight_decay")  # whose ε is its own
ADAMW = ("beta1", "beta2", "decoupled_weight_decay")
CLIP = ("final_lr", "clip_progress")
CUT = ("grouping", "block_size", "refresh_every")
BLOCK = ("eps", "weight_decay", *CUT)
BLOCK_ADAM = (*BLOCK, "beta1", "beta2", "bias_correction")
BLOCK_RMS = (*BLOCK, "rms_decay")
TORCH = {"eps": TORCH_EPS}

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            "sgd", "SGD", "sgd", "scalar", False, 1e-2, _sgd, shared=("momentum", "nesterov", "weight_decay")
        ),
        Contender("adam", "Adam", "adam", "diagonal", False, 1e-3, _adam(amsgrad=False), TORCH_ADAM, TORCH),
        Contender("adamw", "AdamW", "adam", "diagonal", False, 1e-3, _adamw, ADAMW, TORCH),
        Contender("amsgrad", "AMSGrad", "adam", "diagonal", False, 1e-3, _adam(amsgrad=True), TORCH_ADAM, TORCH),
        Contender(
            "paper-adam", "Adam (paper)", "adam", "diagonal", False, 1e-3, _paper_adam, (*ADAM, "bias_correction")
        ),
        Contender(
            "rmsprop", "RMSprop", "rmsprop", "diagonal", False, 1e-3, _rmsprop, ("rms_decay", "eps", "weight_decay")
        ),
        Contender("adagrad", "AdaGrad", "adagrad", "diagonal", False, 1e-2, _adagrad, ("eps", "weight_decay")),
        Contender(
            "adadelta", "Adadelta", "other", "diagonal", False, 1.0, _adadelta, ("weight_decay",),
            {"rho": 0.9, "eps": 1e-6},
        ),
        Contender("nadam", "NAdam", "adam", "diagonal", False, 2e-3, _nadam, ADAM),
        Contender("adabound", "AdaBound", "adam", "diagonal", True, 1e-3, _adabound(ams=False), (*ADAM, *CLIP)),
        Contender("amsbound", "AMSBound", "adam", "diagonal", True, 1e-3, _adabound(ams=True), (*ADAM, *CLIP)),
        Contender("yogi", "Yogi", "adam", "diagonal", False, 1e-2, _yogi, TORCH_ADAM, {"eps": 1e-3}),
        Contender(
            "soap", "SOAP", "other", "kronecker", False, 3e-3, _soap, ("decoupled_weight_decay", "soap_largest_axis"),
            {"beta1": 0.95, "beta2": 0.95, "eps": 1e-8},
        ),
        Contender("muon", "Muon", "other", "orthogonal", False, 1e-3, _muon, ADAMW),
        Contender("shampoo", "Shampoo", "other", "kronecker", False, 1e-3, _shampoo, ("weight_decay",)),
        Contender(
            "ggt", "GGT", "other", "low-rank", False, 1e-3, _ggt,
            ("beta1", "eps", "weight_decay", *(f"ggt_{name}" for name in GGT_OPTIONS)),
        ),
        Contender("block-adam", "Block-Adam", "adam", "block", False, 1e-3, _block_adam(), BLOCK_ADAM),
        Contender(
            "block-adam-clip", "Block-Adam + clip", "adam", "block", True, 1e-3, _block_adam(clip=_to_final_lr),
            (*BLOCK_ADAM, *CLIP),
        ),
        Contender(
            "block-adam-auto-clip", "Block-Adam + auto clip", "adam", "block", True, 1e-3,
            _block_adam(clip=_to_what_it_measures), (*BLOCK_ADAM, "auto_clip_progress"),
        ),
        Contender(
            "block-adamw", "Block-AdamW", "adam", "block", False, 1e-3, _block_adamw,
            ("eps", "bias_correction", *CUT, *ADAMW),
        ),
        Contender(
            "block-amsgrad", "Block-AMSGrad", "adam", "block", False, 1e-3, _block_adam(amsgrad=True), BLOCK_ADAM
        ),
        Contender(
            "block-rmsprop", "Block-RMSprop", "rmsprop", "block", False, 1e-3, _block_rmsprop(clipped=False), BLOCK_RMS
        ),
        Contender(
            "block-rmsprop-clip", "Block-RMSprop + clip", "rmsprop", "block", True, 1e-3, _block_rmsprop(clipped=True),
            (*BLOCK_RMS, *CLIP, "beta1"),
        ),
        Contender("block-adagrad", "Block-AdaGrad", "adagrad", "block", False, 1e-2, _block_adagrad, BLOCK),
        Contender("block-adafom", "Block-AdaFom", "adagrad", "block", False, 1e-2, _block_adafom, (*BLOCK, "beta1")),
        Contender(
            "full-adagrad", "Full AdaGrad", "adagrad", "full", False, 1e-2, _full_adagrad,
            ("eps", "weight_decay", "refresh_every"),
        ),
    )
}  # fmt: skip
