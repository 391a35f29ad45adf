"""Holds the toy network's experiments: `toy-adagrad`, `toy-landscape` and `toy-trajectories`."""

from __future__ import annotations

from typing import Any

from blockadapt_experiments.core.experiment import Experiment
from blockadapt_experiments.experiments.toy.adagrad import TOY_ADAGRAD
from blockadapt_experiments.experiments.toy.landscape import TOY_LANDSCAPE
from blockadapt_experiments.experiments.toy.trajectories import TOY_TRAJECTORIES

EXPERIMENTS: tuple[Experiment[Any], ...] = (TOY_ADAGRAD, TOY_LANDSCAPE, TOY_TRAJECTORIES)
