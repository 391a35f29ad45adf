"""Holds what all block optimizers share: options, the step as the pipeline, and torch's side of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from blockadapt.kernels import Coefficients, Descent, Kernel, get_kernel
from blockadapt.moments import FirstMoment, SecondMoment
from blockadapt.optimizers import checkpoint
from blockadapt.optimizers.autocast import without_autocast
from blockadapt.optimizers.concurrency import Alone, ToldToOthers, Uninterrupted
from blockadapt.optimizers.estimates import Estimates
from blockadapt.optimizers.gradients import Gradients, are_small, are_usable, refuse, require_gradients
from blockadapt.optimizers.options import (
    require_capturable,
    require_cut,
    require_kept,
    require_listed_once,
    require_lists,
    require_lr_of,
    require_options,
    require_params,
)
from blockadapt.optimizers.peak import peak_lr, set_peak_
from blockadapt.optimizers.preparation import Preparation
from blockadapt.optimizers.ranks import OwnShards, Ranks, SharedOut, Verdict
from blockadapt.optimizers.step_state import StepState
from blockadapt.optimizers.traced import TracedStep
from blockadapt.optimizers.unit import Group, Unit, Units, is_closed
from blockadapt.optimizers.update import Update
from blockadapt.spectrum import (
    INVERSE_ROOT,
    UNBOUNDED,
    Estimate,
    SpectralFunction,
    Spectrum,
    SpectrumClip,
    resolution_of,
)
from blockadapt.terms import Term, term_of
from blockadapt.validation import Described, refusal

Closure = Callable[[], Any]

# torch wraps its own so that torch.compile leaves them alone, and the wrapper imports the compiler: 1.4 s in the first
# constructor of every process, also where nothing but a plan is made, or else in its first iteration.
_add_param_group = getattr(Optimizer.add_param_group, "__wrapped__", Optimizer.add_param_group)
_zero_grad = getattr(Optimizer.zero_grad, "__wrapped__", Optimizer.zero_grad)


class BlockOptimizer(TracedStep, Optimizer):
    """Is the base of the family. A subclass names its options and says how the moments and the step size move.

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

    def _set_up(self) -> None:
        """Make what is not kept in a copy or a pickle."""
        owner, group = type(self).__name__, self._process_group
        self.kernels = get_kernel(self._backend, owner)
        self._ranks: Ranks = OwnShards(owner) if group is None else SharedOut(owner, group)
        self._estimates = Estimates(owner)
        self._units = Units(
            self._require_options_of, self._require_cut_of, partial(require_params, owner), self._ranks.share_out
        )
        self._step_state = StepState(self)
        self._preparation = Preparation(self, self._backend, self._step_state, self._estimates)
        self._alone = Alone(owner)
        self._forget_twin(anew=True)

    def keeps_first_moment(self, group: Group) -> bool:
        """Tell whether this group has a first moment: always, or since a schedule set its `momentum`."""
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
        with torch.no_grad():
            if torch.compiler.is_compiling():
                return self._traced_step(closure)
            self._forget_twin()
            with _mode_of(self.param_groups):
                return self.take_step(closure)

    def take_step(self, closure: Closure | None = None) -> Any:
        """See `step`, without its hooks."""
        loss = None
        if closure is not None:
            with self._alone, ToldToOthers(self._ranks):
                self.units()  # the processes are known from now on, also if the closure raises
            with ToldToOthers(self._ranks), torch.enable_grad():
                loss = closure()
        with self._alone, without_autocast():
            self._move()
        return loss

    def _move(self) -> None:
        """Make a step ready and, if all processes can, take it."""
        with ToldToOthers(self._ranks):
            updates = self._made_ready()
            peaks = [*map(peak_lr, self.param_groups)]
        if self._ranks.agree(Verdict.SKIP if updates is None else Verdict.GO) is Verdict.SKIP:
            for group in self.param_groups:
                group["skipped_steps"] += 1
            return
        with Uninterrupted() if self._process_group is None else nullcontext():  # others may let it wait for long
            self._estimates.expect()
            for bucket, update in enumerate(updates or ()):
                update.write_()
                self._ranks.publish(bucket)
            self._estimates.note(self.param_groups)
            self._ranks.finish_()
            for group, peak in zip(self.param_groups, peaks, strict=True):
                set_peak_(group, peak)

    def _made_ready(self) -> list[Update] | None:
        """Make the step ready, one update for each bucket of units; None to skip it. Nothing changes yet."""
        units = self.units()
        self._estimates.add_up()  # a device does it while it is asked about its gradients
        if self._process_group is None and (again := self._preparation.again(units, self._are_small)) is not None:
            return [again]
        gradients = [Gradients.of(group) for group in self.param_groups]
        if not self._are_usable(gradients):
            return None
        if not all(each.are_all for each in gradients):
            units = [unit for unit in units if unit.is_moved()]
        self._estimates.begin()
        updates = self._preparation.updates(self._ranks.buckets(units))
        self._estimates.make_ready()
        return updates

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
        """Return its units of blocks. What was set since the last step, options and state, is checked here.

        Raises:
            ValueError: Any of it is not what a step can take.
        """
        owner, held = type(self).__name__, cast(object, self.state)
        if not isinstance(held, dict):
            rule, found = "a dict with that of each parameter", Described(type(held).__name__)
            raise ValueError(refusal(owner, "state", rule, found))
        require_lists(owner, self.param_groups)
        units = self._units.of(self.param_groups)
        for group in self.param_groups:
            require_lr_of(owner, group)
            require_kept(owner, group)
        self._ranks.warn()
        return units

    def units_of(self, groups: Sequence[Group]) -> list[Unit]:
        """Make the units that groups with these options would have in place of its own."""
        return self._units.anew(groups)

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
        bounds: tuple[Term, Term] = 0.0, UNBOUNDED
        if final_lr is not None:
            bounds = (final_lr, final_lr) if is_closed(group, step) else group["clip"].bounds(step, final_lr)
        size, eps = self._step_size(lr, step) / first.correction, float(group["eps"])
        spectrum = Spectrum(size, second.correction, eps, *bounds, resolution_of(dtype))
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
        return max((int(group["skipped_steps"]) for group in self.param_groups), default=0)

    def _are_small(self, grads: Sequence[Tensor]) -> bool:
        """Tell whether these gradients of all parameters are so small that no closer look is needed."""
        rest = iter(grads)
        looked_at = []
        for group in self.param_groups:
            params = group["params"]
            some = Gradients(params, [*islice(rest, len(params))])
            if group["on_nonfinite"] != "propagate":
                looked_at.append((some, self._coupled(group)))
        return all(are_small(looked_at))

    def _coupled(self, group: Group) -> float:
        """Tell what of the parameters a group's gradients get added."""
        return 0.0 if self.decouples_weight_decay else float(group["weight_decay"])

    def _are_usable(self, gradients: Sequence[Gradients]) -> bool:
        """Tell whether to step with these gradients of each group.

        Raises:
            NonFiniteGradientError: A gradient is not finite, and the group has `on_nonfinite="raise"`.
        """
        owner = type(self).__name__
        looked_at: dict[int, tuple[Gradients, float]] = {}
        for index, group in enumerate(self.param_groups):
            require_gradients(owner, group, index, gradients[index])
            if group["on_nonfinite"] != "propagate":
                looked_at[index] = gradients[index], self._coupled(group)
        usable = are_usable([*looked_at.values()])
        if all(usable):
            return True
        for (index, (_, coupled)), is_usable in zip(looked_at.items(), usable, strict=True):
            if not is_usable and self.param_groups[index]["on_nonfinite"] == "raise":
                refuse(owner, self.param_groups[index], index, coupled)
        return False

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or set them to zero."""
        _zero_grad(self, set_to_none)

    zero_grad._torchdynamo_disable = True  # type: ignore[attr-defined]  # the wrapper's mark: torch.compile calls it as it is

    def require_group(self, group: Group) -> None:
        """Raise unless every option of this group is valid, and its parameters can be cut as they say."""
        require_lr_of(type(self).__name__, group)
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
        last = vars(self).get("_units")
        super().__setstate__(state)
        self._groups = self.param_groups
        self._set_up()
        if last is not None:  # a state was loaded, and cut for where these lie
            self._units.follow(last)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain data, by block: `torch.load(weights_only=True)` reads it."""
        self._ranks.require_whole()
        self._estimates.read()
        return checkpoint.written(f"{type(self).__name__}.state_dict", super().state_dict(), self.units())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, or raise ValueError with the reason and change nothing. Statistics keep their precision."""
        owner = f"{type(self).__name__}.load_state_dict"
        checkpoint.require_mapping(owner, state_dict)  # torch copies it before any hook

        def checked(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            return checkpoint.fitted(owner, self, loaded)

        handle = self.register_load_state_dict_pre_hook(checked)  # the last one: it sees what other hooks made
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()


def _mode_of(groups: Sequence[Group]) -> Any:
    """Give the mode of FakeTensors, which may not be the present one. Elsewhere nothing is entered."""
    try:
        for group in groups:
            for param in group["params"]:
                return getattr(param, "fake_mode", None) or _NO_MODE
    except (KeyError, TypeError):  # no lists of parameters: the step itself says so
        pass
    return _NO_MODE


_NO_MODE = nullcontext()
