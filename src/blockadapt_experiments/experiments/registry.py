"""Holds the experiments by name. A module is imported when one of its experiments is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from blockadapt.validation import require
from blockadapt_experiments.core.config import SettingsT, load, scales_of
from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.names import SCALES, nearest
from blockadapt_experiments.parts import register

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
    "gpt-words": "gpt",
}
"""In the order of the paper, then what is beyond it; the file or folder that has it."""

RULE = f"tables `defaults` and one or more of {', '.join(SCALES)}"


OWN: dict[str, Experiment[Any]] = {}
"""Experiments that users have registered."""


def register_experiment(
    experiment: Experiment[SettingsT], code: Callable[..., Any] | None = None
) -> Experiment[SettingsT]:
    """Make an experiment known by its name, to commands too; returns it.

    Its settings are read once at every scale, so that what is wrong with them is told now.

    Args:
        experiment: The experiment.
        code: A function in the file that its runs depend on; None for its `task`.

    Raises:
        ValueError: It cannot have this name, its settings are wrong, or it has none.
    """
    owner = experiment.name
    require(experiment.scales is not None and bool(scales_of(experiment)), owner, "scales", RULE, experiment.scales)
    keys = {metric.key for metric in experiment.metrics}
    named = {name: getattr(experiment, name) for name in ("objective", "measure")}
    for name, metric in {**named, "target": (experiment.target or (None,))[0]}.items():
        require(metric is None or metric in keys, owner, name, f"one of the metrics, {sorted(keys)}", metric)
    for scale in scales_of(experiment):
        experiment.variants(load(experiment, scale))
    register("experiment", owner, EXPERIMENTS, code or experiment.task)
    OWN[owner] = experiment
    return experiment


def get_experiment(name: str) -> Experiment[Any]:
    """Look an experiment up by its name.

    Raises:
        ValueError: There is none; the sentence names the nearest.
    """
    if name in OWN:
        return OWN[name]
    if name not in EXPERIMENTS:
        near = nearest(name, [*EXPERIMENTS, *OWN])
        raise ValueError(f"blockadapt: there is no experiment {name!r}; the nearest is {near!r}.")
    module = import_module(f"{__package__}.{EXPERIMENTS[name]}")
    return next(experiment for experiment in module.EXPERIMENTS if experiment.name == name)
