"""Define what every experiment lets a user choose, and how learning rates are tuned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.optim import Optimizer

from blockadapt.validation import Described, require, require_integer, require_number
from blockadapt_experiments.contenders.catalogue import CONTENDERS, OptimizerSettings, find_contender, make_optimizer
from blockadapt_experiments.core.typed import converted
from blockadapt_experiments.names import nearest
from blockadapt_experiments.parts import NAME

SettingsT = TypeVar("SettingsT", bound="Settings")


class Arm(NamedTuple):
    """Says what one name in an experiment stands for: an optimizer and the settings that it has of its own.

    Attributes:
        optimizer: The name of its contender.
        changes: The settings that differ from those that all share, and from the contender's own.
        lr: Its learning rate where none was tuned; None for the contender's.
    """

    optimizer: str
    changes: Mapping[str, Any]
    lr: float | None = None


def read_arm(name: str, table: Mapping[str, Any]) -> Arm:
    """Read an arm from its table: `optimizer`, `lr`, `label`, and any setting of that optimizer.

    Raises:
        ValueError: It cannot be; the sentence names the setting, and the nearest one if there is none such.
    """
    key = f"arms.{name}"
    require(bool(re.fullmatch(NAME, name)), "settings", key, "a name of letters, digits, - and _", Described(name))
    require("optimizer" in table, "settings", f"{key}.optimizer", "given", Described("nothing"))
    optimizer = converted("settings", f"{key}.optimizer", str, table["optimizer"])
    apart = name not in CONTENDERS or name == optimizer
    require(apart, "settings", key, "another name than that of another optimizer", Described(name))
    contender = find_contender(key, optimizer)
    hints = {**contender.types, "lr": float, "label": str}
    found: dict[str, Any] = {}
    for setting, value in table.items():
        if setting == "optimizer":
            continue
        if setting not in hints:
            near = nearest(setting, hints)
            raise ValueError(f"{key}: {optimizer} has no setting `{setting}`; the nearest is `{near}`.")
        found[setting] = converted("settings", f"{key}.{setting}", hints[setting], value)
    found.pop("label", None)
    lr = found.pop("lr", None)
    if lr is not None:
        require_number("settings", f"{key}.lr", lr, above=0)
    return Arm(optimizer, found, lr)


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Says how learning rates are tuned: every optimizer tries as many points of a grid.

    Attributes:
        trials: Learning rates of the grid, with each of which every value of what `--tune-over` adds is tried. An
            optimizer that lacks such a setting tries more learning rates instead, where others have it.
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
    """Holds what every experiment lets a user choose; each has its own class below this one.

    Attributes:
        optimizers: Who is compared, in the order in which they are shown: names of optimizers and of `arms`.
        seeds: One run of each optimizer for each.
        arms: Optimizers with settings of their own, by a name of their own: a table with `optimizer`, and with `lr`,
            `label` and any `optimizer.*` that this one has for itself.
        lr: Learning rate by name; where a name is missing, the arm's own or the contender's recommended one.
        optimizer: What the contenders are made with, but for what an arm has of its own.
        tune: How `--tune` finds learning rates.
    """

    optimizers: tuple[str, ...]
    seeds: tuple[int, ...]
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
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
        for name, table in self.arms.items():
            arm = read_arm(name, table)
            known = OptimizerSettings.__dataclass_fields__
            replace(self.optimizer, **{key: value for key, value in arm.changes.items() if key in known})  # checks them

    def arm(self, name: str) -> Arm:
        """Tell what this name stands for: one of `arms`, or an optimizer as all share its settings."""
        return read_arm(name, self.arms[name]) if name in self.arms else Arm(name, {})

    def changed(self: SettingsT, name: str, values: Mapping[str, Any]) -> SettingsT:
        """Give settings in which this name has these values of its own."""
        table = {"optimizer": self.arm(name).optimizer, **self.arms.get(name, {}), **values}
        return replace(self, arms={**self.arms, name: table})

    def first_lr(self, name: str) -> float:
        """Give the learning rate where none was tuned; 0 for what is no optimizer."""
        arm = self.arm(name)
        usual = CONTENDERS[arm.optimizer].lr if arm.optimizer in CONTENDERS else 0.0
        return self.lr.get(name, usual if arm.lr is None else arm.lr)

    def make_optimizer(self, name: str, model: nn.Module, lr: float, steps: int) -> Optimizer:
        """Make the optimizer that this name stands for; see `contenders.catalogue.make_optimizer`."""
        arm = self.arm(name)
        return make_optimizer(arm.optimizer, model, lr, self.optimizer, steps, arm.changes)


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Says what an experiment varies at a user's wish, so that one command runs an ablation.

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
