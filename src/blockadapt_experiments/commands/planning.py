"""Ask the library's `plan` about the model of an experiment."""

from __future__ import annotations

from collections.abc import Sequence

from blockadapt import plan
from blockadapt.optimizers import BlockOptimizer
from blockadapt.planning import Plan
from blockadapt_experiments.core.config import load
from blockadapt_experiments.experiments.registry import get_experiment


def plan_experiment(name: str, optimizer: str, scale: str, changes: Sequence[str]) -> Plan:
    """Tell what this block method will do with the model of this experiment.

    Raises:
        ValueError: There is no such experiment or optimizer, or it is no block method, or has no model to cut up.
    """
    experiment = get_experiment(name)
    if experiment.model is None:
        raise ValueError(f"plan: {name} has no model to plan.")
    settings = load(experiment, scale, [*changes, f"optimizers=['{optimizer}']"])
    made = settings.make_optimizer(optimizer, experiment.model(settings), settings.first_lr(optimizer), steps=1)
    if not isinstance(made, BlockOptimizer):
        raise ValueError(f"plan: `optimizer` must be one of the block methods, got {optimizer!r}.")
    return plan(made)
