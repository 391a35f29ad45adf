"""Train a classifier, an epoch a leg.

At a given seed every optimizer starts from the same weights and sees the same minibatches, changed in the same way. All
numbers come from the run's own generators; what a model draws itself (dropout) comes from torch's global one, which the
runner keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from blockadapt.validation import require, require_integer
from blockadapt_experiments.contenders.catalogue import LOST
from blockadapt_experiments.contenders.memory import state_bytes_of
from blockadapt_experiments.contenders.schedules import BatchSettings, ScheduleSettings, make_schedule
from blockadapt_experiments.core.clock import not_counted
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.results.measurements import Outcome, Row

ModelT = TypeVar("ModelT", bound=nn.Module)

CPU = torch.device("cpu")

MOST_EPOCHS = 1_000_000
"""Far more than anybody trains for; the plan of a run has a number for each."""

EVALUATION_BATCH = 1000
"""Images measured at once: enough to keep the cores busy, few enough to stay in the memory of a small machine."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Says how a classifier is trained.

    Attributes:
        epochs: Passes over the training images.
        batch: Size of the minibatches; the last of an epoch may be smaller.
        schedule: Of the learning rate.
        measured_examples: The most training images, from the first on, that each epoch ends with measuring.
        validation_fraction: Share of the training images that is held out where learning rates are tuned, or where the
            schedule needs it.
    """

    epochs: int
    batch: BatchSettings = field(default_factory=BatchSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    measured_examples: int = 10_000
    validation_fraction: float = 1 / 6

    def __post_init__(self) -> None:
        require_integer("training", "epochs", self.epochs, least=1, most=MOST_EPOCHS)
        require_integer("training", "measured_examples", self.measured_examples, least=1)
        ok = 0 < self.validation_fraction < 1
        require(ok, "training", "validation_fraction", "in (0, 1)", self.validation_fraction)

    def steps(self, examples: int) -> list[int]:
        """Count the minibatches in each epoch."""
        return [math.ceil(examples / self.batch.batch_size(epoch)) for epoch in range(self.epochs)]


class MakeOptimizer(Protocol):
    """Makes an optimizer for a model that will take `steps` steps."""

    def __call__(self, model: nn.Module, /, *, steps: int) -> Optimizer:
        """Make it."""
        ...


class Work(NamedTuple):
    """Counts what a run will do in all: steps of the optimizer, and minibatches that it only measures on."""

    steps: int
    measured: float


@dataclass(frozen=True)
class Sets:
    """Holds examples to train on, and those to measure on by their name in the rows ("validation", "test")."""

    train: Examples
    held_out: dict[str, Examples]


def hold_out(train: Examples, test: Examples, settings: TrainingSettings, tuning: bool) -> Sets:
    """Make the sets of a run. While tuning, the last training images are for validation, and there is no test set.

    Raises:
        ValueError: The settings ask for more images than there are, or for so few that none can be held out.
    """
    for name, examples in (("train_examples", train), ("test_examples", test)):
        wanted = getattr(settings, name, None)  # settings of an experiment on a part of its images
        require(
            wanted is None or wanted <= len(examples),
            "training",
            name,
            f"at most {len(examples)}, as many as there are",
            wanted,
        )
    held_out = {} if tuning else {"test": test}
    if tuning or settings.schedule.kind == "dev":
        count = max(1, round(settings.validation_fraction * len(train)))
        require(count < len(train), "training", "train_examples", "more than are held out for validation", len(train))
        held_out["validation"] = Examples(train.images[-count:], train.labels[-count:])
        train = Examples(train.images[:-count], train.labels[:-count])
    return Sets(train, held_out)


class Classification:
    """Does one run: it trains a model on its data with an optimizer.

    Rows hold epoch, step, and loss (mean cross-entropy) and accuracy on training images and on each set held out.
    A loss or a gradient that is not finite ends the training: the row of that epoch says so, and there are no more.

    Args:
        model: Makes the model.
        sets: The data, images in any type that `prepare` takes.
        settings: How to train.
        optimizer: Makes the optimizer for the model and the number of `steps`.
        seed: Of initial weights, order of minibatches and changes to images.
        prepare: Turns a batch of images into what the model takes.
        augment: Changes a batch of images at random, by this generator.
        device: Where the model is trained.
        autocast: Whether the model computes in bfloat16 where torch finds that safe; weights and optimizer do not.
        evaluation_batch: Images measured at once; None for `EVALUATION_BATCH`.
    """

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module],
        sets: Sets,
        settings: TrainingSettings,
        optimizer: MakeOptimizer,
        seed: int,
        prepare: Callable[[Tensor], Tensor],
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        device: torch.device = CPU,
        autocast: bool = False,
        evaluation_batch: int | None = None,
    ) -> None:
        self.legs = settings.epochs
        self.sets, self.settings = sets, settings
        self.prepare, self.augment = prepare, augment
        self.device, self.autocast, self.evaluation_batch = device, autocast, evaluation_batch
        weights, order, changes = (int(word) for word in np.random.SeedSequence(seed).generate_state(3))
        self.model = initial(model, weights).to(device)
        steps = settings.steps(len(sets.train))
        measured = sum(map(len, self._measured().values())) / settings.batch.size
        self.work = Work(sum(steps), settings.epochs * measured)
        self.optimizer = optimizer(self.model, steps=sum(steps))
        self.schedule = make_schedule(settings.schedule, self.optimizer, settings.epochs, steps[0])
        self.order = torch.Generator().manual_seed(order)
        self.changes = torch.Generator().manual_seed(changes)
        self.epoch = self.step = self.state_bytes = 0
        self.diverged = False

    def advance(self) -> Sequence[Row]:
        """Train for an epoch and measure."""
        if self.diverged:
            return ()
        self.model.train()
        for images, labels in self._minibatches():
            if not self._train(images, labels):
                self.diverged = True
                break
        self.epoch += 1
        row: Row = {"epoch": self.epoch, "step": self.step}
        for name, examples in self._measured().items():
            row[f"{name}_loss"], row[f"{name}_accuracy"] = self._measure(examples)
        self.schedule.after_epoch(row.get("validation_loss"))
        return (row,)

    def outcome(self) -> Outcome:
        """Return what the run took, and the weights it ended with."""
        weights = parameters_to_vector(self.model.parameters()).detach().cpu().numpy()
        numbers = {
            "parameters": weights.size,
            "steps": self.step,
            "state_bytes": self.state_bytes,
            "final_state_bytes": state_bytes_of(self.optimizer),
            "diverged": int(self.diverged),
        }
        return Outcome(numbers, {"weights": weights})

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next epoch depends on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "order": self.order.get_state(),
            "changes": self.changes.get_state(),
            "epoch": self.epoch,
            "step": self.step,
            "state_bytes": self.state_bytes,
            "diverged": self.diverged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.order.set_state(state["order"])
        self.changes.set_state(state["changes"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.state_bytes, self.diverged = state["state_bytes"], state["diverged"]

    def _minibatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        train = self.sets.train
        for rows in torch.randperm(len(train), generator=self.order).split(self.settings.batch.batch_size(self.epoch)):
            images = train.images[rows]
            if self.augment:
                images = self.augment(images, self.changes)
            yield self.prepare(images.to(self.device)), train.labels[rows].to(self.device)

    def _train(self, images: Tensor, labels: Tensor) -> bool:
        """Take one step; return False if that cannot be, because the loss or a gradient is not finite."""
        self.optimizer.zero_grad()
        loss = cross_entropy(self._scores(images), labels)
        if not math.isfinite(loss.item()):
            return False
        loss.backward()
        try:
            self.optimizer.step()
        except LOST:
            return False
        self.schedule.after_step()
        self.step += 1
        if self.step == 1:
            self.state_bytes = state_bytes_of(self.optimizer)
        return True

    def _scores(self, images: Tensor) -> Tensor:
        """Compute the model's output, in the precision of its weights."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            scores: Tensor = self.model(images)
        return scores.float() if self.autocast else scores

    def _measured(self) -> dict[str, Examples]:
        """Return what an epoch is measured on, by its name in the rows."""
        train, count = self.sets.train, self.settings.measured_examples
        return {"train": Examples(train.images[:count], train.labels[:count]), **self.sets.held_out}

    @not_counted()
    @torch.no_grad()
    def _measure(self, examples: Examples) -> tuple[float, float]:
        """Compute mean loss and accuracy, summed over batches in float64."""
        self.model.eval()
        loss, correct = 0.0, 0
        size = self.evaluation_batch or EVALUATION_BATCH
        for start in range(0, len(examples), size):
            rows = slice(start, start + size)
            labels = examples.labels[rows].to(self.device)
            output = self._scores(self.prepare(examples.images[rows].to(self.device)))
            loss += cross_entropy(output, labels, reduction="sum").item()
            correct += int((output.argmax(dim=1) == labels).sum())
        return loss / len(examples), correct / len(examples)


def best_device() -> torch.device:
    """Choose a GPU if there is one."""
    return torch.device("cuda") if torch.cuda.is_available() else CPU


def initial(build: Callable[[], ModelT], seed: int) -> ModelT:
    """Build the model with the weights of this seed. Torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
