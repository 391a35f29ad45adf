"""Measure what `docs/performance.md` reports, as ratios within one run.

Contenders of one comparison take turns, so that a slow moment of the machine meets all of them. A value is the median
over the turns. Every row says what was measured, what the floor and the goal are, and the spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from blockadapt_experiments.commands.bench.blocks import limit_rows, option_rows, scaling_rows, small_rows
from blockadapt_experiments.commands.bench.measuring import Row
from blockadapt_experiments.commands.bench.networks import filter_rows, gpt_rows, lenet_5_rows, lenet_300_rows
from blockadapt_experiments.commands.bench.ranks import rank_rows

__all__ = ["SECTIONS", "Row"]

SECTIONS: dict[str, Callable[[int], Iterator[Row]]] = {
    "LeNet-300-100": lenet_300_rows,
    "LeNet-5-Caffe": lenet_5_rows,
    "GPT-2": gpt_rows,
    "3 × 3 filters": filter_rows,
    "small tensors": small_rows,
    "large models": scaling_rows,
    "options": option_rows,
    "limits": limit_rows,
    "many processes": rank_rows,
}
