"""Runs an optimizer, the library's or another, on a point whose gradient is computed by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from blockadapt import BlockAdagrad
from blockadapt_experiments.core.training import MakeOptimizer
from blockadapt_experiments.experiments.toy.network import Array


class Descent:
    """Is a point in float64 and the optimizer that moves it.

    AdaGrad follows the paper's equation (1), G ← G + g gᵀ and x ← x − α (G^{1/2} + δI)^{-1} g. The library's has the
    average G/t, α/√t and so δ√t in the place of δ: it is the same with δ/√t at step t, which is what it gets here.

    Args:
        start: Where the point starts, [P].
        optimizer: Makes the optimizer.
        steps: How many steps there will be.
    """

    def __init__(self, start: Array, optimizer: MakeOptimizer, steps: int) -> None:
        model = _Point(start)
        self.taken = 0
        self.x: Array = model.x.detach().numpy()  # the optimizer's own memory: it moves in place
        self._parameter = model.x
        self._optimizer = optimizer(model, steps=steps)
        self._eps = self._optimizer.defaults.get("eps", 0.0)

    def step(self, gradient: Array) -> None:
        """Take one step with this gradient [P]."""
        self.taken += 1
        self._parameter.grad = torch.from_numpy(gradient)
        if isinstance(self._optimizer, BlockAdagrad):
            for group in self._optimizer.param_groups:
                group["eps"] = self._eps / math.sqrt(self.taken)
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return where it is and all that its next step depends on."""
        x = self._parameter.detach().clone()
        return {"taken": self.taken, "x": x, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.taken = state["taken"]
        with torch.no_grad():
            self._parameter.copy_(state["x"])
        self._optimizer.load_state_dict(state["optimizer"])


class _Point(nn.Module):
    def __init__(self, start: Array) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start))
