"""Says what runs measure: rows of metrics, and what is left at the end; and the design that says which metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from blockadapt_experiments.names import NOT_IN_PAPER

Row = dict[str, float]
"""One line of measurements: the axis ("step", "epoch", …) and any of the experiment's metrics. Never a time."""


class RunKey(NamedTuple):
    """Says which run of an experiment."""

    arm: str
    variant: str
    seed: int

    @property
    def label(self) -> str:
        """Name the run for people."""
        return ", ".join(part for part in (self.arm, self.variant, f"seed {self.seed}") if part)


def runs_asked(asked: Iterable[Mapping[str, Any]]) -> set[RunKey]:
    """Return the runs that commands asked for: of each, all its optimizers with all its variants and seeds."""
    return {
        RunKey(arm, variant, seed)
        for each in asked
        for arm in each["optimizers"]
        for variant in each["variants"]
        for seed in each["seeds"]
    }


class Outcome(NamedTuple):
    """Says what a finished run leaves beside its rows: single numbers, and arrays to draw from."""

    numbers: Mapping[str, float]
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Metric:
    """Is a column of the rows.

    Attributes:
        key: Its name in a row.
        label: Its name for people, with the unit.
        better: Which way is better; None where neither is.
        log: Whether its axis starts logarithmic.
    """

    key: str
    label: str
    better: Literal["low", "high"] | None = "low"
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Design:
    """Says what the runs of an experiment measure, and under which name.

    Attributes:
        name: As on the command line; also the name of its file in `configs/`.
        title: One line for people.
        section: Where the paper has it, or `NOT_IN_PAPER`.
        axis: What curves are drawn over; a key of the rows.
        metrics: What its rows hold; the first is drawn first.
        objective: The metric that learning rates are tuned by, on validation data; None if there is nothing to tune.
        target: The metric and the value to be reached for "steps to target"; None if there is no such thing.
        measure: The metric that counts when all is done, as it stands at the end of a run; None if it is not one alone.
    """

    name: str
    title: str
    section: str
    axis: str
    metrics: Sequence[Metric]
    objective: str | None = None
    target: tuple[str, float] | None = None
    measure: str | None = None

    @property
    def in_paper(self) -> bool:
        """Tell whether the paper has it."""
        return self.section != NOT_IN_PAPER
