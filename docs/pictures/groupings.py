"""Draw which weights share a block under each grouping: `python docs/pictures/groupings.py` writes groupings.svg.

The blocks are the library's own, asked from its partition of each parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pictures import write_svg

from blockadapt.partition import partition

OUT, IN, BLOCK_SIZE = 8, 6, 4
FILTERS, CHANNELS, KERNEL = 2, 3, 3
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC6FA4", "#7A08D0", "#B08A3E")


def owners(shape: tuple[int, ...], grouping: str, block_size: int = BLOCK_SIZE) -> torch.Tensor:
    """Give for each weight the number of its block."""
    numbers = torch.full(shape, -1)
    first = 0
    for view in partition(shape, grouping, block_size).views(numbers) or ():
        major, minor, _ = view.shape
        view.copy_((first + torch.arange(major * minor)).view(major, minor, 1).expand_as(view))
        first += major * minor
    assert (numbers >= 0).all()
    return numbers


def tint(block: int) -> tuple[float, float, float]:
    """Neighbours differ in hue; further blocks repeat hues in a lighter tint."""
    red, green, blue = to_rgb(HUES[block % len(HUES)])
    light = (0.25, 0.45, 0.62)[block // len(HUES) % 3]
    return red + (1 - red) * light, green + (1 - green) * light, blue + (1 - blue) * light


def paint(panel: Any, numbers: torch.Tensor, left: float = 0.0, top: float = 0.0) -> None:
    """Draw a cell for each weight, and a dark line where one block ends and another begins."""
    rows, columns = numbers.shape
    for i in range(rows):
        for j in range(columns):
            block, x, y = int(numbers[i, j]), left + j, -top - i
            panel.add_patch(Rectangle((x, y - 1), 1, 1, facecolor=tint(block), edgecolor="white", linewidth=0.5))
            for di, dj, ends in ((0, 1, ((x + 1, x + 1), (y, y - 1))), (1, 0, ((x, x + 1), (y - 1, y - 1)))):
                a, b = i + di, j + dj
                if a < rows and b < columns and int(numbers[a, b]) != block:
                    panel.plot(*ends, color="#222222", linewidth=1.4, solid_capstyle="round")
    panel.add_patch(Rectangle((left, -top - rows), columns, rows, fill=False, edgecolor="#222222", linewidth=1.4))


def main() -> None:
    """Draw a panel for each grouping of a Linear's weight, and one for a convolution's."""
    titles = {
        "input": '"input"\nruns down a column',
        "output": '"output"\nruns along a row',
        "chunk": '"chunk"\nruns of the flat weight',
        "tensor": '"tensor", "joint"\none block',
        "diagonal": '"diagonal"\nblocks of one: Adam',
    }
    figure = Figure(figsize=(9.6, 5.2))
    panels = figure.subplots(2, 3).flatten()
    for panel, (grouping, title) in zip(panels, titles.items(), strict=False):
        paint(panel, owners((OUT, IN), grouping))
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(f"{IN} inputs", fontsize=8)
        panel.set_ylabel(f"{OUT} outputs", fontsize=8)
    numbers = owners((FILTERS, CHANNELS, KERNEL, KERNEL), "filter")
    for out in range(FILTERS):
        for channel in range(CHANNELS):
            paint(panels[5], numbers[out, channel], (KERNEL + 0.7) * channel, (KERNEL + 0.7) * out)
    panels[5].set_title('"filter"\na block for each kernel', fontsize=10)
    panels[5].set_xlabel(f"{CHANNELS} input channels", fontsize=8)
    panels[5].set_ylabel(f"{FILTERS} filters", fontsize=8)
    for panel in panels:
        panel.set_aspect("equal")
        panel.autoscale_view()
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[:].set_visible(False)
    figure.tight_layout()
    write_svg(figure, "groupings.svg")


if __name__ == "__main__":
    main()
