"""Sees to the state of a step: looks at it when it has changed, brings it into form, makes what is missing.

Nothing is put in place before the step succeeds: what is new or converted waits in the `Update`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from blockadapt.moments import statistics_dtype, takes_numbers
from blockadapt.optimizers.overlap import overlap
from blockadapt.optimizers.ranks import local
from blockadapt.optimizers.storage import (
    LAST_STEP,
    State,
    all_in_form,
    are_whole,
    block_state_names,
    counter_device,
    shapes_of,
    steps_taken,
)
from blockadapt.optimizers.unit import Group, Known, Unit, describe, is_closed
from blockadapt.optimizers.update import Update
from blockadapt.validation import Described, has_numbers, is_plain, refusal, require

CAPTURABLE = ("cuda", "xpu", "hpu", "privateuseone", "xla")
"""Kinds of devices on which a step may be captured: those for which torch's own optimizers have `capturable`."""


class Keeps(Protocol):
    """Names what an optimizer must have so that its state can be seen to."""

    averages_gradient: ClassVar[bool]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """Hold the state of each parameter that has one; a user may have put anything there."""

    def keeps_first_moment(self, group: Group) -> bool:
        """Tell whether a group has a first moment."""


class StepState:
    """Sees to the state of an optimizer's units, step by step.

    Args:
        optimizer: Its state may be replaced at any time, so it is asked for anew at each step.
    """

    def __init__(self, optimizer: Keeps) -> None:
        self._optimizer = optimizer
        self._owner = type(optimizer).__name__

    def held(self, unit: Unit) -> list[State]:
        """Return the state of each parameter of a unit as it is; an empty one where there is none yet."""
        return [self._held(unit, param) for param in unit.params]

    def _held(self, unit: Unit, param: Tensor) -> State:
        held = self._optimizer.state.get(param, {})
        if not isinstance(held, dict):
            rule = f"a dict of tensors (for {_describe(unit, param)})"
            raise ValueError(refusal(self._owner, "state", rule, Described(type(held).__name__)))
        return held

    def kept(self, group: Group, step: int) -> list[str]:
        """Name the statistics that are kept after this step: those of blocks, and the first moment."""
        return [*_of_blocks(group, step), *["exp_avg"] * self._optimizer.keeps_first_moment(group)]

    def ready(self, unit: Unit, step: int, update: Update) -> list[State]:
        """Return the state of each parameter with all that this step needs, in the one form that kernels take.

        What is new, converted or no longer needed is put in place only if the step succeeds. While nothing has changed
        since the step before, nothing is looked at again.

        Raises:
            ValueError: The state does not fit the parameter or the options.
            RuntimeError: The second moment was freed when the clip closed, and is needed now.
        """
        states, kept = self.held(unit), self.kept(unit.group, step)
        if not unit.is_known(kept, unit.group["capturable"], states):
            unit.forget()
            blocks = _of_blocks(unit.group, step)
            states = [self._fitted(unit, param, blocks if param is unit.owner else (), update) for param in unit.params]
            update.finish.append(lambda: self._remember(unit, kept))
        for state in states:
            update.counters.append(state["step"])
        return states

    def require_apart(self, states: Mapping[Unit, Sequence[State]]) -> None:
        """Raise where two of all tensors that a step of these units writes share memory: each would undo the other.

        Raises:
            ValueError: Two of them do.
        """
        written: list[tuple[str, Unit, Tensor, Tensor]] = []
        for unit, held in states.items():
            for param, state in zip(unit.params, held, strict=True):
                if param.grad is not None:
                    written.append(("", unit, param, local(param)))
                written += [(f"{name} of ", unit, param, t) for name, t in state.items() if name != "cut"]
        found = overlap([tensor for *_, tensor in written])
        if found is not None:
            both = [written[i] for i in found]
            argument = "state" if any(name for name, *_ in both) else "params"
            first, second = (f"{name}{_describe(unit, param)}" for name, unit, param, _ in both)
            rule = "apart in memory from all else that a step writes"
            raise ValueError(refusal(self._owner, argument, rule, Described(f"{first} and {second} in one place")))

    def _remember(self, unit: Unit, kept: Sequence[str]) -> None:
        """Note that all is in order now.

        What has no numbers lies nowhere, and is looked at again each time; so is what was made in inference mode, for
        it cannot be written outside of it.
        """
        parts = [unit.local(param) for param in unit.params]
        states = [self._optimizer.state[param] for param in unit.params]
        made_to_infer = any(t.is_inference() for state in states for t in state.values())
        if all(map(has_numbers, parts)) and not made_to_infer:
            unit.known = Known.of(kept, unit.group["capturable"], parts, states)

    def _fitted(self, unit: Unit, param: Tensor, blocks: Sequence[str], update: Update) -> State:
        """Return the state of a parameter for this step, with what its blocks keep; see `ready`."""
        owner, whose = self._owner, _describe(unit, param)
        _require_writable(owner, unit.local(param), whose)
        if unit.group["capturable"]:
            rule = f"False where parameters are not on one of {', '.join(CAPTURABLE)} (for {whose})"
            fits = param.device.type in CAPTURABLE
            require(fits, owner, "capturable", rule, Described(f"True for {param.device.type}"))
        held = self._held(unit, param)
        shapes = shapes_of(unit.shape(param), unit.cut if param is unit.owner else None)
        fitted = all_in_form(owner, whose, held, shapes, param, unit.cut, unit.group["capturable"])
        averages = self._optimizer.keeps_first_moment(unit.group)
        needed = ["step"] + ["exp_avg"] * averages + (["cut", *blocks] if blocks else [])
        for name in needed:
            if name not in fitted:
                fitted[name] = self._new(unit, param, name, shapes[name], held)
        for name in [name for name in fitted if name not in needed]:  # closed, or an option was switched off
            del fitted[name]

        def keep() -> None:
            state = self._optimizer.state.setdefault(param, {})
            state.clear()
            state.update(fitted)

        update.finish.append(keep)
        return fitted

    def _new(self, unit: Unit, param: Tensor, name: str, shape: tuple[int, ...], held: State) -> Tensor:
        """Make a state entry that is not there yet: zeros, or the cut's fingerprint.

        Raises:
            RuntimeError: The second moment was freed when the clip closed.
            ValueError: The entry cannot be missing from a state that is there.
        """
        if held and name == "second_moment":
            rule = "left closed once it has closed, because the second moment was freed then"
            value = Described(f"an open interval at step {steps_taken(held) + 1}")
            raise RuntimeError(refusal(self._owner, "clip", rule, value))
        if held and (name == "step" or (name == "exp_avg" and self._optimizer.averages_gradient)):
            rule = f"whole, or deleted to begin anew (for {_describe(unit, param)})"
            raise ValueError(refusal(self._owner, "state", rule, Described(f"one without {name!r}")))
        if name == "step":
            return torch.tensor(0, dtype=torch.int64, device=counter_device(param, unit.group["capturable"]))
        if name == "cut":
            return torch.tensor(unit.cut.fingerprint, dtype=torch.int64, device="cpu")
        return torch.zeros(shape, dtype=statistics_dtype(param), device=unit.local(param).device)

    # Counters ------------------------------------------------------------------------------------------------------

    def steps_taken(self, unit: Unit) -> int:
        """Count the steps that a unit's owner has taken.

        Raises:
            ValueError: Its state says something else than a count.
        """
        count = self._count(unit)
        if count is None:
            return 0
        if _is_count(count) and are_whole(count) and 0 <= (steps := int(count)) < LAST_STEP:
            return steps
        raise ValueError(self._no_count(unit, count))

    def counter(self, unit: Unit, device: torch.device) -> Tensor:
        """Give the same as a number on the device, which nobody waits for.

        Raises:
            ValueError: Its state says something else than a count.
        """
        count = self._count(unit)
        if count is None:
            return torch.zeros((), dtype=torch.int64, device=device)
        if _is_count(count):
            counter: Tensor = count.detach().reshape(()).to(device, torch.int64)
            return counter
        raise ValueError(self._no_count(unit, count))

    def _count(self, unit: Unit) -> Any:
        return self._held(unit, unit.owner).get("step")

    def _no_count(self, unit: Unit, count: object) -> str:
        rule = f"a count of steps, below 2**63 - 1 (in the state of {_describe(unit, unit.owner)})"
        return refusal(self._owner, "step", rule, count)


def _of_blocks(group: Group, step: int) -> list[str]:
    """Name the state that blocks keep after this step."""
    return [] if is_closed(group, step) else block_state_names(group.get("amsgrad", False), group["refresh_every"])


def _require_writable(owner: str, param: Tensor, whose: str) -> None:
    """Raise unless a kernel may write into this parameter's memory."""
    rule = f"plain, dense, real floating-point tensors of 16 bits or more that own their numbers (for {whose})"
    dense = is_plain(param) and param.layout is torch.strided and takes_numbers(param)
    require(dense, owner, "params", rule, Described(f"{type(param).__name__} of {param.dtype}"))
    apart = not param.is_neg() and overlap([param]) is None
    require(apart, owner, "params", rule, Described("one whose entries share memory or wait for a sign"))
    require(not param.is_inference(), owner, "params", rule, Described("an inference tensor"))


def _describe(unit: Unit, param: Tensor) -> str:
    position = next(i for i, other in enumerate(unit.params) if other is param)
    return describe(unit.group, unit.index, unit.position + position)


def _is_count(value: object) -> bool:
    return isinstance(value, Tensor) and is_plain(value) and value.numel() == 1 and not value.is_complex()
