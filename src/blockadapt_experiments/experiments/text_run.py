"""Says what runs of `gpt-char`, `gpt-words` and `lm-lstm` share: a model of a text, its steps, and its state."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Generic

import numpy as np
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from blockadapt.validation import Described, require
from blockadapt_experiments.contenders.catalogue import LOST
from blockadapt_experiments.contenders.memory import state_bytes_of
from blockadapt_experiments.contenders.schedules import Schedule
from blockadapt_experiments.core.training import ModelT
from blockadapt_experiments.data.text import Corpus
from blockadapt_experiments.results.measurements import Outcome


class TextRun(Generic[ModelT]):
    """Is a model of a text in training. A loss or gradient that is not finite ends it: `diverged` says so.

    Args:
        experiment: The name of the experiment.
        corpus: The text.
        model: The model, where it is trained.
        optimizer: Its optimizer.
        schedule: Of the learning rate.
        clip_norm: The largest norm of a gradient, over all parameters.
    """

    counters: ClassVar[tuple[str, ...]] = ("step", "state_bytes", "diverged")
    """The attributes that the state keeps as they are."""

    def __init__(
        self,
        experiment: str,
        corpus: Corpus,
        model: ModelT,
        optimizer: Optimizer,
        schedule: Schedule,
        clip_norm: float,
    ) -> None:
        self.corpus, self.model, self.optimizer, self.schedule = corpus, model, optimizer, schedule
        self.device = next(model.parameters()).device
        self._experiment, self._clip_norm = experiment, clip_norm
        self.step = self.state_bytes = 0
        self.diverged = False

    def descend(self, loss: Tensor) -> float:
        """Take one step down this loss; returns its value, nan if the step could not be taken."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), self._clip_norm)
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

    def numbers(self) -> dict[str, float]:
        """Count what the run took."""
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "steps": self.step,
            "state_bytes": self.state_bytes,
            "final_state_bytes": state_bytes_of(self.optimizer),
            "diverged": int(self.diverged),
            "vocabulary": len(self.corpus.vocabulary),
        }

    def outcome(self) -> Outcome:
        """Leave the numbers, and the name of the text."""
        return Outcome(self.numbers(), {"corpus": np.array(self.corpus.name)})

    def state_dict(self) -> dict[str, Any]:
        """Give what the next step depends on, but for what only one of the experiments has."""
        return {
            "corpus": self.corpus.digest,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            **{name: getattr(self, name) for name in self.counters},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: It was taken with another text.
        """
        same = state["corpus"] == self.corpus.digest
        rule = "the text that the run was begun with"
        require(same, self._experiment, "data-dir", rule, Described(self.corpus.name))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for name in self.counters:
            setattr(self, name, state[name])
