"""Runs `lm-lstm`: a language model of words, clipped against SGD, Adam, AdaBound, GGT and SOAP.

The paper trains 3 LSTM layers of 500 on Penn Treebank and says little more than that the learning rate is multiplied by
a constant after each epoch without a new best on the validation text, and that SGD is best at 5. The rest is after
Zaremba et al. (2014): 20 contiguous streams, 35 steps of backpropagation with the memory carried on, dropout where
nothing recurs, weights from U(±0.05), gradients clipped by their norm. They sum the loss over the 35 steps; here it is
the mean over tokens, which divides gradients by 35, so their threshold of 5 is 5/35.

Any text will do, see `data/text.py`; the records name it. Perplexities of different texts, or of different
vocabularies, are not comparable.
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

from blockadapt.validation import Described, require, require_integer, require_number
from blockadapt_experiments.claims.claim import Claim, Verdict
from blockadapt_experiments.claims.contests import Part, finals, means, rivals, verdict
from blockadapt_experiments.claims.verdicts import difference, is_below_zero, log_ratio, mean_words, ratio_words
from blockadapt_experiments.contenders.schedules import ScheduleSettings, make_schedule
from blockadapt_experiments.core.clock import not_counted
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.core.training import Work, best_device, initial
from blockadapt_experiments.data.text import Corpus, find_text, read_corpus, streams, unigram_perplexity
from blockadapt_experiments.drawing.bars import Panel, draw_bars
from blockadapt_experiments.drawing.colours import bar_colours
from blockadapt_experiments.experiments.text_run import TextRun
from blockadapt_experiments.models.lstm import LanguageModel, Memory, perplexity
from blockadapt_experiments.results.intervals import interval
from blockadapt_experiments.results.measurements import Metric, Row, RunKey
from blockadapt_experiments.results.summary import Summary

LEG_STEPS = 100
"""Steps between two moments at which a run can be saved; an epoch of Penn Treebank has 1,327."""


@dataclass(frozen=True, kw_only=True)
class LmSettings(Settings):
    """Holds the settings of the experiment.

    Attributes:
        epochs: Passes over the training text.
        schedule: Of the learning rate; "dev" watches the validation text.
        streams: Pieces of the text that a minibatch reads at once.
        unroll: Words of each that a step reads, and that gradients go back through.
        vocabulary: The most words to tell apart; others become <unk>.
        train_tokens: How much of the training text is used, from its beginning; None for all.
        evaluation_tokens: The same of the validation and the test text.
        hidden: Width of the embedding and of the layers.
        layers: Of the LSTM.
        dropout: On connections that do not recur.
        init: Parameters start from U(±init).
        clip_norm: The largest norm of a gradient, over all parameters, of the mean loss of a token.
    """

    epochs: int
    schedule: ScheduleSettings = field(default_factory=lambda: ScheduleSettings(kind="dev"))
    streams: int = 20
    unroll: int = 35
    vocabulary: int
    train_tokens: int | None = None
    evaluation_tokens: int | None = None
    hidden: int
    layers: int = 3
    dropout: float = 0.5
    init: float = 0.05
    clip_norm: float

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for name in ("epochs", "streams", "unroll", "hidden", "layers"):
            require_integer("settings", name, getattr(self, name), least=1)
        require_integer("settings", "vocabulary", self.vocabulary, least=2)
        for name in ("train_tokens", "evaluation_tokens"):
            if getattr(self, name) is not None:
                require_integer("settings", name, getattr(self, name), least=1)
        require_number("settings", "dropout", self.dropout, least=0, below=1)
        for name in ("init", "clip_norm"):
            require_number("settings", name, getattr(self, name), above=0)


class LanguageTask(TextRun[LanguageModel]):
    """Is one run, up to 100 steps a leg; a row an epoch.

    Rows hold epoch, step, the mean loss of a token over the epoch's training, with dropout and while the weights moved,
    and perplexities after it. A loss, gradient or perplexity that is not finite ends the training, and the row of that
    epoch says so. What dropout draws comes from torch's global generator, which the runner keeps.

    Args:
        settings: How to train.
        corpus: The text.
        arm: Name of the optimizer.
        lr: Its learning rate.
        seed: Of the initial weights.
    """

    counters = (*TextRun.counters, "epoch", "position", "loss_sum")

    def __init__(self, settings: LmSettings, corpus: Corpus, arm: str, lr: float, seed: int) -> None:
        self.settings, self.text = settings, streams(corpus.train, settings.streams)
        self.epoch_steps = (self.text.shape[1] - 1) // settings.unroll
        least = settings.streams * (settings.unroll + 1)
        tokens = Described(f"{len(corpus.train):,}")
        require(self.epoch_steps > 0, "lm-lstm", "train_tokens", f"at least {least:,}, a step's", tokens)
        self.legs = settings.epochs * math.ceil(self.epoch_steps / LEG_STEPS)
        measured = sum(map(len, corpus.held_out.values())) / (settings.streams * settings.unroll)
        self.work = Work(settings.epochs * self.epoch_steps, settings.epochs * measured)
        weights = int(np.random.SeedSequence(seed).generate_state(1)[0])
        model = initial(lambda: make_model(settings, len(corpus.vocabulary)), weights).to(best_device())
        optimizer = settings.make_optimizer(arm, model, lr, self.work.steps)
        schedule = make_schedule(settings.schedule, optimizer, settings.epochs, self.epoch_steps)
        super().__init__("lm-lstm", corpus, model, optimizer, schedule, settings.clip_norm)
        self.memory: Memory | None = None
        self.epoch = self.position = 0
        self.loss_sum = 0.0

    def advance(self) -> Sequence[Row]:
        """Train for some steps; at the end of an epoch also measure."""
        if self.diverged:
            return ()
        self.model.train()
        end = min(self.position + LEG_STEPS, self.epoch_steps)
        while self.position < end and not self.diverged:
            self._train()
        return (self._end_epoch(),) if self.diverged or self.position == self.epoch_steps else ()

    def numbers(self) -> dict[str, float]:
        """Count what the run took, and say how hard the text is."""
        corpus, vocabulary = self.corpus, len(self.corpus.vocabulary)
        numbers = {**super().numbers(), "train_tokens": len(corpus.train)}
        for name, text in corpus.held_out.items():
            numbers[f"{name}_tokens"] = len(text)
            numbers[f"{name}_unigram_perplexity"] = unigram_perplexity(corpus.train, text, vocabulary)
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        state = {**super().state_dict(), "memory": self.memory}
        if self.device.type == "cuda":
            state["generator"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        super().load_state_dict(state)
        memory = state["memory"]
        self.memory = None if memory is None else (memory[0].to(self.device), memory[1].to(self.device))
        if "generator" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["generator"].cpu(), self.device)

    def _train(self) -> None:
        """Take one step."""
        start = self.position * self.settings.unroll
        window = self.text[:, start : start + self.settings.unroll + 1].to(self.device)
        scores, memory = self.model(window[:, :-1], self.memory)
        self.loss_sum += self.descend(cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten()))
        self.position += 1
        self.memory = (memory[0].detach(), memory[1].detach())

    def _end_epoch(self) -> Row:
        self.epoch += 1
        row: Row = {"epoch": self.epoch, "step": self.step, "train_loss": self.loss_sum / self.position}
        for name, text in self.corpus.held_out.items():
            with not_counted():
                row[f"{name}_perplexity"] = perplexity(self.model, text, self.corpus.end, self.settings.unroll)
            self.diverged |= not math.isfinite(row[f"{name}_perplexity"])
        self.schedule.after_epoch(row["valid_perplexity"])
        self.memory, self.position, self.loss_sum = None, 0, 0.0
        return row


def make_model(settings: LmSettings, vocabulary: int) -> LanguageModel:
    """Build the model for a vocabulary of words."""
    return LanguageModel(vocabulary, settings.hidden, settings.layers, settings.dropout, settings.init)


def make_task(settings: LmSettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool) -> LanguageTask:
    """Make the run. While learning rates are tuned the test text is not read."""
    cut = (settings.vocabulary, settings.train_tokens, settings.evaluation_tokens)
    corpus = read_corpus(find_text(data_dir), *cut, test=not tuning)
    return LanguageTask(settings, corpus, key.arm, lr, key.seed)


# The paper's claims -------------------------------------------------------------------------------------------------

OURS = "block-adam-clip"
SIMILAR = 1.05
"""Perplexities within this factor of each other are alike."""


def _text(summary: Summary) -> str:
    """Name the text that the finished runs are of; several with "and" between, which no verdict can be about."""
    found = {
        str(summary.arrays(run.key.arm, run.key.variant, run.key.seed).get("corpus", "?"))
        for run in summary.runs
        if run.finished
    }
    return " and ".join(sorted(found))


def _verdict(summary: Summary, parts: Sequence[Part]) -> Verdict:
    text = _text(summary)
    if " and " in text:
        return Verdict(None, f"The runs are of different texts ({text}), whose perplexities are not comparable.")
    return verdict(parts, f"On {text}, {_vocabulary(summary)} words: ")


def _vocabulary(summary: Summary) -> str:
    return f"{summary.settings['vocabulary']:,}"


def judge_curve(summary: Summary) -> Verdict:
    """Judge whether the training loss of the clipped method, averaged over all epochs, is the lowest."""
    parts = []
    for other in rivals(summary, OURS):
        nats = difference(means(summary, OURS, "train_loss"), means(summary, other, "train_loss"))
        words = f"training loss, mean over epochs, differs from {summary.label(other)} by {mean_words(nats)}"
        parts.append(Part(is_below_zero(nats), words))
    return _verdict(summary, parts)


def judge_ggt(summary: Summary) -> Verdict:
    """Judge whether the test perplexities of the clipped method and of GGT are alike."""
    parts = []
    for other in rivals(summary, OURS, ("ggt",)):
        ratios = log_ratio(*(finals(summary, arm, "test_perplexity") for arm in (OURS, other)))
        mean, half = interval(ratios)
        limit = math.log(SIMILAR)
        held = True if abs(mean) + half < limit else False if abs(mean) - half > limit else None
        parts.append(Part(held, f"test perplexity {ratio_words(ratios)} of GGT's, alike if within ×{SIMILAR}"))
    return _verdict(summary, parts)


def judge_lowest(summary: Summary) -> Verdict:
    """Judge whether the clipped method ends with a lower test perplexity than all others but GGT."""
    parts = []
    for other in rivals(summary, OURS):
        if other != "ggt":
            ratios = log_ratio(*(finals(summary, arm, "test_perplexity") for arm in (OURS, other)))
            words = f"test perplexity {ratio_words(ratios)} of that of {summary.label(other)}"
            parts.append(Part(is_below_zero(ratios), words))
    return _verdict(summary, parts)


CLAIMS = (
    Claim("Section 5: Adam with spectrum clipping has the best learning curve of all.", judge_curve),
    Claim("Section 5: its perplexity is similar to that of GGT.", judge_ggt),
    Claim("Section 5: its perplexity is lower than that of all others.", judge_lowest),
)


def draw(summary: Summary, directory: Path) -> Sequence[Path]:
    """Draw the test perplexities after training, under the name of the text."""
    found = {arm: list(finals(summary, arm, "test_perplexity").values()) for arm in summary.arms}
    bars = {summary.label(arm): interval(values) for arm, values in found.items() if values}
    settings = summary.settings
    model = f"{settings['layers']} × {settings['hidden']} LSTM, {settings['epochs']} epochs"
    seeds = f"{len(summary.seeds)} seeds, mean and 95% interval" if len(summary.seeds) > 1 else "one seed"
    panel = Panel(
        f"{summary.scale} scale: {model}, {_vocabulary(summary)} words,\n{seeds}",
        bars,
        bar_colours(summary.optimizers, summary.label),
    )
    title = f"Test perplexity on {_text(summary)}\n(not to be compared with other texts)"
    path = directory / f"{summary.experiment.name}-perplexity.png"
    return [draw_bars(title, "perplexity per token", [panel], path)] if bars else []


METRICS = (
    Metric("train_loss", "training loss (nats per token)"),
    Metric("test_perplexity", "test perplexity (per token)", log=True),
    Metric("valid_perplexity", "validation perplexity (per token)", log=True),
)

EXPERIMENTS = (
    Experiment(
        name="lm-lstm",
        title="LSTM language model: spectrum clipping",
        section="Section 5, figure 5",
        config=LmSettings,
        axis="epoch",
        metrics=METRICS,
        task=make_task,
        model=lambda settings: make_model(settings, settings.vocabulary),
        claims=CLAIMS,
        objective="valid_perplexity",
        measure="test_perplexity",
        draw=draw,
    ),
)
