"""Problems of the toy network, and their loss as torch has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blockadapt_experiments.core.config import load
from blockadapt_experiments.experiments.toy.network import (
    Problem,
    ToySettings,
    draw_problem,
)
from blockadapt_experiments.experiments.toy.trajectories import TOY_TRAJECTORIES


def problem(seed: int = 0, **settings: Any) -> Problem:
    return draw_problem(np.random.default_rng(seed), ToySettings(optimizers=("adagrad",), seeds=(0,), **settings))


def torch_loss(problem: Problem, biases: bool, rows: Sequence[int] | slice = slice(None)) -> Callable[[Tensor], Tensor]:
    """The loss as a torch function of the flat weights, built from torch's own layers."""
    inputs = torch.from_numpy(problem.inputs[rows])[:, :2]
    labels = torch.from_numpy(problem.labels[rows])
    width = 3 if biases else 2

    def loss(weights: Tensor) -> Tensor:
        h = inputs
        for layer, W in enumerate(weights.split([2 * width, 2 * width, width])):
            W = W.view(-1, width)
            a = nn.functional.linear(h, W[:, :2], W[:, 2] if biases else None)
            h = torch.relu(a) if layer < 2 else a
        return nn.functional.binary_cross_entropy_with_logits(h[:, 0], labels)

    return loss


def trajectory_settings(*changes: str) -> Any:
    return load(TOY_TRAJECTORIES, "smoke", ["steps=1100", "every=50", *changes])
