"""A data set and a model of your own: two spirals, told apart by a small network.

blockadapt run spirals --load examples/laboratory/spirals.py --scale smoke --out runs/spirals
blockadapt report runs/spirals --load examples/laboratory/spirals.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from blockadapt_experiments import Examples, register_classifier, register_images


@register_images("two-spirals")
def two_spirals(data_dir: Path | None) -> tuple[Examples, Examples]:
    """Draw points on two spirals; nothing is read from `data_dir`."""
    generator = torch.Generator().manual_seed(0)  # the data are the same for every seed of a run
    turns = torch.rand(600, generator=generator) * 3 * torch.pi
    labels = torch.arange(600) % 2
    angles = turns + labels * torch.pi
    points = turns[:, None] * torch.stack([angles.cos(), angles.sin()], dim=1) / 10
    points += 0.02 * torch.randn(points.shape, generator=generator)
    return Examples(points[:400], labels[:400]), Examples(points[400:], labels[400:])


def network() -> nn.Module:
    """Make the network."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


register_classifier(
    "spirals",
    title="Two spirals: who winds fastest?",
    model=network,
    target=0.95,
    scales={
        "defaults": {
            "data": "two-spirals",
            "optimizers": ["sgd", "adam", "block-adam"],
            "batch": {"size": 50},
            "lr": {"sgd": 0.1, "adam": 1e-2, "block-adam": 1e-2},
            "tune": {"trials": 5, "low": 1e-3, "high": 1.0},
        },
        "smoke": {"seeds": [0], "epochs": 5},
        "laptop": {"seeds": [0, 1, 2], "epochs": 100},
    },
)
