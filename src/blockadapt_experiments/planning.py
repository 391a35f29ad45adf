"""What the library's `plan` says about the model of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from blockadapt import plan
from blockadapt.optimizers import BlockOptimizer
from blockadapt.planning import Plan
from blockadapt_experiments.config import load
from blockadapt_experiments.contenders import CONTENDERS, make_optimizer
from blockadapt_experiments.experiments import EXPERIMENTS, get_experiment


def plan_experiment(name: str, optimizer: str, scale: str, changes: Sequence[str]) -> Plan:
    """What this block method will do with the model of this experiment.

    Raises:
        ValueError: There is no such experiment or optimizer, or it is no block method, or has no model to cut up.
    """
    experiment = get_experiment(name)
    models = getattr(import_module(f"{get_experiment.__module__}.{EXPERIMENTS[name]}"), "MODELS", {})
    if name not in models:
        raise ValueError(f"plan: {name} has no model to plan.")
    settings = load(experiment, scale, [*changes, f"optimizers=['{optimizer}']"])
    made = make_optimizer(optimizer, models[name](settings), CONTENDERS[optimizer].lr, settings.optimizer, steps=1)
    if not isinstance(made, BlockOptimizer):
        raise ValueError(f"plan: `optimizer` must be one of the block methods, got {optimizer!r}.")
    return plan(made)
