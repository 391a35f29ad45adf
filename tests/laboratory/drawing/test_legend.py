"""A legend has every name once, and none of it runs off the figure."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="needs the `experiments` extra")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from blockadapt_experiments.drawing.legend import add_legend


def drawn(names: list[str]) -> tuple[Figure, Legend]:
    """A figure of two panels that show these, drawn."""
    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    for panel in panels:
        for name in names:
            panel.plot([0, 1], [0, 1], label=name)
    add_legend(figure, panels)
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    return figure, legend


@pytest.mark.parametrize("length", [4, 20, 40])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_a_legend_takes_as_many_rows_as_it_needs_to_stay_within_the_figure(count: int, length: int) -> None:
    figure, legend = drawn([f"{number} ".ljust(length, "m") for number in range(count)])
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    tops = {round(text.get_window_extent().y0) for text in legend.get_texts()}
    if length == 4:
        assert len(tops) == (1 if count <= 5 else 2)
