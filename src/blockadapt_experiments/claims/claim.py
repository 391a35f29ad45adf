"""Says what the paper claims, and the verdict of the runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from blockadapt_experiments.results.summary import Summary


class Verdict(NamedTuple):
    """Says what was measured about a claim. `held` is None where these runs cannot tell."""

    held: bool | None
    words: str


@dataclass(frozen=True)
class Claim:
    """States what the paper claims, in our words and with its place there, and how to judge it from the runs."""

    paper: str
    judge: Callable[[Summary], Verdict]
