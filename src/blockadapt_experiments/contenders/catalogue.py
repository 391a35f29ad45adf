"""Holds the optimizers that experiments compare, by name, each made from the same settings.

`builders.py` makes them and states the rule of each; `tests/laboratory/contenders/test_catalogue.py` holds every one
to it.

`adam`, `adamw` and `amsgrad` are torch's with torch's ε and bias correction, as people use them. `paper-adam` is Adam
as the paper prints it: `block-adam` with blocks of one coordinate, and without bias correction whatever others have.

A setting means the same wherever a method has it: `eps` is added to √v, `weight_decay` times x to the gradient. The
builders name the exceptions. Methods whose decay is decoupled, x ← (1 − α λ) x, have `decoupled_weight_decay` instead.
A contender names the settings that it shares with the others and those that have a default of its own. Nothing else
reaches its builder, so a setting that it does not have can be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer

from blockadapt.errors import NonFiniteGradientError
from blockadapt.partition import NAMED_GROUPINGS
from blockadapt.validation import require, require_beta, require_bool, require_choice, require_integer, require_number
from blockadapt_experiments.contenders.builders import (
    GGT_OPTIONS,
    RANDOM,
    Builder,
    adabound,
    adadelta,
    adagrad,
    adam,
    adamw,
    block_adafom,
    block_adagrad,
    block_adam,
    block_adamw,
    block_rmsprop,
    full_adagrad,
    ggt,
    muon,
    nadam,
    paper_adam,
    rmsprop,
    sgd,
    shampoo,
    soap,
    to_final_lr,
    to_what_it_measures,
    yogi,
)
from blockadapt_experiments.contenders.ggt import COLUMNS, COMPLEMENTS, MOMENTA, SCOPES
from blockadapt_experiments.names import require_optimizer

LOST = (NonFiniteGradientError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
"""What an optimizer raises where a run has diverged: ours and GGT at the gradient, Shampoo and SOAP at its factors."""

Family = Literal["adam", "rmsprop", "adagrad", "sgd", "other"]
Kind = Literal["scalar", "diagonal", "block", "full", "low-rank", "kronecker", "orthogonal", "own"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Says what optimizers are made with, besides their learning rate.

    Attributes:
        eps: δ of the block methods and ε of the paper's diagonal ones: what differs is the shape of V. `adam`, `adamw`,
            `amsgrad` and `soap` have their own 1e-8, `adadelta` and `yogi` their authors'.
        beta1: Decay of m in the Adam family and in GGT.
        beta2: Decay of V in the Adam family.
        rms_decay: Decay of V in the RMSprop family.
        bias_correction: Of the block forms of Adam; the paper prints none, and `paper-adam` has none.
        block_size: Coordinates in a block, where the grouping leaves it open.
        grouping: How the block methods cut parameters; "auto" gives each kind of layer its own rule. "random" draws the
            coordinates of each block from all of a parameter: what is left when it does not matter who shares one.
        embeddings: How "auto" cuts embeddings, and the heads that follow them: "output" or "diagonal".
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
    embeddings: str = "output"
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
        require_choice(owner, "embeddings", self.embeddings, ("output", "diagonal"))
        require_choice(owner, "ggt_complement", self.ggt_complement, COMPLEMENTS)
        require_choice(owner, "ggt_scope", self.ggt_scope, SCOPES)
        require_choice(owner, "ggt_momentum", self.ggt_momentum, MOMENTA)
        require_choice(owner, "ggt_columns", self.ggt_columns, COLUMNS)


TORCH_EPS = 1e-8
"""The ε that torch's Adam has unless told otherwise."""


@dataclass(frozen=True)
class Contender:
    """Is an optimizer that experiments can name.

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
        """Give the type of each of its settings, by name."""
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
        changes: The settings that an arm has of its own, as `core.settings` has checked them.

    Raises:
        ValueError: There is no such contender, and the sentence names the nearest; or `lr` or `steps` cannot be.
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
    require_optimizer(owner, name, CONTENDERS)
    return CONTENDERS[name]


ADAM = ("beta1", "beta2", "eps", "weight_decay")
TORCH_ADAM = ("beta1", "beta2", "weight_decay")  # whose ε is its own
ADAMW = ("beta1", "beta2", "decoupled_weight_decay")
CLIP = ("final_lr", "clip_progress")
CUT = ("grouping", "embeddings", "block_size", "refresh_every")
BLOCK = ("eps", "weight_decay", *CUT)
BLOCK_ADAM = (*BLOCK, "beta1", "beta2", "bias_correction")
BLOCK_RMS = (*BLOCK, "rms_decay")
TORCH = {"eps": TORCH_EPS}

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            "sgd", "SGD", "sgd", "scalar", False, 1e-2, sgd, shared=("momentum", "nesterov", "weight_decay")
        ),
        Contender("adam", "Adam", "adam", "diagonal", False, 1e-3, adam(amsgrad=False), TORCH_ADAM, TORCH),
        Contender("adamw", "AdamW", "adam", "diagonal", False, 1e-3, adamw, ADAMW, TORCH),
        Contender("amsgrad", "AMSGrad", "adam", "diagonal", False, 1e-3, adam(amsgrad=True), TORCH_ADAM, TORCH),
        Contender(
            "paper-adam", "Adam (paper)", "adam", "diagonal", False, 1e-3, paper_adam, ADAM,
            {"bias_correction": False},
        ),
        Contender(
            "rmsprop", "RMSprop", "rmsprop", "diagonal", False, 1e-3, rmsprop, ("rms_decay", "eps", "weight_decay")
        ),
        Contender("adagrad", "AdaGrad", "adagrad", "diagonal", False, 1e-2, adagrad, ("eps", "weight_decay")),
        Contender(
            "adadelta", "Adadelta", "other", "diagonal", False, 1.0, adadelta, ("weight_decay",),
            {"rho": 0.9, "eps": 1e-6},
        ),
        Contender("nadam", "NAdam", "adam", "diagonal", False, 2e-3, nadam, ADAM),
        Contender("adabound", "AdaBound", "adam", "diagonal", True, 1e-3, adabound(ams=False), (*ADAM, *CLIP)),
        Contender("amsbound", "AMSBound", "adam", "diagonal", True, 1e-3, adabound(ams=True), (*ADAM, *CLIP)),
        Contender("yogi", "Yogi", "adam", "diagonal", False, 1e-2, yogi, TORCH_ADAM, {"eps": 1e-3}),
        Contender(
            "soap", "SOAP", "other", "kronecker", False, 3e-3, soap, ("decoupled_weight_decay", "soap_largest_axis"),
            {"beta1": 0.95, "beta2": 0.95, "eps": 1e-8},
        ),
        Contender("muon", "Muon", "other", "orthogonal", False, 1e-3, muon, ADAMW),
        Contender("shampoo", "Shampoo", "other", "kronecker", False, 1e-3, shampoo, ("weight_decay",)),
        Contender(
            "ggt", "GGT", "other", "low-rank", False, 1e-3, ggt,
            ("beta1", "eps", "weight_decay", *(f"ggt_{name}" for name in GGT_OPTIONS)),
        ),
        Contender("block-adam", "Block-Adam", "adam", "block", False, 1e-3, block_adam(), BLOCK_ADAM),
        Contender(
            "block-adam-clip", "Block-Adam + clip", "adam", "block", True, 1e-3, block_adam(clip=to_final_lr),
            (*BLOCK_ADAM, *CLIP),
        ),
        Contender(
            "block-adam-auto-clip", "Block-Adam + auto clip", "adam", "block", True, 1e-3,
            block_adam(clip=to_what_it_measures), (*BLOCK_ADAM, "auto_clip_progress"),
        ),
        Contender(
            "block-adamw", "Block-AdamW", "adam", "block", False, 1e-3, block_adamw,
            ("eps", "bias_correction", *CUT, *ADAMW),
        ),
        Contender(
            "block-amsgrad", "Block-AMSGrad", "adam", "block", False, 1e-3, block_adam(amsgrad=True), BLOCK_ADAM
        ),
        Contender(
            "block-rmsprop", "Block-RMSprop", "rmsprop", "block", False, 1e-3, block_rmsprop(clipped=False), BLOCK_RMS
        ),
        Contender(
            "block-rmsprop-clip", "Block-RMSprop + clip", "rmsprop", "block", True, 1e-3, block_rmsprop(clipped=True),
            (*BLOCK_RMS, *CLIP, "beta1"),
        ),
        Contender("block-adagrad", "Block-AdaGrad", "adagrad", "block", False, 1e-2, block_adagrad, BLOCK),
        Contender("block-adafom", "Block-AdaFom", "adagrad", "block", False, 1e-2, block_adafom, (*BLOCK, "beta1")),
        Contender(
            "full-adagrad", "Full AdaGrad", "adagrad", "full", False, 1e-2, full_adagrad,
            ("eps", "weight_decay", "refresh_every"),
        ),
    )
}  # fmt: skip
