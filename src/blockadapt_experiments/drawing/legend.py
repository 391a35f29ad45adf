"""Puts one legend below all panels of a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

ONE_ROW = 5
"""More names than this take two rows, also where one would do."""


def add_legend(figure: Any, panels: Sequence[Any]) -> None:
    """Put what the panels show below them, each name once, in as many rows as it takes not to run off the figure."""
    named = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    look = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
    for rows in range(1 if len(named) <= ONE_ROW else 2, len(named) + 1):
        legend = figure.legend([*named.values()], [*named], ncols=math.ceil(len(named) / rows), **look)
        if legend.get_window_extent().width <= figure.bbox.width or rows == len(named):
            return
        legend.remove()
