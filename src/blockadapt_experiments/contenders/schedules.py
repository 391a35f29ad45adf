"""Says how the learning rate and the minibatch size move during a run.

    constant    αₜ = α
    step        αₜ = α · factor^k, k the number of fractions in `at` of the training that have passed
    dev         αₜ = α · factor^k, k the number of epochs that brought no new best validation value
    sqrt        αₜ = α/√t, t counting steps from 1
    cosine      αₜ = α · ½ (1 + cos π p), p the share of the steps after the warm-up that have been taken

Before that, the first `warmup` of the training has αₜ = α · t/w, t counting its w steps from 1, whatever the kind.

A schedule sets the `lr` of every param group from the one that it started with, so that nothing accumulates. The end of
a clipped spectrum, final_lr · lr/peak_lr with the largest lr so far, follows.

torch's schedulers follow the same rules, and tests hold ours to LambdaLR, MultiStepLR, ReduceLROnPlateau, LinearLR and
CosineAnnealingLR. The last four move from one rate to the next, and none has a warm-up before a rule that watches a
validation value. LambdaLR computes α times a multiplier, as we do, and to the same bits. But that is the one line
`group["lr"] = initial * multiplier`; the rest of this class would stay, and work around it:

- Its multiplier is a function of its own count of steps. Minibatches that grow make epochs of fewer steps, and progress
  then jumps to the next planned epoch; to set the count, `step(epoch)`, is deprecated.
- Its `load_state_dict` leaves the rates of the optimizer as they are. To set them takes a `step()`, which warns in
  every run that goes on, because the optimizer has not taken a step yet.
- It replaces the optimizer's `step` by a wrapper, to see in which order the two are called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.optim import Optimizer

from blockadapt.validation import (
    Described,
    is_number,
    require,
    require_choice,
    require_integer,
    require_number,
)

Kind = Literal["constant", "step", "dev", "sqrt", "cosine"]
Growth = Literal["none", "geometric", "linear"]

_FACTORS = {"step": 0.1, "dev": 0.5}


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Says how the learning rate moves.

    Attributes:
        kind: Which rule, see above. "sqrt" is for methods with a constant step: AdaGrad and AdaFom fall by themselves.
        factor: What "step" and "dev" multiply by; None for 0.1 under "step" and 0.5 under "dev".
        at: Where "step" does so, as fractions of the training.
        warmup: The fraction of the training in which the learning rate rises.
    """

    kind: Kind = "constant"
    factor: float | None = None
    at: tuple[float, ...] = (0.5, 0.75)
    warmup: float = 0.0

    def __post_init__(self) -> None:
        require_choice("schedule", "kind", self.kind, get_args(Kind))
        if self.factor is not None:
            require_number("schedule", "factor", self.factor, above=0, below=1)
        for position, fraction in enumerate(self.at):
            require_number("schedule", f"at[{position}]", fraction, above=0, below=1)
        require_number("schedule", "warmup", self.warmup, least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Says how large minibatches are, and how they grow. Theorem 2's noise term falls with their size.

    Attributes:
        size: M₀, in the first epoch.
        growth: "geometric" has M₀ · rate^k and "linear" M₀ · (1 + rate · k) after k periods, rounded.
        rate: See `growth`.
        period: Epochs between two changes.
        most: Never more than this.
    """

    size: int = 128
    growth: Growth = "none"
    rate: float = 2.0
    period: int = 1
    most: int = 4096

    def __post_init__(self) -> None:
        require_integer("batch", "size", self.size, least=1)
        require_choice("batch", "growth", self.growth, get_args(Growth))
        least = 1 if self.growth == "geometric" else 0
        require_number("batch", "rate", self.rate, least=least)
        require_integer("batch", "period", self.period, least=1)
        require_integer("batch", "most", self.most, least=self.size)

    def batch_size(self, epoch: int) -> int:
        """Return M in this epoch, counted from 0."""
        require_integer("batch", "epoch", epoch, least=0)
        periods = epoch // self.period
        if self.growth == "none" or periods == 0:
            return self.size
        if self.growth == "linear":
            return min(round(self.size * (1 + self.rate * periods)), self.most)
        if periods * math.log(self.rate) > math.log(self.most):  # beyond it, and the power might overflow
            return self.most
        return min(round(self.size * self.rate**periods), self.most)


class Schedule:
    """Moves the learning rate of an optimizer. Call `after_step` and `after_epoch` where their names say.

    Its state is plain numbers. Loading it sets the optimizer's learning rates too, so it does not matter which of the
    two is loaded first.
    """

    def __init__(self, settings: ScheduleSettings, optimizer: Optimizer, epochs: int, steps_per_epoch: int) -> None:
        require_integer("schedule", "epochs", epochs, least=1)
        require_integer("schedule", "steps_per_epoch", steps_per_epoch, least=1)
        self.settings = settings
        self.optimizer = optimizer
        self.steps_per_epoch = steps_per_epoch
        # 0.07 · 100 is 7.000000000000001
        self._milestones = [math.ceil(fraction * epochs * steps_per_epoch - 1e-6) for fraction in settings.at]
        self._factor = _FACTORS.get(settings.kind, 1.0) if settings.factor is None else settings.factor
        self._all_steps = epochs * steps_per_epoch
        self._warmup_steps = math.ceil(settings.warmup * self._all_steps - 1e-6)
        self._initial = self.lr
        self._steps = 0
        self._epochs = 0
        self._steps_in_epoch = 0
        self._best = math.inf
        self._worse_epochs = 0
        self._apply()

    @property
    def lr(self) -> list[float]:
        """Give the learning rate of each param group, for the step to come."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def after_step(self) -> None:
        """Note that a step has been taken."""
        self._steps += 1
        self._steps_in_epoch += 1
        self._apply()

    def after_epoch(self, value: float | None = None) -> None:
        """Note that an epoch has ended; `value` was measured on validation data, lower is better. Only "dev" needs it.

        Raises:
            ValueError: Under "dev" there is no value.
        """
        if self.settings.kind == "dev":
            require(is_number(value), "schedule", "value", 'a number under kind "dev"', value)
            if value is not None and value < self._best:  # not so for NaN: a diverged epoch is no new best
                self._best = float(value)
            else:
                self._worse_epochs += 1
        self._epochs += 1
        self._steps_in_epoch = 0
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the rest of the run depends on."""
        return {
            "initial": list(self._initial),
            "steps": self._steps,
            "epochs": self._epochs,
            "steps_in_epoch": self._steps_in_epoch,
            "best": self._best,
            "worse_epochs": self._worse_epochs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken, or raise ValueError and change nothing."""
        ours = self.state_dict()
        require(state.keys() == ours.keys(), "schedule", "state", f"one with {sorted(ours)}", sorted(state))
        value = Described(f"{len(state['initial'])}")
        rule = f"one of {len(self._initial)} param groups"
        require(len(state["initial"]) == len(self._initial), "schedule", "state", rule, value)
        self._initial = list(state["initial"])
        self._steps, self._epochs = state["steps"], state["epochs"]
        self._steps_in_epoch = state["steps_in_epoch"]
        self._best, self._worse_epochs = state["best"], state["worse_epochs"]
        self._apply()

    def _multiplier(self) -> float:
        """Compute αₜ/α for the step to come."""
        # In units of the epochs that were planned: minibatches that grow make epochs of fewer steps.
        done = self._epochs * self.steps_per_epoch + self._steps_in_epoch
        if done < self._warmup_steps:
            return (done + 1) / self._warmup_steps
        if self.settings.kind == "cosine":
            share = (done - self._warmup_steps) / (self._all_steps - self._warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        if self.settings.kind == "step":
            return self._factor ** sum(done >= milestone for milestone in self._milestones)
        if self.settings.kind == "dev":
            return self._factor**self._worse_epochs
        if self.settings.kind == "sqrt":
            return 1 / math.sqrt(self._steps + 1)
        return 1.0

    def _apply(self) -> None:
        multiplier = self._multiplier()
        for group, initial in zip(self.optimizer.param_groups, self._initial, strict=True):
            group["lr"] = initial * multiplier


def make_schedule(settings: ScheduleSettings, optimizer: Optimizer, epochs: int, steps_per_epoch: int) -> Schedule:
    """Make the schedule of these settings.

    Args:
        settings: Which one.
        optimizer: Its learning rates are those of the first step.
        epochs: How many there will be.
        steps_per_epoch: Of the first epoch, if minibatches grow.
    """
    return Schedule(settings, optimizer, epochs, steps_per_epoch)
