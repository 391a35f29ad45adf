"""Panels of bars: whatever is written in them stays within the picture."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from blockadapt_experiments.drawing.bars import Panel, bar_figure


def texts_of(figure: Figure) -> dict[str, Bbox]:
    """What is written, and where. Ticks of the scale count only where they are drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    ticks = {label for axes in figure.axes for label in axes.get_xticklabels()}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]
    texts = [text for text in texts if text.get_text() and text not in ticks]
    return {text.get_text(): text.get_window_extent(canvas.get_renderer()) for text in texts}


@pytest.mark.parametrize("panels", [1, 2, 5])
@pytest.mark.parametrize("length", [3, 30, 70])
def test_all_that_is_written_stays_within_the_picture(length: int, panels: int) -> None:
    bars = {f"{number}".rjust(length, "n"): (28.32 + number, 0.74) for number in range(12)}
    title = "Test error by variant, laptop scale; in brackets, paired over seeds, minus the first"
    figure = bar_figure(title, "test error (%)", [Panel(f"optimizer {number}", bars) for number in range(panels)])
    width, height = figure.bbox.width, figure.bbox.height
    outside = [
        text for text, box in texts_of(figure).items() if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
    ]
    assert outside == []
