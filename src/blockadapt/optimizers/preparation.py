"""Makes a step ready: units become `Update`s, in which kernels have prepared their changes.

Nothing changes before the updates are written, so anything may raise. What stands as the last step left it is put into
an update all at once (`Standing`), and every other unit by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from blockadapt.kernels import Coefficients, Dispatcher, Kernel, get_kernel
from blockadapt.kernels.segments import Recipe
from blockadapt.moments import statistics_dtype
from blockadapt.optimizers.estimates import Estimates
from blockadapt.optimizers.standing import Standing
from blockadapt.optimizers.step_state import StepState
from blockadapt.optimizers.storage import State
from blockadapt.optimizers.unit import Group, Unit, is_closed
from blockadapt.optimizers.update import Update
from blockadapt.spectrum import SpectralFunction
from blockadapt.terms import Term


class Stepped(Protocol):
    """Names what an optimizer must have so that its steps can be made ready."""

    param_groups: list[Group]
    kernels: Dispatcher
    spectral_function: ClassVar[SpectralFunction]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """Hold the state of each parameter that has one."""

    def coefficients(self, group: Group, step: Term, dtype: torch.dtype, final_lr: Term | None) -> Coefficients:
        """Compute all numbers of a group's step."""

    def final_lr(self, group: Group) -> Term | None:
        """Tell α* of a group."""


class Preparation:
    """Makes the steps of an optimizer ready.

    Args:
        optimizer: Asked at each step for its param groups, state and kernels, which may be replaced at any time.
        backend: What the optimizer's kernels were made from; further buckets of units have kernels of their own.
        step_state: Sees to the state of units.
        estimates: Have the tally that each unit counts in.

    Attributes:
        standing: The units of each bucket as its last step left them.
    """

    def __init__(self, optimizer: Stepped, backend: str | Kernel, step_state: StepState, estimates: Estimates) -> None:
        self._optimizer = optimizer
        self._backend = backend
        self._step_state = step_state
        self._estimates = estimates
        self._more_kernels: list[Dispatcher] = []
        self._apart: list[Unit] = []
        self.standing: dict[int, Standing] = {}

    def updates(self, buckets: Sequence[Sequence[Unit]]) -> list[Update]:
        """Make one update for each bucket of units, with all that its kernels need to write it."""
        updates = []
        known: dict[Any, Coefficients] = {}
        looked_at: dict[Unit, Sequence[State]] = {}
        for bucket, units in enumerate(buckets):
            update = Update(self._optimizer.spectral_function)
            known |= self._known_to_devices(units)
            others = self._repeat(bucket, units, update, known)
            for unit in units if others is None else others:
                looked_at[unit] = self._add(unit, update, known)
            if others is None:
                update.finish.append(partial(self._stand, bucket, units))
            update.prepare(self._kernels_of(bucket))
            updates.append(update)
        self._require_apart([unit for units in buckets for unit in units], looked_at)
        return updates

    def _require_apart(self, units: list[Unit], looked_at: Mapping[Unit, Sequence[State]]) -> None:
        """Raise where tensors that the step writes share memory; once, while these units stand."""
        if units != self._apart or not all(unit.known for unit in looked_at):
            self._step_state.require_apart({u: looked_at.get(u) or self._step_state.held(u) for u in units})
            self._apart = units

    def again(self, units: Sequence[Unit], usable: Callable[[Sequence[Tensor]], bool]) -> Update | None:
        """Make the step of all units ready if all of them stand, and their gradients lie as they do and are `usable`.

        None, and nothing is done, if anything is to be looked at more closely.
        """
        standing = self.standing.get(0)
        if standing is None or standing.others or standing.are_shared or units != standing.units:
            return None
        grads = standing.gradients()
        if grads is None or not usable(grads):
            return None
        self._estimates.begin()
        update = Update(self._optimizer.spectral_function)
        if not self._repeated(standing, grads, update, {}):
            return None
        update.prepare(self._optimizer.kernels)
        return update

    def _repeat(
        self, bucket: int, units: Sequence[Unit], update: Update, known: dict[Any, Coefficients]
    ) -> list[Unit] | None:
        """Put what stands as the last step left it into `update`, all at once; returns the others, None for all."""
        standing = self.standing.get(bucket)
        if standing is None or units != standing.units:
            return None
        grads = standing.gradients()
        return standing.others if grads is not None and self._repeated(standing, grads, update, known) else None

    def _repeated(
        self, standing: Standing, grads: Sequence[Tensor], update: Update, known: dict[Any, Coefficients]
    ) -> bool:
        """Put what stands into `update`, with these gradients; False, and nothing, where anything has changed."""
        steps = standing.steps(self._optimizer.state)
        if steps is None:
            return False
        kinds = standing.kinds(steps)
        recipes = {}
        for key, kind in kinds.items():
            group = self._optimizer.param_groups[kind.group]
            if group["capturable"] or [*kind.kept] != self._step_state.kept(group, kind.step):
                return False
            due, is_open = _is_due(group, kind.step, kind.n), "second_moment" in kind.kept
            tally = self._estimates.tally(standing.first[kind.group, kind.processes]) if is_open else None
            recipes[key] = Recipe(due, self._coefficients_of(kind[:3], known), tally)
        standing.add_to(update, grads, steps, recipes)
        return True

    def _stand(self, bucket: int, units: Sequence[Unit]) -> None:
        """Remember all units as they are, until the next step finds otherwise."""
        self.standing[bucket] = Standing(units, self._optimizer.state)

    def _kernels_of(self, bucket: int) -> Dispatcher:
        """Give each bucket kernels of its own: they keep what they know of the blocks that they moved last."""
        while len(self._more_kernels) < bucket:
            self._more_kernels.append(get_kernel(self._backend, type(self._optimizer).__name__))
        return self._more_kernels[bucket - 1] if bucket else self._optimizer.kernels

    def _add(self, unit: Unit, update: Update, known: dict[Any, Coefficients]) -> Sequence[State]:
        """Put one unit's part of the step into `update`; changes nothing. Returns the state of its parameters.

        `known` has what other units needed: parameters of a group are almost always at the same step. A unit whose
        counter lies on a device has its own there.
        """
        group = unit.group
        coefficients, step = known.get(unit), 0
        if coefficients is None:
            step = self._step_state.steps_taken(unit) + 1
            coefficients = self._coefficients_of((unit.index, step, statistics_dtype(unit.owner)), known)
        closed = is_closed(group, step)
        states = self._step_state.ready(unit, step, update)
        if closed:
            for param, state in zip(unit.params, states, strict=True):
                update.add_scaled(unit, param, state, coefficients)
            return states
        due = _is_due(group, step, max(unit.cut.sizes, default=1))
        refresh = due or not {"basis", "eigenvalues"} <= self._step_state.held(unit)[0].keys()
        tally = self._estimates.tally(unit)
        if unit.spans:
            update.add_group(unit, states, refresh, coefficients, tally)
        else:
            update.add_parameter(unit, states[0], refresh, coefficients, tally)
        return states

    def _coefficients_of(self, key: tuple[int, int, torch.dtype], known: dict[Any, Coefficients]) -> Coefficients:
        """Return the coefficients of a group's step, from `known` if other units have needed the same."""
        found = known.get(key)
        if found is None:
            optimizer, group = self._optimizer, self._optimizer.param_groups[key[0]]
            found = known[key] = optimizer.coefficients(group, *key[1:], optimizer.final_lr(group))
        return found

    def _known_to_devices(self, units: Sequence[Unit]) -> dict[Unit, Coefficients]:
        """Compute the coefficients of units whose steps only their devices count, many units at a time."""
        optimizer = self._optimizer
        if not any(group["capturable"] for group in optimizer.param_groups):
            return {}
        alike: dict[tuple[int, torch.dtype, torch.device], list[Unit]] = {}
        for unit in units:
            if unit.group["capturable"]:
                alike.setdefault((unit.index, statistics_dtype(unit.owner), unit.owner.device), []).append(unit)
        known: dict[Unit, Coefficients] = {}
        for (_, dtype, device), together in alike.items():
            taken = [self._step_state.counter(unit, device) for unit in together]
            group = together[0].group
            columns = optimizer.coefficients(group, torch.stack(taken).double() + 1, dtype, optimizer.final_lr(group))
            known |= zip(together, columns.split(len(together)), strict=True)
        return known


def _is_due(group: Group, step: int, n: int) -> bool:
    """Tell whether a basis is to be found anew.

    Before n steps V has no full rank, and a basis of its null space would be an arbitrary one to keep.
    """
    return step <= n or (step - 1) % int(group["refresh_every"]) == 0
