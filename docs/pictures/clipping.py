"""Draw the clip interval as it closes over a spectrum: `python docs/pictures/clipping.py` writes clipping.svg.

The bounds and the spectra are those of a real run: a small network under `BlockAdam` with a `SpectrumClip`.
"""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from pictures import tidy, write_svg
from torch import nn

from blockadapt import BlockAdam, SpectrumClip
from blockadapt.moments import unpack
from blockadapt_experiments.drawing.colours import STYLES

STEPS, LR = 2000, 1e-3
CLIP = SpectrumClip(final_lr=0.1, gamma=0.02)
SHARES = (0.02, 0.25, 0.5, 0.75, 0.98)
"""Quantiles of the spectrum that are drawn."""


def spectra() -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """At some steps, over all blocks: the quantiles of α/(√λ̂ + δ), before the clip and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))
    optimizer = BlockAdam(model.parameters(), lr=LR, clip=CLIP)
    teacher, at, before, after = torch.randn(20, 10), [], [], []
    for step in range(1, STEPS + 1):
        x = torch.randn(32, 20)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1)).backward()
        optimizer.step()
        if step in (1, 2, 3, 5) or step % max(1, 10 ** (len(str(step)) - 1) // 2) == 0:
            packed = optimizer.state[model[0].weight]["second_moment"]
            eigenvalues = torch.linalg.eigvalsh(unpack(packed, 10).double()).clamp_min(0) / (1 - 0.999**step)
            wanted = LR / (1 - 0.9**step) / (eigenvalues.sqrt() + 1e-4)
            lower, upper = CLIP.bounds(step)
            shares = torch.tensor(SHARES, dtype=torch.float64)
            at.append(step)
            before.append(wanted.flatten().quantile(shares))
            after.append(wanted.clamp(lower, upper).flatten().quantile(shares))
    return at, before, after


def main() -> None:
    """Draw what the block method wants, what it may take, and where it ends."""
    at, before, after = spectra()
    colour = STYLES["block-adam-clip"].line()["color"]
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    panel = figure.subplots()
    steps = sorted({round(STEPS ** (k / 200)) for k in range(201)})
    lower, upper = zip(*map(CLIP.bounds, steps), strict=True)
    panel.fill_between(steps, lower, upper, color="#F0E6C8", label="interval [λₗ, λᵤ]", gid="interval")
    for inner, outer, alpha in ((1, 3, 0.45), (0, 4, 0.2)):
        low, high = [q[inner] for q in after], [q[outer] for q in after]
        panel.fill_between(at, low, high, color=colour, alpha=alpha, linewidth=0)
    panel.plot(at, [q[2] for q in after], color=colour, linewidth=1.8, label="step sizes s: median, middle 50% and 96%")
    for share in (0, 4):
        label = "without the clip: middle 96%" if share == 0 else None
        panel.plot(at, [q[share] for q in before], color=colour, linewidth=0.9, linestyle=(0, (4, 2)), label=label)
    black = STYLES["sgd"].line()["color"]
    panel.axhline(CLIP.final_lr, color=black, linewidth=1, label="α*: where SGD would step", gid="final-lr")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(1, STEPS)
    panel.set_ylim(1e-3, 12)
    panel.set_xlabel("step")
    panel.set_ylabel("step size in an eigendirection")
    tidy(panel)
    panel.legend(frameon=False, fontsize=9, loc="upper right")
    write_svg(figure, "clipping.svg")


if __name__ == "__main__":
    main()
