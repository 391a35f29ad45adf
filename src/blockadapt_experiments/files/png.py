"""Figures as PNG files, written without pyplot: no global state and no display are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_png(figure: Any, path: Path) -> Path:
    """Write the figure; returns the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, because experiments are listed without it

    FigureCanvasAgg(figure).print_png(path)
    return path
