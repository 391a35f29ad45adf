"""A whole experiment of your own: settings, a run cut into legs, metrics and a claim.

blockadapt run valley --load examples/laboratory/valley.py --scale smoke --out runs/valley
blockadapt report runs/valley --load examples/laboratory/valley.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockadapt_experiments import (
    Claim,
    Experiment,
    Metric,
    Outcome,
    Row,
    RunKey,
    Settings,
    Summary,
    Verdict,
    register_experiment,
)


@dataclass(frozen=True, kw_only=True)
class ValleySettings(Settings):
    """What can be set, beside what every experiment has.

    Attributes:
        steps: Of a run.
        every: Steps in a leg; a run can be stopped between two legs.
        bend: How much the valley bends.
    """

    steps: int
    every: int = 10
    bend: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1 or self.steps < self.every:
            raise ValueError(f"valley: `steps` must be at least `every` >= 1, got {self.steps} and {self.every}.")


class Point(nn.Module):
    """Two weights at the top of Rosenbrock's valley, f(x, y) = (1 − x)² + bend (y − x²)²."""

    def __init__(self, seed: int, bend: float) -> None:
        super().__init__()
        noise = torch.randn(2, generator=torch.Generator().manual_seed(seed))
        self.weights = nn.Parameter(torch.tensor([-1.0, 1.0]) + 0.1 * noise)
        self.bend = bend

    def forward(self) -> torch.Tensor:
        """Give the height."""
        x, y = self.weights
        return (1 - x) ** 2 + self.bend * (y - x**2) ** 2


class ValleyTask:
    """One run, `every` steps a leg. Its state is plain tensors and numbers, so that a stopped run ends the same."""

    def __init__(self, settings: ValleySettings, key: RunKey, lr: float) -> None:
        self.settings, self.step = settings, 0
        self.legs = settings.steps // settings.every
        self.point = Point(key.seed, settings.bend)
        self.optimizer = settings.make_optimizer(key.arm, self.point, lr, settings.steps)

    def advance(self) -> Sequence[Row]:
        """Do the next leg; returns what was measured."""
        for _ in range(self.settings.every):
            self.optimizer.zero_grad()
            self.point().backward()
            self.optimizer.step()
            self.step += 1
        return ({"step": self.step, "height": self.point().item()},)

    def outcome(self) -> Outcome:
        """Leave the last weights."""
        return Outcome({"steps": self.step}, {"weights": self.point.weights.detach().numpy()})

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next leg depends on."""
        return {"step": self.step, "point": self.point.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.step = state["step"]
        self.point.load_state_dict(state["point"])
        self.optimizer.load_state_dict(state["optimizer"])


def make_task(settings: ValleySettings, key: RunKey, lr: float, data_dir: Path | None, tuning: bool) -> ValleyTask:
    """Make a run. While learning rates are tuned it must not touch test data; here there are none."""
    return ValleyTask(settings, key, lr)


def judge(summary: Summary) -> Verdict:
    """Compare the means of the last heights."""
    ends = [summary.final(arm, "height").mean() for arm in ("block-adam", "adam")]
    return Verdict(bool(ends[0] < ends[1]), f"Block-Adam ends at {ends[0]:.3g}, Adam at {ends[1]:.3g}.")


register_experiment(
    Experiment(
        name="valley",
        title="Rosenbrock's valley: who comes down furthest?",
        section="not in the paper",
        config=ValleySettings,
        axis="step",
        metrics=(Metric("height", "height", log=True),),
        task=make_task,
        model=lambda settings: Point(0, settings.bend),
        claims=(Claim("Ours: with both weights in one block, Block-Adam comes further down than Adam.", judge),),
        objective="height",
        measure="height",
        scales={
            "defaults": {"optimizers": ["adam", "block-adam"], "lr": {"adam": 0.05, "block-adam": 0.05}},
            "smoke": {"seeds": [0], "steps": 50, "tune": {"trials": 2, "low": 0.01, "high": 0.1}},
            "laptop": {"seeds": [0, 1, 2], "steps": 1000},
        },
    )
)
