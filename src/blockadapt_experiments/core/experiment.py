"""Define what an experiment is: a set of runs, each cut into legs, and how its results are judged and drawn.

A run is one arm (an optimizer, by name), one variant (a setting that the experiment sweeps; "" if it sweeps none) and
one seed. `running/runner.py` takes runs forward leg by leg, `running/records.py` keeps what they measured,
`report/reading.py` reads it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from blockadapt_experiments.claims.claim import Claim
from blockadapt_experiments.results.measurements import Design, Outcome, Row, RunKey
from blockadapt_experiments.results.summary import Summary

ConfigT = TypeVar("ConfigT")


class Task(Protocol):
    """Does one run, cut into legs. Between two legs it can be saved, and continued to the same bits."""

    legs: int

    def advance(self) -> Sequence[Row]:
        """Do the next leg, and return what was measured in it."""
        ...

    def outcome(self) -> Outcome:
        """Return what is left to say after the last leg."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next leg depends on, as `torch.load(weights_only=True)` can read it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        ...


def no_sweep(settings: object) -> Sequence[str]:
    """Name the one variant of an experiment that sweeps nothing."""
    return ("",)


@dataclass(frozen=True, kw_only=True)
class Experiment(Design, Generic[ConfigT]):
    """Joins a design with its settings, its runs, and how its results are judged and drawn.

    Attributes:
        config: The class of its settings, a frozen dataclass that `core/config.py` fills from TOML.
        task: Makes the run, with this learning rate. With `tuning` it never touches test data: it trains on a part of
            the training data and its rows hold `objective`, measured on the rest.
        variants: The variants of these settings, [""] if there is no sweep.
        dtype: Of what its optimizers move. The kernel for it is made ready before the clock of a run starts.
        model: Makes the network that is trained; None if there is none that `blockadapt plan` could cut up.
        claims: The paper's claims.
        draw: Draws what curves cannot show, from a summary into PNG files in a directory; returns the files.
        scales: Its settings: a table `defaults`, and one for each scale, which overrides keys of it. None for those in
            `configs/NAME.toml`.
    """

    config: type[ConfigT]
    task: Callable[[ConfigT, RunKey, float, Path | None, bool], Task]
    variants: Callable[[ConfigT], Sequence[str]] = no_sweep
    dtype: torch.dtype = torch.float32
    model: Callable[[ConfigT], nn.Module] | None = None
    claims: Sequence[Claim] = ()
    draw: Callable[[Summary, Path], Sequence[Path]] | None = None
    scales: Mapping[str, Mapping[str, Any]] | None = None
