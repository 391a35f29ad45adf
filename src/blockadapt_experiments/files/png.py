"""Writes figures as PNG files, without pyplot: no global state and no display are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockadapt_experiments.files.atomic import atomic


def write_png(figure: Any, path: Path) -> Path:
    """Write the figure, and return the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, because a run does without it

    with atomic(path) as file:
        FigureCanvasAgg(figure).print_png(file)
    return path
