"""What the pictures share: files that come out the same each time, and grey axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).parent

matplotlib.rcParams["svg.hashsalt"] = "blockadapt"  # or every element gets a random name
matplotlib.rcParams["svg.fonttype"] = "none"


def write_svg(figure: Figure, name: str) -> None:
    """Write a figure beside this file."""
    figure.savefig(HERE / name, metadata={"Date": None})


def tidy(panel: Any) -> None:
    """Leave out what a reader does not need."""
    panel.grid(axis="y", color="#E0E0E0", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
