"""What an experiment is: a set of runs, each cut into units of work, and what is read off them.

A run is one arm (an optimizer, by name), one variant (a setting that the experiment sweeps; "" if it sweeps none) and
one seed. `runner.py` takes runs forward unit by unit, `records.py` keeps what they measured, `summary.py` reads it
back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from blockadapt_experiments.summary import Summary

Row = dict[str, float]
"""One line of measurements: the axis ("step", "epoch", …) and any of the experiment's metrics. Never a time."""

ConfigT = TypeVar("ConfigT")


class RunKey(NamedTuple):
    """Which run of an experiment."""

    arm: str
    variant: str
    seed: int


@dataclass(frozen=True)
class Metric:
    """A column of the rows.

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


class Verdict(NamedTuple):
    """What was measured about a claim. `held` is None where these runs cannot tell."""

    held: bool | None
    words: str


@dataclass(frozen=True)
class Claim:
    """What the paper says, in our words and with its place there, and how to judge it from the runs."""

    paper: str
    judge: Callable[[Summary], Verdict]


class Outcome(NamedTuple):
    """What a finished run leaves beside its rows: single numbers, and arrays to draw from."""

    numbers: Mapping[str, float]
    arrays: Mapping[str, np.ndarray]


class Task(Protocol):
    """One run, cut into units of work. Between two units it can be saved, and continued to the same bits."""

    units: int

    def advance(self) -> Sequence[Row]:
        """Do the next unit; returns what was measured in it."""
        ...

    def outcome(self) -> Outcome:
        """What is left to say after the last unit."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next unit depends on; `torch.load(weights_only=True)` reads it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        ...


@dataclass(frozen=True)
class Experiment(Generic[ConfigT]):
    """An experiment: its settings, its runs and how they are shown.

    Attributes:
        name: As on the command line; also the name of its file in `configs/`.
        title: One line for people.
        section: Where the paper has it.
        config: The class of its settings, a frozen dataclass that `config.py` fills from TOML.
        axis: What curves are drawn over; a key of the rows.
        metrics: What its rows hold; the first is drawn first.
        objective: The metric that learning rates are tuned by, on validation data; None if there is nothing to tune.
        variants: The variants of these settings, [""] if there is no sweep.
        task: Makes the run, with this learning rate. With `tuning` it never touches test data: it trains on a part of
            the training data and its rows hold `objective`, measured on the rest.
        claims: The paper's claims.
        target: The metric and the value to be reached for "steps to target"; None if there is no such thing.
        draw: Draws what curves cannot show, from a summary into PNG files in a directory; returns the files.
    """

    name: str
    title: str
    section: str
    config: type[ConfigT]
    axis: str
    metrics: Sequence[Metric]
    variants: Callable[[ConfigT], Sequence[str]]
    task: Callable[[ConfigT, RunKey, float, Path | None, bool], Task]
    claims: Sequence[Claim] = ()
    objective: str | None = None
    target: tuple[str, float] | None = None
    draw: Callable[[Summary, Path], Sequence[Path]] | None = None
