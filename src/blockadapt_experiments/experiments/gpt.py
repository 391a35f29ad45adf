"""Runs `gpt-char` and `gpt-words`: a small GPT on characters or words, with the optimizers that people use.

They are not in the paper. Most of the parameters of `gpt-words` are in its vocabulary, as in those GPTs that fit on one
machine, so it tells what it costs to give embeddings Adam's rule.

The learning rate warms up and falls as a cosine to zero, weight decay is decoupled and gradients are clipped by their
norm, as is usual. At a given seed every optimizer starts from the same weights and sees the same windows.

Any text will do, see `data/text.py`; the records name it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from blockadapt.validation import require, require_integer, require_number
from blockadapt_experiments.claims.claim import Claim
from blockadapt_experiments.claims.contests import Measure, judge_ends, judge_equal_time
from blockadapt_experiments.contenders.schedules import ScheduleSettings, make_schedule
from blockadapt_experiments.core.clock import not_counted
from blockadapt_experiments.core.config import varied
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings, SweepSettings
from blockadapt_experiments.core.training import Work, best_device, initial
from blockadapt_experiments.data.text import Corpus, TextFiles, find_text, read_characters, read_corpus
from blockadapt_experiments.experiments.text_run import TextRun
from blockadapt_experiments.models.gpt import Gpt, mean_loss
from blockadapt_experiments.names import NOT_IN_PAPER
from blockadapt_experiments.results.measurements import Metric, Row, RunKey

PLANNED_CHARACTERS = 100
"""The vocabulary that `blockadapt plan` takes, which has no text to count."""


@dataclass(frozen=True, kw_only=True)
class GptSettings(Settings, SweepSettings):
    """Holds the settings that both experiments have.

    Attributes:
        steps: Of the optimizer.
        every: Steps between two measurements, which are also the moments at which a run can be saved.
        schedule: Of the learning rate.
        batch: Windows in a minibatch.
        context: Characters or words in a window.
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
    width: int
    layers: int
    heads: int
    clip_norm: float = 1.0

    experiment: ClassVar[str]
    tokens: ClassVar[str]
    """What the text is made of, in the plural."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        SweepSettings.__post_init__(self)
        for name in ("steps", "every", "batch", "context", "width", "layers", "heads"):
            require_integer("settings", name, getattr(self, name), least=1)
        require(self.width % self.heads == 0, "settings", "width", f"a multiple of `heads`, {self.heads}", self.width)
        require(self.schedule.kind != "dev", "settings", "schedule.kind", "one that counts steps", self.schedule.kind)
        require_number("settings", "clip_norm", self.clip_norm, above=0)
        for name in (f"train_{self.tokens}", f"evaluation_{self.tokens}"):
            if getattr(self, name) is not None:
                require_integer("settings", name, getattr(self, name), least=1)

    def read(self, files: TextFiles, *, test: bool) -> Corpus:
        """Read the text as these settings say."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CharacterSettings(GptSettings):
    """Holds the settings of `gpt-char`.

    Attributes:
        train_characters: How much of the training text is used, from its beginning; None for all.
        evaluation_characters: The same of the validation and the test text.
    """

    train_characters: int | None = None
    evaluation_characters: int | None = None

    experiment = "gpt-char"
    tokens = "characters"

    def read(self, files: TextFiles, *, test: bool) -> Corpus:
        """Read the text by characters."""
        return read_characters(files, self.train_characters, self.evaluation_characters, test=test)


@dataclass(frozen=True, kw_only=True)
class WordSettings(GptSettings):
    """Holds the settings of `gpt-words`.

    Attributes:
        vocabulary: The most words to tell apart; others become <unk>.
        train_words: How much of the training text is used, from its beginning; None for all.
        evaluation_words: The same of the validation and the test text.
    """

    vocabulary: int
    train_words: int | None = None
    evaluation_words: int | None = None

    experiment = "gpt-words"
    tokens = "words"

    def __post_init__(self) -> None:
        GptSettings.__post_init__(self)
        require_integer("settings", "vocabulary", self.vocabulary, least=2)

    def read(self, files: TextFiles, *, test: bool) -> Corpus:
        """Read the text by words."""
        return read_corpus(files, self.vocabulary, self.train_words, self.evaluation_words, test=test)


class GptTask(TextRun[Gpt]):
    """Is one run, `every` steps a leg and a row.

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
        most = min(map(len, (corpus.train, *corpus.held_out.values()))) - 1
        rule = f"at most {most:,}, the shortest text less one"
        require(settings.context <= most, settings.experiment, "context", rule, settings.context)
        self.settings = settings
        self.legs = math.ceil(settings.steps / settings.every)
        measured = len(corpus.valid) / (settings.batch * settings.context)
        self.work = Work(settings.steps, self.legs * measured)
        weights, windows = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
        model = initial(lambda: make_model(settings, len(corpus.vocabulary)), weights).to(best_device())
        optimizer = settings.make_optimizer(arm, model, lr, settings.steps)
        schedule = make_schedule(settings.schedule, optimizer, 1, settings.steps)
        super().__init__(settings.experiment, corpus, model, optimizer, schedule, settings.clip_norm)
        self.windows = torch.Generator().manual_seed(windows)

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
                with not_counted():
                    row[f"{name}_loss"] = mean_loss(self.model, text, self.settings.context)
                self.diverged |= not math.isfinite(row[f"{name}_loss"])
        return (row,)

    def numbers(self) -> dict[str, float]:
        """Count what the run took, and how long the text is."""
        return {**super().numbers(), f"train_{self.settings.tokens}": len(self.corpus.train)}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {**super().state_dict(), "windows": self.windows.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        super().load_state_dict(state)
        self.windows.set_state(state["windows"])

    def _train(self) -> float:
        """Take one step; returns its loss."""
        text, length = self.corpus.train, self.settings.context + 1
        starts = torch.randint(len(text) - length + 1, (self.settings.batch, 1), generator=self.windows)
        tokens = text[starts + torch.arange(length)].to(self.device)
        return self.descend(cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


def make_model(settings: GptSettings, vocabulary: int) -> Gpt:
    """Build the model for a vocabulary of characters or words."""
    return Gpt(vocabulary, settings.context, settings.width, settings.layers, settings.heads)


def make_task(settings: GptSettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool) -> GptTask:
    """Make the run of a variant. While learning rates are tuned the test text is not read."""
    settings = varied(settings, key.variant)
    corpus = settings.read(find_text(data_dir), test=not tuning)
    return GptTask(settings, corpus, key.arm, lr, key.seed)


# Claims, ours ---------------------------------------------------------------------------------------------------------

OURS = "block-adamw"

judge_steps = partial(judge_ends, ours=OURS, others=None, measure=Measure("test_loss", "Test loss", "nats"))
judge_seconds = partial(judge_equal_time, ours=OURS, measure=Measure("valid_loss", "Validation loss", "nats"))

CLAIMS = (
    Claim("Ours: after as many steps, Block-AdamW has a lower loss than AdamW, Muon and SOAP.", judge_steps),
    Claim("Ours: Block-AdamW has the lower loss when the faster of two is done.", judge_seconds),
)


def metrics_of(token: str) -> tuple[Metric, ...]:
    """Return what is measured, in nats per character or word."""
    return tuple(
        Metric(f"{part}_loss", f"{text} loss (nats per {token})")
        for part, text in (("valid", "validation"), ("train", "training"), ("test", "test"))
    )


def _experiment(config: type[GptSettings], title: str, token: str, vocabulary: Callable[[Any], int]) -> Experiment[Any]:
    return Experiment(
        name=config.experiment,
        title=title,
        section=NOT_IN_PAPER,
        config=config,
        axis="step",
        metrics=metrics_of(token),
        variants=lambda settings: settings.variants,
        task=make_task,
        model=lambda settings: make_model(settings, vocabulary(settings)),
        claims=CLAIMS,
        objective="valid_loss",
        measure="test_loss",
    )


EXPERIMENTS = (
    _experiment(
        CharacterSettings, "A small GPT on characters: what people use", "character", lambda _: PLANNED_CHARACTERS
    ),
    _experiment(
        WordSettings,
        "A small GPT on words: what blocks in the embedding do",
        "word",
        lambda settings: settings.vocabulary,
    ),
)
