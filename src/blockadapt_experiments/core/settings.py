"""What every experiment lets a user choose, and how learning rates are tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockadapt.validation import require, require_integer, require_number
from blockadapt_experiments.contenders.catalogue import OptimizerSettings


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """How learning rates are tuned: the same budget for every optimizer.

    Attributes:
        trials: Learning rates that each optimizer may try.
        low: The smallest of them.
        high: The largest. The paper tunes in [1e-4, 1e2].
        extensions: Points beyond the grid that each optimizer may try, where its best is at an edge.
        seeds: Of the runs that each trial averages over; none of them may be a seed of the experiment.
    """

    trials: int = 13
    low: float = 1e-4
    high: float = 1e2
    extensions: int = 4
    seeds: tuple[int, ...] = (1000,)

    def __post_init__(self) -> None:
        require_integer("tune", "trials", self.trials, least=2)
        require_integer("tune", "extensions", self.extensions, least=0)
        require_number("tune", "low", self.low, above=0)
        require_number("tune", "high", self.high, above=self.low)
        _require_seeds("tune", self.seeds)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every experiment lets a user choose; each has its own class below this one.

    Attributes:
        optimizers: Names of the contenders, in the order in which they are shown.
        seeds: One run of each optimizer for each.
        lr: Learning rate by optimizer; where a name is missing, the contender's recommended one.
        optimizer: What the contenders are made with.
        tune: How `--tune` finds learning rates.
    """

    optimizers: tuple[str, ...]
    seeds: tuple[int, ...]
    lr: dict[str, float] = field(default_factory=dict)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    tune: TuneSettings = field(default_factory=TuneSettings)

    def __post_init__(self) -> None:
        rule = "one or more different names"
        distinct = len(self.optimizers) == len(set(self.optimizers)) > 0
        require(distinct, "settings", "optimizers", rule, list(self.optimizers))
        _require_seeds("settings", self.seeds)
        for name, lr in self.lr.items():
            require_number("settings", f"lr.{name}", lr, above=0)


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """What an experiment varies at a user's wish, so that one command runs an ablation.

    Attributes:
        variants: Changes to the settings, `key=value` with commas between several; "" for none. Each is run with every
            optimizer and every seed, and tuned by itself.
    """

    variants: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        ok = len(self.variants) == len(set(self.variants)) > 0 and not any(set("/\\") & {*v} for v in self.variants)
        require(ok, "settings", "variants", "one or more different changes without slashes", list(self.variants))


def _require_seeds(owner: str, seeds: Sequence[int]) -> None:
    ok = len(seeds) == len(set(seeds)) > 0 and all(0 <= seed < 2**63 for seed in seeds)
    require(ok, owner, "seeds", "one or more different integers in [0, 2⁶³)", list(seeds))
