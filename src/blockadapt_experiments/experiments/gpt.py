"""`gpt-char`: a small GPT on the characters of a text, with the optimizers that people use; not in the paper.

The learning rate warms up and falls as a cosine to zero, weight decay is decoupled and gradients are clipped by their
norm, as is usual. At a given seed every optimizer starts from the same weights and sees the same windows.

Any text will do, see `data/text.py`; the records name it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from blockadapt.validation import Described, require, require_integer, require_number
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.contests import Part, at_equal_time, finals, rivals, verdict
from blockadapt_experiments.claims.verdicts import difference, is_below_zero, mean_words
from blockadapt_experiments.contenders.catalogue import LOST
from blockadapt_experiments.contenders.memory import state_bytes_of
from blockadapt_experiments.contenders.schedules import ScheduleSettings, make_schedule
from blockadapt_experiments.core.config import varied
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings, SweepSettings
from blockadapt_experiments.core.training import Work, best_device, initial
from blockadapt_experiments.data.text import Corpus, find_text, read_characters
from blockadapt_experiments.models.gpt import Gpt, mean_loss
from blockadapt_experiments.results.measurements import Metric, Outcome, Row, RunKey
from blockadapt_experiments.results.summary import Summary

PLANNED_CHARACTERS = 100
"""The vocabulary that `blockadapt plan` takes, which has no text to count."""


@dataclass(frozen=True, kw_only=True)
class GptSettings(Settings, SweepSettings):
    """Settings of the experiment.

    Attributes:
        steps: Of the optimizer.
        every: Steps between two measurements, which are also the moments at which a run can be saved.
        schedule: Of the learning rate.
        batch: Windows in a minibatch.
        context: Characters in a window.
        train_characters: How much of the training text is used, from its beginning; None for all.
        evaluation_characters: The same of the validation and the test text.
        width: Of the embeddings and the layers.
        layers: How many.
        heads: Of the attention.
        clip_norm: The largest norm of a gradient, over all parameters.
    """

    steps: int
    every: int
    schedule: ScheduleSettings = field(default_factory=lambda: ScheduleSettings(kind="cosine", warmup=0.1))
    batch: int
    context: int
    train_characters: int | None = None
    evaluation_characters: int | None = None
    width: int
    layers: int
    heads: int
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        SweepSettings.__post_init__(self)
        for name in ("steps", "every", "batch", "context", "width", "layers", "heads"):
            require_integer("settings", name, getattr(self, name), least=1)
        for name in ("train_characters", "evaluation_characters"):
            if getattr(self, name) is not None:
                require_integer("settings", name, getattr(self, name), least=1)
        require(self.width % self.heads == 0, "settings", "width", f"a multiple of `heads`, {self.heads}", self.width)
        require(self.schedule.kind != "dev", "settings", "schedule.kind", "one that counts steps", self.schedule.kind)
        require_number("settings", "clip_norm", self.clip_norm, above=0)


class GptTask:
    """One run, `every` steps a leg and a row.

    Rows hold step, the mean training loss of the steps since the row before, and the loss on the validation text; the
    last one holds the loss on the test text too. A loss or gradient that is not finite ends the training, and the row
    of that leg says so.

    Args:
        settings: How to train.
        corpus: The text.
        arm: Name of the optimizer.
        lr: Its learning rate.
        seed: Of the initial weights and of the windows.
    """

    def __init__(self, settings: GptSettings, corpus: Corpus, arm: str, lr: float, seed: int) -> None:
        self.settings, self.corpus, self.device = settings, corpus, best_device()
        most = min(map(len, (corpus.train, *corpus.held_out.values()))) - 1
        rule = f"at most {most:,}, the shortest text less one"
        require(settings.context <= most, "gpt-char", "context", rule, settings.context)
        self.legs = math.ceil(settings.steps / settings.every)
        measured = len(corpus.valid) / (settings.batch * settings.context)
        self.work = Work(settings.steps, self.legs * measured)
        weights, windows = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
        self.model = initial(lambda: make_model(settings, len(corpus.vocabulary)), weights).to(self.device)
        self.optimizer = settings.make_optimizer(arm, self.model, lr, settings.steps)
        self.schedule = make_schedule(settings.schedule, self.optimizer, 1, settings.steps)
        self.windows = torch.Generator().manual_seed(windows)
        self.step = self.state_bytes = 0
        self.diverged = False

    def advance(self) -> Sequence[Row]:
        """Train for some steps and measure."""
        if self.diverged:
            return ()
        self.model.train()
        end = min(self.step + self.settings.every, self.settings.steps)
        losses = []
        while self.step < end and not self.diverged:
            losses.append(self._train())
        row: Row = {"step": self.step, "train_loss": sum(losses) / len(losses)}
        for name, text in self.corpus.held_out.items():
            if name == "valid" or self.step == self.settings.steps:
                row[f"{name}_loss"] = mean_loss(self.model, text, self.settings.context)
                self.diverged |= not math.isfinite(row[f"{name}_loss"])
        return (row,)

    def outcome(self) -> Outcome:
        """Return what the run took, and what the text is."""
        numbers: dict[str, float] = {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "steps": self.step,
            "state_bytes": self.state_bytes,
            "final_state_bytes": state_bytes_of(self.optimizer),
            "diverged": int(self.diverged),
            "vocabulary": len(self.corpus.vocabulary),
            "train_characters": len(self.corpus.train),
        }
        return Outcome(numbers, {"corpus": np.array(self.corpus.name)})

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "corpus": self.corpus.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "windows": self.windows.get_state(),
            **{name: getattr(self, name) for name in _COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: It was taken with another text.
        """
        same = state["corpus"] == self.corpus.digest
        require(same, "gpt-char", "data-dir", "the text that the run was begun with", Described(self.corpus.name))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.windows.set_state(state["windows"])
        for name in _COUNTERS:
            setattr(self, name, state[name])

    def _train(self) -> float:
        """Take one step, and return its loss; set `diverged` if the loss or a gradient is not finite."""
        text, length = self.corpus.train, self.settings.context + 1
        starts = torch.randint(len(text) - length + 1, (self.settings.batch, 1), generator=self.windows)
        tokens = text[starts + torch.arange(length)].to(self.device)
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        if not math.isfinite(loss.item() + norm.item()):
            self.diverged = True
            return math.nan
        try:
            self.optimizer.step()
        except LOST:
            self.diverged = True
            return math.nan
        self.schedule.after_step()
        self.step += 1
        if self.step == 1:
            self.state_bytes = state_bytes_of(self.optimizer)
        return loss.item()


_COUNTERS = ("step", "state_bytes", "diverged")


def make_model(settings: GptSettings, vocabulary: int) -> Gpt:
    """Build the model for so many characters."""
    return Gpt(vocabulary, settings.context, settings.width, settings.layers, settings.heads)


def make_task(settings: GptSettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool) -> GptTask:
    """Make the run of a variant. While learning rates are tuned the test text is not read."""
    settings = varied(settings, key.variant)
    cut = (settings.train_characters, settings.evaluation_characters)
    corpus = read_characters(find_text(data_dir), *cut, test=not tuning)
    return GptTask(settings, corpus, key.arm, lr, key.seed)


# Claims, ours ---------------------------------------------------------------------------------------------------------

OURS = "block-adamw"


def judge_steps(summary: Summary) -> Verdict:
    """Judge whether blocks end with a lower loss on the test text than each of the others, after as many steps."""
    parts = []
    for other in rivals(summary, OURS):
        nats = difference(*(finals(summary, arm, "test_loss") for arm in (OURS, other)))
        parts.append(Part(is_below_zero(nats), f"{mean_words(nats)} nats against {summary.label(other)}"))
    return verdict(parts, f"Test loss of {summary.label(OURS)} at the end: ")


def judge_seconds(summary: Summary) -> Verdict:
    """Judge whether blocks have the lower loss on the validation text when the faster of two is done."""
    parts = []
    for other in rivals(summary, OURS):
        then = at_equal_time(summary, OURS, other, "valid_loss")
        nats = difference(then.first, then.second)
        shares = " and ".join(f"{share:.0%}" for share in then.shares)
        words = f"{mean_words(nats)} nats against {summary.label(other)} ({shares} of the steps done)"
        parts.append(Part(is_below_zero(nats), words))
    return verdict(parts, f"Validation loss of {summary.label(OURS)}: ")


CLAIMS = (
    Claim("Ours: after as many steps, Block-AdamW has a lower loss than AdamW, Muon and SOAP.", judge_steps),
    Claim("Ours: Block-AdamW has the lower loss when the faster of two is done.", judge_seconds),
)

METRICS = (
    Metric("valid_loss", "validation loss (nats per character)"),
    Metric("train_loss", "training loss (nats per character)"),
    Metric("test_loss", "test loss (nats per character)"),
)

EXPERIMENTS = (
    Experiment(
        name="gpt-char",
        title="A small GPT on characters: what people use",
        section="not in the paper",
        config=GptSettings,
        axis="step",
        metrics=METRICS,
        variants=lambda settings: settings.variants,
        task=make_task,
        model=lambda settings: make_model(settings, PLANNED_CHARACTERS),
        claims=CLAIMS,
        objective="valid_loss",
    ),
)
