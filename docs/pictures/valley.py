"""Draw how SGD, Adam and Block-Adam go down a correlated valley: `python docs/pictures/valley.py` writes valley.gif.

The loss is E ½ (x + ξ)ᵀ H (x + ξ) over noise ξ of deviation 0.2, H with condition 40. Each optimizer has the best
learning rate of one grid, by the mean loss over the steps shown and over five runs other than the one drawn; all fall
linearly to zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure
from pictures import HERE

from blockadapt import BlockAdam
from blockadapt_experiments.drawing.colours import STYLES

STEPS, NOISE, DRAWN = 60, 0.2, 0
START = (-1.72, -0.86)
RATES = tuple(10 ** (k / 4) for k in range(-9, 0))
ANGLE, CURVATURES = math.radians(38), (1.0, 40.0)
LABELS = {"sgd": "SGD", "adam": "Adam", "block-adam": "Block-Adam"}

turn = torch.tensor([[math.cos(ANGLE), -math.sin(ANGLE)], [math.sin(ANGLE), math.cos(ANGLE)]])
HESSIAN = turn @ torch.diag(torch.tensor(CURVATURES)) @ turn.T


def make(name: str, x: torch.Tensor, lr: float) -> torch.optim.Optimizer:
    """SGD has no momentum, so that each path shows its own step."""
    if name == "sgd":
        return torch.optim.SGD([x], lr=lr)
    if name == "adam":
        return torch.optim.Adam([x], lr=lr, betas=(0.5, 0.9))
    return BlockAdam([x], lr=lr, betas=(0.5, 0.9), grouping="tensor", backend="eigh")


def path(name: str, lr: float, seed: int) -> torch.Tensor:
    """Return the points that it visits, the start first."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.tensor(START, requires_grad=True)
    optimizer, points = make(name, x, lr), [x.detach().clone()]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / STEPS)
        optimizer.zero_grad()
        loss(x + NOISE * torch.randn(2, generator=draw)).backward()
        optimizer.step()
        points.append(x.detach().clone())
    return torch.stack(points)


def loss(points: torch.Tensor) -> torch.Tensor:
    """½ xᵀ H x of each point."""
    return 0.5 * (points @ HESSIAN * points).sum(-1)


def best_rate(name: str) -> float:
    """Find the learning rate with the lowest mean loss over all steps, over seeds that are not drawn."""

    def mean_loss(lr: float) -> float:
        value = torch.stack([loss(path(name, lr, seed)) for seed in range(1, 6)]).mean().item()
        return value if math.isfinite(value) else math.inf

    return min(RATES, key=mean_loss)


def landscape(panel: Any) -> None:
    """Contours of the loss, evenly spaced in its root."""
    x, y = np.meshgrid(np.linspace(-2.2, 0.9, 120), np.linspace(-1.9, 0.9, 120))
    grid = torch.tensor(np.stack([x, y], -1), dtype=torch.float32)
    levels = np.linspace(0, 4, 11) ** 2
    panel.contourf(x, y, loss(grid).numpy(), levels=levels, cmap="Greys", alpha=0.55, extend="max")
    panel.plot(0, 0, marker="*", markersize=11, color="#B08A3E", zorder=5)
    panel.set_xticks([])
    panel.set_yticks([])
    panel.set_xlabel("first weight", fontsize=8)
    panel.set_ylabel("second weight", fontsize=8)
    panel.set_aspect("equal")


def main() -> None:
    """Draw one panel for each optimizer, all at the same step."""
    rates = {name: best_rate(name) for name in LABELS}
    paths = {name: path(name, lr, DRAWN).numpy() for name, lr in rates.items()}
    figure = Figure(figsize=(8.4, 2.95), dpi=90, layout="constrained")
    lines = {}
    for panel, (name, label) in zip(figure.subplots(1, 3), LABELS.items(), strict=True):
        landscape(panel)
        panel.set_title(f"{label}, learning rate {rates[name]:.2g}", fontsize=9)
        colour = STYLES[name].line()["color"]
        (line,) = panel.plot([], [], color=colour, linewidth=1.4)
        (dot,) = panel.plot([], [], "o", color=colour, markersize=6)
        paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
        text = panel.text(0.03, 0.92, "", transform=panel.transAxes, fontsize=9, bbox=paper)
        lines[name] = line, dot, text

    def frame(number: int) -> list[Any]:
        step = min(number, STEPS)
        for name, (line, dot, text) in lines.items():
            seen = paths[name][: step + 1]
            line.set_data(seen[:, 0], seen[:, 1])
            dot.set_data(seen[-1:, 0], seen[-1:, 1])
            text.set_text(f"step {step}, loss {loss(torch.tensor(seen[-1])):.2g}")
        return []

    pause = 15
    FuncAnimation(figure, frame, frames=STEPS + pause).save(HERE / "valley.gif", writer=PillowWriter(fps=10))
    for name, points in paths.items():
        mean = loss(torch.tensor(points)).mean().item()
        print(f"{LABELS[name]}: lr {rates[name]:.3g}, mean loss {mean:.3g}")


if __name__ == "__main__":
    main()
