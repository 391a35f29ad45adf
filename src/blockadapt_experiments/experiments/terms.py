"""Runs `terms`: Terms A and B of Theorem 1 while a 784-100-10 network learns MNIST, blocks of 10 against a diagonal.

    P = α (V^{1/2} + δI)^{-1}        A = ‖Pₜ gₜ‖²        B = Pₜ − Pₜ₋₁ in some norm

The paper plots B of the block version in the spectral norm, the largest over blocks, and B of the diagonal version as
a sum over coordinates, its nuclear norm: each is what the analysis of that version needs, but they are two different
norms. Here both norms are measured for both versions. A layer is its weights and its biases.

Both versions run with the same α, and it is not tuned: A grows with α² and B with α, so that learning rates would be
compared, not terms. The diagonal arms are the library's optimizers with blocks of one coordinate.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from blockadapt.diagnostics import SpectrumRecorder
from blockadapt.diagnostics.recorder import TOTAL
from blockadapt.optimizers import BlockOptimizer
from blockadapt.validation import require_choice, require_integer
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.verdicts import BySeed, ratio_words, together
from blockadapt_experiments.contenders.catalogue import make_optimizer
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.core.training import Classification, Sets, TrainingSettings
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.data.images import load_images
from blockadapt_experiments.drawing.colours import styles_of
from blockadapt_experiments.files.png import write_png
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import Metric, Outcome, Row, RunKey
from blockadapt_experiments.results.summary import Summary

LAYERS = ("fc1", "fc2")
HIDDEN, CLASSES = 100, 10


class Arm(NamedTuple):
    """Says how an arm is made: by its contender's name, and whether its blocks are single coordinates."""

    contender: str
    diagonal: bool


ARMS = {
    "paper-adam": Arm("block-adam", diagonal=True),
    "block-adam": Arm("block-adam", diagonal=False),
    "rmsprop": Arm("block-rmsprop", diagonal=True),
    "block-rmsprop": Arm("block-rmsprop", diagonal=False),
}
PAIRS = (("block-adam", "paper-adam"), ("block-rmsprop", "rmsprop"))

TERMS = {
    "term_a": "Term A, ‖P g‖²",
    "term_b_paper": "Term B as the paper compares it: spectral for blocks, sum for diagonals",
    "term_b_spectral": "Term B, spectral norm",
    "term_b_nuclear": "Term B, nuclear norm",
}


@dataclass(frozen=True, kw_only=True)
class TermsSettings(Settings, TrainingSettings):
    """Holds the settings of `terms`.

    Attributes:
        data: "mnist"; or "digits", which are embedded, with 64 inputs for 784, to try things out without a download.
        train_examples: The number of training images, from the first on.
        every: Steps between two records.
    """

    data: Literal["mnist", "digits"] = "mnist"
    train_examples: int
    every: int

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        TrainingSettings.__post_init__(self)
        for name in self.optimizers:
            require_choice("settings", "optimizers", name, tuple(ARMS))
        require_integer("settings", "train_examples", self.train_examples, least=1)
        require_integer("settings", "every", self.every, least=1)


def mlp(inputs: int) -> nn.Sequential:
    """Build inputs-100-10 with ReLU; 79,510 parameters for 784 inputs."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(inputs, HIDDEN),
            relu1=nn.ReLU(),
            fc2=nn.Linear(HIDDEN, CLASSES),
        )
    )


class TermsTask:
    """Is one run: an epoch a leg, with a row for each recorded step and one for the training loss after each epoch."""

    def __init__(self, settings: TermsSettings, key: RunKey, lr: float, data_dir: Path | None) -> None:
        train, _ = load_images(settings.data, data_dir)
        train = Examples(train.images[: settings.train_examples], train.labels[: settings.train_examples])
        arm = ARMS[key.arm]
        self._norm = "term_b_nuclear" if arm.diagonal else "term_b_spectral"
        shared = replace(settings.optimizer, grouping="diagonal") if arm.diagonal else settings.optimizer
        self._training = Classification(
            model=partial(mlp, train.images[0].numel()),
            sets=Sets(train, {}),
            settings=settings,
            optimizer=partial(make_optimizer, arm.contender, lr=lr, settings=shared),
            seed=key.seed,
            prepare=_scaled,
        )
        self.legs = self._training.legs
        assert isinstance(self._training.optimizer, BlockOptimizer)
        self._recorder = SpectrumRecorder(self._training.optimizer, settings.every)

    def advance(self) -> Sequence[Row]:
        """Train for an epoch."""
        measured = self._training.advance()
        rows = {row["step"]: row for row in term_rows(self._recorder.history, self._norm)}
        self._recorder.history.clear()
        for row in measured:
            rows[row["step"]] = {**rows.get(row["step"], {}), **row}
        return list(rows.values())

    def outcome(self) -> Outcome:
        """Return what the training leaves, but for the weights."""
        return Outcome(self._training.outcome().numbers, {})

    def state_dict(self) -> dict[str, Any]:
        """Return the training, and where the recorder is."""
        return {"training": self._training.state_dict(), "recorder": self._recorder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._training.load_state_dict(state["training"])
        self._recorder.load_state_dict(state["recorder"])


def term_rows(history: Iterable[dict[str, Any]], norm: str) -> list[Row]:
    """Make a row for each recorded step: the terms of each layer and of all, with B in the paper's norm for this arm.

    Args:
        history: The recorder's rows, one for each parameter and step.
        norm: The norm in which the paper has Term B of this arm.
    """
    rows: dict[int, Row] = {}
    for entry in history:
        row = rows.setdefault(entry["step"], {"step": entry["step"]})
        layer = entry["parameter"].partition(".")[0]
        for term in ("term_a", "term_b_spectral", "term_b_nuclear"):
            key, value = f"{term}.{layer}", entry[term]
            join = max if term == "term_b_spectral" else math.fsum
            if not math.isnan(value):  # the first step has no Term B
                row[key] = join([row[key], value]) if key in row else value
        if f"{norm}.{layer}" in row:
            row[f"term_b_paper.{layer}"] = row[f"{norm}.{layer}"]
    return list(rows.values())


def _scaled(images: Tensor) -> Tensor:
    return images.to(torch.float32).div_(256)


def _variants(settings: TermsSettings) -> Sequence[str]:
    return [""]


def _task(settings: TermsSettings, key: RunKey, lr: float, data: Path | None, tuning: bool) -> TermsTask:
    return TermsTask(settings, key, lr, data)


# The paper's claims -------------------------------------------------------------------------------------------------

SIMILAR = 3.0
"""Terms within this factor, half an order of magnitude, have a similar scale."""

MUCH = 10.0
"""A term by this factor smaller, an order of magnitude, is much smaller."""


def _mean_log(summary: Summary, arm: str, key: str) -> BySeed:
    """Compute the mean logarithm over the recorded steps, by seed; nan where a value is not positive."""
    found = {}
    for run in summary.of(arm):
        values = run.series("step", key).values
        if run.finished and values.size:
            positive = bool((values > 0).all())
            found[run.key.seed] = float(np.log(values).mean()) if positive else math.nan
    return found


def _log_ratios(summary: Summary, term: str) -> dict[str, np.ndarray]:
    """Compute log(block / diagonal), by family and layer, over the seeds that both have."""
    found = {}
    for block, diagonal in PAIRS:
        for layer in LAYERS:
            first, second = (_mean_log(summary, arm, f"{term}.{layer}") for arm in (block, diagonal))
            ratios = np.array([first[seed] - second[seed] for seed in first if seed in second])
            if ratios.size:
                found[f"{summary.label(diagonal)} {layer}"] = ratios
    return found


def _judge(summary: Summary, term: str, similar: bool) -> Verdict:
    parts: list[bool | None] = []
    ratios = _log_ratios(summary, term)
    for values in ratios.values():
        mean, half = interval(values)
        distance, limit = (abs(mean), math.log(SIMILAR)) if similar else (mean, -math.log(MUCH))
        parts.append(True if distance + half < limit else False if distance - half > limit else None)
    words = ", ".join(f"{name} {ratio_words(values)}" for name, values in ratios.items())
    rule = f"Similar is within ×{SIMILAR:g}" if similar else f"Much smaller is below ×{1 / MUCH:g}"
    return Verdict(together(parts), f"Block over diagonal, geometric mean over steps: {words}. {rule}.")


def judge_term_a(summary: Summary) -> Verdict:
    """Judge whether Term A has a similar scale."""
    return _judge(summary, "term_a", similar=True)


def judge_term_b(term: str, summary: Summary) -> Verdict:
    """Judge whether Term B is much smaller, in this norm."""
    return _judge(summary, term, similar=False)


def draw_terms(summary: Summary, directory: Path) -> Sequence[Path]:
    """Draw means over seeds, a column for each layer and a row for each term; nothing before there are curves."""
    if not any(
        summary.curve(arm, f"{term}.{layer}").is_line for arm in summary.arms for term in TERMS for layer in LAYERS
    ):
        return []
    figure = Figure(figsize=(10, 11), dpi=150, layout="constrained")
    figure.suptitle(
        "Terms of Theorem 1 while the network learns, blocks against diagonals; geometric mean over seeds", fontsize=11
    )
    styles = styles_of(summary.optimizers)
    panels = figure.subplots(len(TERMS), len(LAYERS), sharex=True, sharey="row")
    for row, (term, label) in zip(panels, TERMS.items(), strict=True):
        for panel, layer in zip(row, LAYERS, strict=True):
            for arm in summary.arms:
                curve = summary.curve(arm, f"{term}.{layer}")
                if curve.x.size:
                    panel.plot(curve.x, curve.band(log=True).middle, label=summary.label(arm), **styles[arm].line())
            panel.set_yscale("log")
            panel.set_title(f"{label}\n{layer}", fontsize=9)
            panel.grid(axis="y", color="#E0E0E0", linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(ARMS), frameon=False)
    return [write_png(figure, directory / "terms.png")]


TERMS_EXPERIMENT = Experiment(
    name="terms",
    title="Term A and Term B of Theorem 1 on MNIST, blocks of 10 against a diagonal",
    section="Section 3, figure 3",
    config=TermsSettings,
    axis="step",
    metrics=(
        *(
            Metric(
                f"{term}.{layer}", f"{label}, {layer if layer != TOTAL else 'all parameters'}", better=None, log=True
            )
            for term, label in TERMS.items()
            for layer in (*LAYERS, TOTAL)
        ),
        Metric("train_loss", "training loss", log=True),
        Metric("train_accuracy", "training accuracy", better="high"),
    ),
    variants=_variants,
    task=_task,
    claims=(
        Claim("Block and diagonal versions have a similar scale of Term A (section 3).", judge_term_a),
        Claim(
            "Term B is much smaller for blocks, in both layers (section 3): as the paper has it, the spectral norm of "
            "blocks against the sum over the coordinates of the diagonal.",
            partial(judge_term_b, "term_b_paper"),
        ),
        Claim(
            "Term B is much smaller for blocks (section 3), with both in the spectral norm.",
            partial(judge_term_b, "term_b_spectral"),
        ),
        Claim(
            "Term B is much smaller for blocks (section 3), with both in the nuclear norm.",
            partial(judge_term_b, "term_b_nuclear"),
        ),
    ),
    draw=draw_terms,
)

EXPERIMENTS: tuple[Experiment[Any], ...] = (TERMS_EXPERIMENT,)
