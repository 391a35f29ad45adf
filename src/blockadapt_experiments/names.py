"""Names that can be checked before anything heavy is loaded: torch alone takes seconds to import."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SCALES = ("smoke", "laptop", "paper")

NOT_IN_PAPER = "not in the paper"
"""The section of an experiment that the paper does not have."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Find the known name most like this one; a dotted name may be meant by its last part alone."""

    def likeness(candidate: str) -> float:
        ends = (name.rpartition(".")[2], candidate.rpartition(".")[2])
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in ((name, candidate), ends))

    return max(sorted(known), key=likeness)
