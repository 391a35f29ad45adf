"""What all block optimizers share: options, state, and the step as the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from blockadapt.errors import NonFiniteGradientError
from blockadapt.kernels import Coefficients, Descent, Dispatcher, Kernel, get_kernel
from blockadapt.moments import FirstMoment, SecondMoment, statistics_dtype
from blockadapt.optimizers import checkpoint
from blockadapt.optimizers.estimates import Estimates
from blockadapt.optimizers.gradients import are_usable, require_gradients, unusable
from blockadapt.optimizers.options import require_capturable, require_cut, require_listed_once, require_options
from blockadapt.optimizers.peak import peak_lr, raise_peak_
from blockadapt.optimizers.ranks import (
    OwnShards,
    Ranks,
    SharedOut,
    Verdict,
)
from blockadapt.optimizers.standing import Standing
from blockadapt.optimizers.storage import (
    State,
    all_in_form,
    block_state_names,
    counter_device,
    shapes_of,
    steps_taken,
)
from blockadapt.optimizers.traced import TracedStep
from blockadapt.optimizers.unit import Group, Known, Unit, Units, describe, is_closed, units_of
from blockadapt.optimizers.update import Update
from blockadapt.spectrum import INVERSE_ROOT, Estimate, SpectralFunction, Spectrum, SpectrumClip, resolution_of
from blockadapt.terms import Term, term_of
from blockadapt.validation import (
    Described,
    has_numbers,
    is_plain,
    refusal,
    require,
    require_lr,
)

CAPTURABLE = ("cuda", "xpu", "hpu", "privateuseone", "xla")
"""Kinds of devices on which a step may be captured: those for which torch's own optimizers have `capturable`."""

Closure = Callable[[], Any]

# torch wraps its own so that torch.compile leaves it alone, and the wrapper imports the compiler: 1.4 s in every first
# constructor of a process, also where nothing but a plan is made.
_add_param_group = getattr(Optimizer.add_param_group, "__wrapped__", Optimizer.add_param_group)


class BlockOptimizer(TracedStep, Optimizer):
    """Base of the family. A subclass names its options and says how the moments and the step size move.

    Everything else is here: param groups, state, atomic steps, checkpoints.
    """

    averages_gradient: ClassVar[bool]
    """Whether a first moment is always kept; without it the gradient itself is used (β₁ = 0)."""

    decouples_weight_decay: ClassVar[bool] = False

    spectral_function: ClassVar[SpectralFunction] = INVERSE_ROOT
    """f in s(λ) = clip(f(λ̂), λₗ, λᵤ); a subclass may bring another."""

    def __init__(self, params: Any, defaults: dict[str, Any], backend: str | Kernel, process_group: Any) -> None:
        self._backend = backend
        self._process_group = process_group
        self._set_up()
        super().__init__(params, {**defaults, "skipped_steps": 0, "estimate": tuple(Estimate())})
        self._groups = self.param_groups  # by another name, see `TracedStep`

    def _set_up(self) -> None:
        """Make what is not kept in a copy or a pickle."""
        owner, group = type(self).__name__, self._process_group
        self.kernels = get_kernel(self._backend, owner)
        self._more_kernels: list[Dispatcher] = []
        self._ranks: Ranks = OwnShards(owner) if group is None else SharedOut(owner, group)
        self._estimates = Estimates(owner)
        self._units = Units(self._require_options_of, self._require_cut_of, self._ranks.share_out)
        self._standing: dict[int, Standing] = {}
        self._forget_twin(anew=True)

    def keeps_first_moment(self, group: Group) -> bool:
        """Whether this group has a first moment: always, or since a schedule set its `momentum`."""
        return self.averages_gradient or ("momentum" in self.defaults and group["momentum"] is not None)

    # What a subclass says ------------------------------------------------------------------------------------------

    def _require_options(self, group: Group) -> None:
        """Raise unless the options of its own are valid."""

    def _first_moment(self, group: Group, step: Term) -> FirstMoment:
        """How m moves at this step; by default it is the gradient."""
        return FirstMoment(0.0, 1.0)

    def _second_moment(self, group: Group, step: Term) -> SecondMoment:
        """How V moves at this step."""
        raise NotImplementedError

    def _step_size(self, lr: Term, step: Term) -> Term:
        """αₜ."""
        return lr

    # The step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step. If it raises, parameters and state are as before.

        Args:
            closure: Reevaluates the model, calls backward and returns the loss.

        Returns:
            The loss, if there is a closure.

        Raises:
            NonFiniteGradientError: A gradient is not finite, and the group has `on_nonfinite="raise"`.
            RuntimeError: A gradient is sparse, or another process failed or was lost.
            ValueError: An option, a gradient or the state is not what a step can take; the message says which.
        """
        if torch.compiler.is_compiling():
            return self._traced_step(closure)
        self._forget_twin()
        with _mode_of(self.param_groups):
            return self.take_step(closure)

    def take_step(self, closure: Closure | None = None) -> Any:
        """See `step`, without its hooks."""
        self._ranks.require_whole()
        try:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            updates = self._made_ready()
        except BaseException as error:
            verdict = Verdict.NOT_FINITE if isinstance(error, NonFiniteGradientError) else Verdict.FAILED
            with suppress(RuntimeError):  # the others do not answer: there is a reason to raise as it is
                self._ranks.agree(verdict)
            raise
        if self._ranks.agree(Verdict.SKIP if updates is None else Verdict.GO) is Verdict.SKIP:
            for group in self.param_groups:
                group["skipped_steps"] += 1
            return loss
        for bucket, update in enumerate(updates or ()):
            update.write_()
            self._ranks.publish(bucket)
        self._estimates.add_up(self.param_groups)
        self._ranks.finish_()
        for group in self.param_groups:
            raise_peak_(group)
        return loss

    def _made_ready(self) -> list[Update] | None:
        """The step, ready to be written, one update for each bucket of units; None to skip it. Changes nothing."""
        units = self.units()
        if not self._has_usable_gradients():
            return None
        self._estimates.begin()
        updates = []
        known: dict[Any, Coefficients] = {}
        for bucket, together in enumerate(self._ranks.buckets([unit for unit in units if unit.is_moved()])):
            update = Update(self.spectral_function)
            known |= self._known_to_devices(together)
            others = self._repeat(bucket, together, update, known)
            for unit in together if others is None else others:
                self._prepare(unit, update, known)
            if others is None:
                update.finish.append(partial(self._stand, bucket, together))
            update.prepare(self._kernels_of(bucket))
            updates.append(update)
        return updates

    def _repeat(
        self, bucket: int, units: Sequence[Unit], update: Update, known: dict[Any, Coefficients]
    ) -> list[Unit] | None:
        """Put what stands as the last step left it into `update`, all at once; returns the others, None for all."""
        standing = self._standing.get(bucket)
        steps = standing.steps(units, self._needed, self.state) if standing is not None else None
        if standing is None or steps is None:
            return None
        kinds = standing.kinds(steps)
        if any(is_closed(self.param_groups[kind.group], kind.step) for kind in kinds.values()):
            return None
        plans = {
            key: (
                self._is_due(self.param_groups[kind.group], kind.step, kind.n),
                self._coefficients_of(kind[:3], known),
                self._estimates.tally(standing.first[kind.group]),
            )
            for key, kind in kinds.items()
        }
        return standing.others if standing.add_to(update, steps, plans) else None

    def _stand(self, bucket: int, units: Sequence[Unit]) -> None:
        """Nothing has changed since, until the next step finds otherwise."""
        self._standing[bucket] = Standing(units, self.state)

    def _kernels_of(self, bucket: int) -> Dispatcher:
        """Kernels of its own for each bucket: they keep what they know of the blocks that they moved last."""
        while len(self._more_kernels) < bucket:
            self._more_kernels.append(get_kernel(self._backend))
        return self._more_kernels[bucket - 1] if bucket else self.kernels

    def units(self) -> list[Unit]:
        """Its units of blocks. Options that were set since the last step are checked here."""
        units = self._units.of(self.param_groups)
        self._ranks.warn()
        return units

    def units_of(self, group: Group, index: int) -> list[Unit]:
        """The units that a group with these options would have in this place."""
        units = list(units_of(group, index))
        self._ranks.share_out(units)
        return units

    def _prepare(self, unit: Unit, update: Update, known: dict[Any, Coefficients]) -> None:
        """Put one unit's part of the step into `update`; changes nothing.

        `known` has what other units needed: parameters of a group are almost always at the same step. A unit whose
        counter lies on a device has its own there.
        """
        group, held = unit.group, [self.state.get(param, {}) for param in unit.params]
        coefficients, step = known.get(unit), 0
        if coefficients is None:
            step = self._steps_taken(unit, held[0]) + 1
            coefficients = self._coefficients_of((unit.index, step, statistics_dtype(unit.owner)), known)
        closed = is_closed(group, step)
        states = self._states(unit, held, self._kept(group, step), update)
        if closed:
            for param, state in zip(unit.params, states, strict=True):
                update.add_scaled(unit, param, state, coefficients)
            return
        due = self._is_due(group, step, max(unit.cut.sizes, default=1))
        refresh = due or not {"basis", "eigenvalues"} <= held[0].keys()
        tally = self._estimates.tally(unit)
        if unit.spans:
            update.add_group(unit, states, refresh, coefficients, tally)
        else:
            update.add_parameter(unit, states[0], refresh, coefficients, tally)

    def _is_due(self, group: Group, step: int, n: int) -> bool:
        """Whether a basis is to be found anew.

        Before n steps V has no full rank, and a basis of its null space would be an arbitrary one to keep.
        """
        return step <= n or (step - 1) % int(group["refresh_every"]) == 0

    def _coefficients_of(self, key: tuple[int, int, torch.dtype], known: dict[Any, Coefficients]) -> Coefficients:
        """The coefficients of a group's step, from `known` if other units have needed the same."""
        group = self.param_groups[key[0]]
        return known.get(key) or known.setdefault(key, self.coefficients(group, *key[1:], self.final_lr(group)))

    def _known_to_devices(self, units: Sequence[Unit]) -> dict[Unit, Coefficients]:
        """The coefficients of units whose steps only their devices count, many units at a time."""
        if not any(group["capturable"] for group in self.param_groups):
            return {}
        alike: dict[tuple[int, torch.dtype, torch.device], list[Unit]] = {}
        for unit in units:
            if unit.group["capturable"]:
                alike.setdefault((unit.index, statistics_dtype(unit.owner), unit.owner.device), []).append(unit)
        known: dict[Unit, Coefficients] = {}
        for (_, dtype, device), together in alike.items():
            taken = [self._counter(unit, device) for unit in together]
            group = together[0].group
            columns = self.coefficients(group, torch.stack(taken).double() + 1, dtype, self.final_lr(group))
            known |= zip(together, columns.split(len(together)), strict=True)
        return known

    def coefficients(self, group: Group, step: Term, dtype: torch.dtype, final_lr: Term | None) -> Coefficients:
        """All numbers of this group's step number `step`, for statistics of this dtype, clipped around `final_lr`.

        `step` may be a tensor with the numbers of several parameters, and so may be what depends on it.
        """
        require_lr(type(self).__name__, group["lr"])
        lr = term_of(group["lr"])
        decay, decoupled = float(group["weight_decay"]), self.decouples_weight_decay
        first, second = self._first_moment(group, step), self._second_moment(group, step)
        descent = Descent(
            sign=-1.0 if group["maximize"] else 1.0,
            coupled=0.0 if decoupled else decay,
            shrink=1 - lr * decay if decoupled else 1.0,
        )
        spectrum = Spectrum(
            self._step_size(lr, step) / first.correction,
            second.correction,
            float(group["eps"]),
            resolution=resolution_of(dtype),
        )
        if final_lr is not None:
            closed = is_closed(group, step)
            lower, upper = (final_lr, final_lr) if closed else group["clip"].bounds(step, final_lr)
            spectrum = spectrum._replace(lower=lower, upper=upper)
        return Coefficients(descent, first, second, spectrum)

    def final_lr(self, group: Group) -> Term | None:
        """α* of a param group at its present lr; None without a clip, and before an `"auto"` one has measured it."""
        self._estimates.read()
        clip: SpectrumClip | None = group["clip"]
        if clip is None:
            return None
        if clip.final_lr != "auto":
            return clip.final_lr * term_of(group["lr"]) / term_of(peak_lr(group))
        ratio = Estimate.of(type(self).__name__, group["estimate"]).ratio
        return None if ratio is None else ratio * term_of(group["lr"])

    # State ---------------------------------------------------------------------------------------------------------

    def make_state_(self) -> list[Unit]:
        """Make what the next step would make of state, in form, and say which units it would move."""
        update = Update(self.spectral_function)
        units = [unit for unit in self.units() if unit.is_moved()]
        for unit in units:
            held = [self.state.get(param, {}) for param in unit.params]
            step = 0 if unit.group["capturable"] else self._steps_taken(unit, held[0]) + 1
            self._states(unit, held, self._kept(unit.group, step), update)
        for action in update.finish:
            action()
        return units

    def _kept(self, group: Group, step: int) -> list[str]:
        """The state that blocks keep after this step."""
        return [] if is_closed(group, step) else block_state_names(group.get("amsgrad", False), group["refresh_every"])

    def _all_kept(self, group: Group, kept: Sequence[str]) -> list[str]:
        """What blocks keep, and the first moment."""
        return [*kept, *["exp_avg"] * self.keeps_first_moment(group)]

    def _needed(self, index: int) -> list[str] | None:
        """All that units of a group keep while its clip is open; None if their devices count the steps."""
        group = self.param_groups[index]
        return None if group["capturable"] else self._all_kept(group, self._kept(group, 0))

    def _states(self, unit: Unit, held: list[State], kept: Sequence[str], update: Update) -> list[State]:
        """The state of each parameter with all that this step needs, in the one form that kernels take.

        What is new, converted or no longer needed is put in place only if the step succeeds. While nothing has changed
        since the step before, nothing is looked at again.
        """
        states, all_kept = held, self._all_kept(unit.group, kept)
        if not unit.is_known(all_kept, unit.group["capturable"], held):
            unit.forget()
            states = [self._fitted(unit, param, kept if param is unit.owner else (), update) for param in unit.params]
            update.finish.append(lambda: self._remember(unit, all_kept))
        for state in states:
            update.counters.append(state["step"])
        return states

    def _remember(self, unit: Unit, kept: Sequence[str]) -> None:
        """All is in order now. What has no numbers lies nowhere, and is looked at again each time."""
        parts = [unit.part(param) for param in unit.params]
        if all(map(has_numbers, parts)):
            states = [self.state[param] for param in unit.params]
            unit.known = Known.of(kept, unit.group["capturable"], parts, states)

    def _fitted(self, unit: Unit, param: Tensor, kept: Sequence[str], update: Update) -> State:
        """The state of a parameter for this step; see `_states`.

        Raises:
            ValueError: The state does not fit the parameter or the options.
            RuntimeError: The second moment was freed when the clip closed, and is needed now.
        """
        owner, whose = type(self).__name__, self._describe(unit, param)
        self._require_writable(unit.part(param), whose)
        if unit.group["capturable"]:
            rule = f"False where parameters are not on one of {', '.join(CAPTURABLE)} (for {whose})"
            fits = param.device.type in CAPTURABLE
            require(fits, owner, "capturable", rule, Described(f"True for {param.device.type}"))
        held = self.state.get(param, {})
        shapes = shapes_of(unit.shape(param), unit.cut if param is unit.owner else None)
        fitted = all_in_form(owner, whose, held, shapes, param, unit.cut, unit.group["capturable"])
        needed = ["step"] + ["exp_avg"] * self.keeps_first_moment(unit.group) + (["cut", *kept] if kept else [])
        for name in needed:
            if name not in fitted:
                fitted[name] = self._new(unit, param, name, shapes[name], held)
        for name in [name for name in fitted if name not in needed]:  # closed, or an option was switched off
            del fitted[name]

        def keep() -> None:
            state = self.state[param]
            state.clear()
            state.update(fitted)

        update.finish.append(keep)
        return fitted

    def _new(self, unit: Unit, param: Tensor, name: str, shape: tuple[int, ...], held: State) -> Tensor:
        """A state entry that is not there yet: zeros, or the cut's fingerprint."""
        owner = type(self).__name__
        if held and name == "second_moment":
            rule = "left closed once it has closed, because the second moment was freed then"
            value = Described(f"an open interval at step {steps_taken(held) + 1}")
            raise RuntimeError(refusal(owner, "clip", rule, value))
        if held and (name == "step" or (name == "exp_avg" and self.averages_gradient)):
            rule = f"whole, or deleted to begin anew (for {self._describe(unit, param)})"
            raise ValueError(refusal(owner, "state", rule, Described(f"one without {name!r}")))
        if name == "step":
            return torch.tensor(0, dtype=torch.int64, device=counter_device(param, unit.group["capturable"]))
        if name == "cut":
            return torch.tensor(unit.cut.fingerprint, dtype=torch.int64)
        return torch.zeros(shape, dtype=statistics_dtype(param), device=unit.part(param).device)

    def _require_writable(self, param: Tensor, whose: str) -> None:
        """Raise unless a kernel may write into this parameter's memory."""
        owner = type(self).__name__
        rule = f"plain, dense, real floating-point tensors that own their numbers (for {whose})"
        dense = is_plain(param) and param.layout is torch.strided and param.is_floating_point()
        require(dense, owner, "params", rule, Described(f"{type(param).__name__} of {param.dtype}"))
        apart = not param.is_neg() and torch._debug_has_internal_overlap(param) != 1
        require(apart, owner, "params", rule, Described("one whose entries share memory or wait for a sign"))
        require(not param.is_inference(), owner, "params", rule, Described("an inference tensor"))

    def _steps_taken(self, unit: Unit, held: State) -> int:
        """Steps that the owner has taken."""
        count = held.get("step")
        if count is None:
            return 0
        if _is_count(count) and (steps := int(count)) >= 0:
            return steps
        raise ValueError(self._no_count(unit, count))

    def _counter(self, unit: Unit, device: torch.device) -> Tensor:
        """The same as a number on the device, which nobody waits for."""
        count: Any = self.state.get(unit.owner, {}).get("step")
        if count is None:
            return torch.zeros((), dtype=torch.int64, device=device)
        if _is_count(count):
            counter: Tensor = count.detach().reshape(()).to(device, torch.int64)
            return counter
        raise ValueError(self._no_count(unit, count))

    def _no_count(self, unit: Unit, count: object) -> str:
        rule = f"a count of steps (in the state of {self._describe(unit, unit.owner)})"
        return refusal(type(self).__name__, "step", rule, count)

    def _describe(self, unit: Unit, param: Tensor) -> str:
        position = next(i for i, other in enumerate(unit.params) if other is param)
        return describe(unit.group, unit.index, unit.position + position)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because of a non-finite gradient, under `on_nonfinite="skip"`."""
        return max(int(group["skipped_steps"]) for group in self.param_groups)

    def _has_usable_gradients(self) -> bool:
        """Whether to step. Raises at what can never be used."""
        owner = type(self).__name__
        for index, group in enumerate(self.param_groups):
            require_gradients(owner, group, index)
        coupled = [0.0 if self.decouples_weight_decay else float(group["weight_decay"]) for group in self.param_groups]
        looked_at = [i for i, group in enumerate(self.param_groups) if group["on_nonfinite"] != "propagate"]
        usable = are_usable([(self.param_groups[i], coupled[i]) for i in looked_at])
        for index in [index for index, is_usable in zip(looked_at, usable, strict=True) if not is_usable]:
            if self.param_groups[index]["on_nonfinite"] == "raise":
                raise unusable(owner, self.param_groups[index], index, coupled[index])
        return all(usable)

    # torch.optim.Optimizer -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; its options are checked before anything is kept."""
        require_listed_once(type(self).__name__, param_group)
        before = len(self.param_groups)
        _add_param_group(self, param_group)
        group = self.param_groups[-1]
        lr = group["lr"]
        group.setdefault("peak_lr", lr.clone() if isinstance(lr, Tensor) else lr)
        group[checkpoint.FORMAT_KEY] = checkpoint.FORMAT
        try:
            self.require_group(group)
        except Exception:
            del self.param_groups[before:]
            raise

    def require_group(self, group: Group) -> None:
        """Raise unless every option of this group is valid, and its parameters can be cut as they say."""
        require_lr(type(self).__name__, group["lr"])
        self._require_options_of(group)
        self._require_cut_of(group)

    def _require_options_of(self, group: Group) -> None:
        """Raise unless every option of this group but lr is valid by itself."""
        require_options(type(self).__name__, self.defaults, group)
        self._require_options(group)
        if group["capturable"]:
            require_capturable(type(self).__name__, group, self._process_group)

    def _require_cut_of(self, group: Group) -> None:
        """Raise unless this group's parameters can be cut as its options say."""
        require_cut(type(self).__name__, group, self._process_group)

    def __getstate__(self) -> dict[str, Any]:
        if self._process_group is not None:
            raise TypeError(
                f"{type(self).__name__}: an optimizer with a `process_group` cannot be copied or pickled; "
                f"save its state_dict with torch.distributed.checkpoint."
            )
        self._estimates.read()
        return {**super().__getstate__(), "_backend": self._backend, "_process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        checkpoint.unshield_(state["state"])
        super().__setstate__(state)
        self._groups = self.param_groups
        self._set_up()

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain data, blocks one after another: `torch.load(weights_only=True)` reads it."""
        self._ranks.require_whole()
        self._estimates.read()
        return checkpoint.written(f"{type(self).__name__}.state_dict", super().state_dict(), self.units())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, or raise ValueError with the reason and change nothing. Statistics keep their precision."""

        def checked(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            return checkpoint.fitted(f"{type(self).__name__}.load_state_dict", self, loaded)

        handle = self.register_load_state_dict_pre_hook(checked)  # the last one: it sees what other hooks made
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()


def _mode_of(groups: Sequence[Group]) -> Any:
    """Where FakeTensors are moved: in their mode, which may not be the present one. Elsewhere nothing is entered."""
    first = next((param for group in groups for param in group["params"]), None)
    return nullcontext() if first is None else getattr(first, "fake_mode", None) or nullcontext()


def _is_count(value: object) -> bool:
    return isinstance(value, Tensor) and is_plain(value) and value.numel() == 1
