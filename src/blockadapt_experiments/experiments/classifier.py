"""Makes an experiment of a classifier of your own: a model and a data set are enough, the rest is as in `mnist.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockadapt.validation import require_integer
from blockadapt_experiments.claims.claim import Claim
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.core.settings import Settings
from blockadapt_experiments.core.training import Classification, TrainingSettings, hold_out
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.data.images import load_images, require_images
from blockadapt_experiments.experiments.registry import register_experiment
from blockadapt_experiments.names import NOT_IN_PAPER
from blockadapt_experiments.results.measurements import Metric, RunKey

METRICS = (
    Metric("train_loss", "training loss", log=True),
    Metric("test_accuracy", "test accuracy", better="high"),
    Metric("test_loss", "test loss", log=True),
    Metric("train_accuracy", "training accuracy", better="high"),
    Metric("validation_loss", "validation loss", log=True),
    Metric("validation_accuracy", "validation accuracy", better="high"),
)


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings(Settings, TrainingSettings):
    """Holds the settings of a classifier's experiment.

    Attributes:
        data: The name of the data set.
        train_examples: The number of training examples, from the first on; None for all.
        test_examples: The number of test examples, from the first on; None for all.
    """

    data: str
    train_examples: int | None = None
    test_examples: int | None = None

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        TrainingSettings.__post_init__(self)
        require_images("settings", self.data)
        for name in ("train_examples", "test_examples"):
            if getattr(self, name) is not None:
                require_integer("settings", name, getattr(self, name), least=1)


def as_floats(images: Tensor) -> Tensor:
    """Turn bytes into numbers in [0, 1), and leave what is no bytes as it is."""
    return images.to(torch.float32).div_(256) if images.dtype == torch.uint8 else images


def register_classifier(
    name: str,
    *,
    title: str,
    model: Callable[[], nn.Module],
    scales: Mapping[str, Mapping[str, Any]],
    section: str = NOT_IN_PAPER,
    prepare: Callable[[Tensor], Tensor] = as_floats,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    claims: Sequence[Claim] = (),
    target: float | None = None,
) -> Experiment[ClassifierSettings]:
    """Make an experiment known that trains a classifier, an epoch a leg; returns it.

    Args:
        name: As on the command line.
        title: One line for people.
        model: Makes the network. Its weights come from torch's generator, which has the run's seed then.
        scales: Settings: a table `defaults`, and one for each of the scales. `data` names the data set.
        section: Where the paper has it.
        prepare: Turns a batch of images into what the model takes.
        augment: Changes a batch of images at random, by this generator.
        claims: What is to be judged.
        target: The test accuracy to be reached for "epochs to target".

    Raises:
        ValueError: The name is taken, or the settings are wrong.
    """

    def make(
        settings: ClassifierSettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool
    ) -> Classification:
        train, test = load_images(settings.data, data_dir)
        return Classification(
            model=model,
            sets=hold_out(
                _first(train, settings.train_examples), _first(test, settings.test_examples), settings, tuning
            ),
            settings=settings,
            optimizer=partial(settings.make_optimizer, key.arm, lr=lr),
            seed=key.seed,
            prepare=prepare,
            augment=augment,
        )

    experiment = Experiment(
        name=name,
        title=title,
        section=section,
        config=ClassifierSettings,
        axis="epoch",
        metrics=METRICS,
        task=make,
        model=lambda settings: model(),
        claims=claims,
        objective="validation_accuracy",
        measure="test_accuracy",
        target=None if target is None else ("test_accuracy", target),
        scales=scales,
    )
    return register_experiment(experiment, code=model)


def _first(examples: Examples, count: int | None) -> Examples:
    return Examples(examples.images[:count], examples.labels[:count])
