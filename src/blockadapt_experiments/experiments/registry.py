"""The experiments by name. A module is imported when one of its experiments is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.names import nearest

EXPERIMENTS: dict[str, str] = {
    "toy-adagrad": "toy",
    "toy-landscape": "toy",
    "toy-trajectories": "toy",
    "terms": "terms",
    "mnist-lenet300": "mnist",
    "mnist-lenet5": "mnist",
    "cifar10-densenet": "cifar",
    "cifar100-densenet": "cifar",
    "lm-lstm": "lm",
    "tcvae": "tcvae",
    "cifar10-cnn": "cnn",
    "gpt-char": "gpt",
}
"""In the order of the paper, then what is beyond it; the file or folder that has it."""


def get_experiment(name: str) -> Experiment[Any]:
    """The experiment of this name.

    Raises:
        ValueError: There is none; the sentence names the nearest.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"blockadapt: there is no experiment {name!r}; the nearest is {nearest(name, EXPERIMENTS)!r}.")
    module = import_module(f"{__package__}.{EXPERIMENTS[name]}")
    return next(experiment for experiment in module.EXPERIMENTS if experiment.name == name)
