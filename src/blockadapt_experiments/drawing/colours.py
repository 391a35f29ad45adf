"""Colours and dashes that tell curves apart."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow, which is too light for a line.
# Line styles tell them apart in grey too. 7 and 4 have no common divisor: 28 optimizers get 28 different pairs.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
