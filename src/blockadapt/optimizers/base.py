"""What all block optimizers share: options, the step as the pipeline, and torch's side of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from blockadapt.errors import NonFiniteGradientError
from blockadapt.kernels import Coefficients, Descent, Dispatcher, Kernel, get_kernel
from blockadapt.kernels.segments import Recipe
from blockadapt.moments import FirstMoment, SecondMoment, statistics_dtype
from blockadapt.optimizers import checkpoint
from blockadapt.optimizers.estimates import Estimates
from blockadapt.optimizers.gradients import Gradients, are_usable, refuse, require_gradients
from blockadapt.optimizers.options import (
    require_capturable,
    require_cut,
    require_kept,
    require_listed_once,
    require_lists,
    require_options,
    require_params,
)
from blockadapt.optimizers.peak import peak_lr, set_peak_
from blockadapt.optimizers.ranks import OwnShards, Ranks, SharedOut, Verdict
from blockadapt.optimizers.standing import Standing
from blockadapt.optimizers.step_state import StepState
from blockadapt.optimizers.traced import TracedStep
from blockadapt.optimizers.unit import Group, Unit, Units, is_closed
from blockadapt.optimizers.update import Update
from blockadapt.spectrum import INVERSE_ROOT, Estimate, SpectralFunction, Spectrum, SpectrumClip, resolution_of
from blockadapt.terms import Term, term_of
from blockadapt.validation import Described, refusal, require, require_lr

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
        self._units = Units(
            self._require_options_of, self._require_cut_of, partial(require_params, owner), self._ranks.share_out
        )
        self._step_state = StepState(self)
        self._standing: dict[int, Standing] = {}
        self._stepping = Lock()
        self._forget_twin(anew=True)

    def keeps_first_moment(self, group: Group) -> bool:
        """Whether this group has a first moment: always, or since a schedule set its `momentum`."""
        return self.averages_gradient or ("momentum" in self.defaults and group["momentum"] is not None)

    # What a subclass says ------------------------------------------------------------------------------------------

    def _require_options(self, group: Group) -> None:
        """Raise unless the options of its own are valid."""

    def _first_moment(self, group: Group, step: Term) -> FirstMoment:
        """Say how m moves at this step; by default it is the gradient."""
        return FirstMoment(0.0, 1.0)

    def _second_moment(self, group: Group, step: Term) -> SecondMoment:
        """Say how V moves at this step."""
        raise NotImplementedError

    def _step_size(self, lr: Term, step: Term) -> Term:
        """Compute αₜ."""
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
            RuntimeError: A gradient is sparse, another thread is in a step, or another process failed or was lost.
            ValueError: An option, a gradient or the state is not what a step can take; the message says which.
        """
        if torch.compiler.is_compiling():
            return self._traced_step(closure)
        self._forget_twin()
        with _mode_of(self.param_groups):
            return self.take_step(closure)

    def take_step(self, closure: Closure | None = None) -> Any:
        """See `step`, without its hooks."""
        loss = None
        if closure is not None:
            with self._alone(), self._told_to_others():
                self.units()  # the processes are known from now on, also if the closure raises
            with self._told_to_others(), torch.enable_grad():
                loss = closure()
        with self._alone():
            self._move()
        return loss

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out: kernels work without Python's lock, in memory that is the optimizer's.

        Yields:
            Nothing, once.

        Raises:
            RuntimeError: A step is being taken already, by another thread or further up in this one.
        """
        if not self._stepping.acquire(blocking=False):
            rule, found = "called again only when the last call has returned", Described("a call in the midst of one")
            raise RuntimeError(refusal(type(self).__name__, "step", rule, found))
        try:
            yield
        finally:
            self._stepping.release()

    @contextmanager
    def _told_to_others(self) -> Iterator[None]:
        """Tell the other processes of what is raised here, before anything is written: they wait for a verdict.

        Yields:
            Nothing, once.
        """
        self._ranks.require_whole()
        try:
            yield
        except BaseException as error:
            verdict = Verdict.NOT_FINITE if isinstance(error, NonFiniteGradientError) else Verdict.FAILED
            with suppress(RuntimeError):  # the others do not answer: there is a reason to raise as it is
                self._ranks.agree(verdict)
            raise

    def _move(self) -> None:
        """Make a step ready and, if all processes can, take it."""
        with self._told_to_others():
            updates = self._made_ready()
            peaks = [*map(peak_lr, self.param_groups)]
        if self._ranks.agree(Verdict.SKIP if updates is None else Verdict.GO) is Verdict.SKIP:
            for group in self.param_groups:
                group["skipped_steps"] += 1
            return
        for bucket, update in enumerate(updates or ()):
            update.write_()
            self._ranks.publish(bucket)
        self._estimates.note(self.param_groups)
        self._ranks.finish_()
        for group, peak in zip(self.param_groups, peaks, strict=True):
            set_peak_(group, peak)

    def _made_ready(self) -> list[Update] | None:
        """Make the step ready, one update for each bucket of units; None to skip it. Nothing changes yet."""
        units, gradients = self.units(), [Gradients.of(group) for group in self.param_groups]
        self._estimates.add_up()  # a device does it while it is asked about its gradients
        if not self._are_usable(gradients):
            return None
        if not all(each.are_all for each in gradients):
            units = [unit for unit in units if unit.is_moved()]
        self._estimates.begin()
        updates = []
        known: dict[Any, Coefficients] = {}
        for bucket, together in enumerate(self._ranks.buckets(units)):
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
        steps = standing.steps(units, self.state) if standing is not None else None
        if standing is None or steps is None:
            return None
        kinds = standing.kinds(steps)
        recipes = {}
        for key, kind in kinds.items():
            group = self.param_groups[kind.group]
            if group["capturable"] or [*kind.kept] != self._step_state.kept(group, kind.step):
                return None
            due = self._is_due(group, kind.step, kind.n)
            tally = None if is_closed(group, kind.step) else self._estimates.tally(standing.first[kind.group])
            recipes[key] = Recipe(due, self._coefficients_of(kind[:3], known), tally)
        return standing.others if standing.add_to(update, steps, recipes) else None

    def _stand(self, bucket: int, units: Sequence[Unit]) -> None:
        """Remember all units as they are, until the next step finds otherwise."""
        self._standing[bucket] = Standing(units, self.state)

    def _kernels_of(self, bucket: int) -> Dispatcher:
        """Give each bucket kernels of its own: they keep what they know of the blocks that they moved last."""
        while len(self._more_kernels) < bucket:
            self._more_kernels.append(get_kernel(self._backend))
        return self._more_kernels[bucket - 1] if bucket else self.kernels

    def make_state_(self) -> list[Unit]:
        """Make what the next step would make of state, in form, and say which units it would move."""
        update = Update(self.spectral_function)
        units = [unit for unit in self.units() if unit.is_moved()]
        for unit in units:
            step = 0 if unit.group["capturable"] else self._step_state.steps_taken(unit) + 1
            self._step_state.ready(unit, step, update)
        for action in update.finish:
            action()
        return units

    def units(self) -> list[Unit]:
        """Return its units of blocks. What was set since the last step, options and state, is checked here."""
        owner = type(self).__name__
        kept = Described(type(self.state).__name__)
        require(isinstance(self.state, dict), owner, "state", "a dict with that of each parameter", kept)
        require_lists(owner, self.param_groups)
        units = self._units.of(self.param_groups)
        for group in self.param_groups:
            require_lr(owner, group["lr"])
            require_kept(owner, group)
        self._ranks.warn()
        return units

    def units_of(self, groups: Sequence[Group]) -> list[Unit]:
        """Make the units that groups with these options would have in place of its own."""
        return self._units.anew(groups)

    def _prepare(self, unit: Unit, update: Update, known: dict[Any, Coefficients]) -> None:
        """Put one unit's part of the step into `update`; changes nothing.

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
            return
        due = self._is_due(group, step, max(unit.cut.sizes, default=1))
        refresh = due or not {"basis", "eigenvalues"} <= self._step_state.held(unit)[0].keys()
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
        """Return the coefficients of a group's step, from `known` if other units have needed the same."""
        group = self.param_groups[key[0]]
        return known.get(key) or known.setdefault(key, self.coefficients(group, *key[1:], self.final_lr(group)))

    def _known_to_devices(self, units: Sequence[Unit]) -> dict[Unit, Coefficients]:
        """Compute the coefficients of units whose steps only their devices count, many units at a time."""
        if not any(group["capturable"] for group in self.param_groups):
            return {}
        alike: dict[tuple[int, torch.dtype, torch.device], list[Unit]] = {}
        for unit in units:
            if unit.group["capturable"]:
                alike.setdefault((unit.index, statistics_dtype(unit.owner), unit.owner.device), []).append(unit)
        known: dict[Unit, Coefficients] = {}
        for (_, dtype, device), together in alike.items():
            taken = [self._step_state.counter(unit, device) for unit in together]
            group = together[0].group
            columns = self.coefficients(group, torch.stack(taken).double() + 1, dtype, self.final_lr(group))
            known |= zip(together, columns.split(len(together)), strict=True)
        return known

    def coefficients(self, group: Group, step: Term, dtype: torch.dtype, final_lr: Term | None) -> Coefficients:
        """Compute all numbers of this group's step number `step`, for statistics of this dtype, around `final_lr`.

        `step` may be a tensor with the numbers of several parameters, and so may be what depends on it.
        """
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
        """Tell α* of a param group at its present lr; None without a clip, or before an `"auto"` one has measured."""
        self._estimates.read()
        clip: SpectrumClip | None = group["clip"]
        if clip is None:
            return None
        if clip.final_lr != "auto":
            return clip.final_lr * term_of(group["lr"]) / term_of(peak_lr(group))
        ratio = Estimate.of(type(self).__name__, group["estimate"]).ratio
        return None if ratio is None else ratio * term_of(group["lr"])

    @property
    def skipped_steps(self) -> int:
        """Count the steps skipped because of a non-finite gradient, under `on_nonfinite="skip"`."""
        return max(int(group["skipped_steps"]) for group in self.param_groups)

    def _are_usable(self, gradients: Sequence[Gradients]) -> bool:
        """Whether to step with these gradients of each group.

        Raises:
            NonFiniteGradientError: A gradient is not finite, and the group has `on_nonfinite="raise"`.
        """
        owner = type(self).__name__
        for index, group in enumerate(self.param_groups):
            require_gradients(owner, group, index, gradients[index])
        coupled = [0.0 if self.decouples_weight_decay else float(group["weight_decay"]) for group in self.param_groups]
        looked_at = [i for i, group in enumerate(self.param_groups) if group["on_nonfinite"] != "propagate"]
        usable = are_usable([(gradients[i], coupled[i]) for i in looked_at])
        for index in [index for index, is_usable in zip(looked_at, usable, strict=True) if not is_usable]:
            if self.param_groups[index]["on_nonfinite"] == "raise":
                refuse(owner, self.param_groups[index], index, coupled[index])
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
        """Return the state as tensors and plain data, by block: `torch.load(weights_only=True)` reads it."""
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
    """Give the mode of FakeTensors, which may not be the present one. Elsewhere nothing is entered."""
    try:
        first = next((param for group in groups for param in group["params"]), None)
    except (KeyError, TypeError):  # no lists of parameters: the step itself says so
        first = None
    return nullcontext() if first is None else getattr(first, "fake_mode", None) or nullcontext()
