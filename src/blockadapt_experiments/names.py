"""Lists names that can be checked before anything heavy is loaded: torch alone takes seconds to import."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

SCALES = ("smoke", "laptop", "paper")

NOT_IN_PAPER = "not in the paper"
"""The section of an experiment that the paper does not have."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Find the known name most like this one; a dotted name may be meant by its last part alone."""

    def likeness(candidate: str) -> float:
        ends = (name.rpartition(".")[2], candidate.rpartition(".")[2])
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in ((name, candidate), ends))

    return max(sorted(known), key=likeness)


def require_optimizer(owner: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that no optimizer has.

    Raises:
        ValueError: There is none such; the sentence names the nearest.
    """
    if name not in known:
        raise ValueError(f"{owner}: there is no optimizer {name!r}; the nearest is {nearest(name, known)!r}.")


def require_optimizers(owner: str, key: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that no optimizer and no arm has.

    Raises:
        ValueError: There is none such; the sentence names the nearest.
    """
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise ValueError(f"{owner}: `{key}` has an unknown optimizer {name!r}; the nearest is {near!r}.")
