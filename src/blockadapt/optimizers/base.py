"""What all block optimizers share: options, state, and the step as the pipeline."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from blockadapt.errors import NonFiniteGradientError
from blockadapt.kernels import Coefficients, Descent, Kernel, get_kernel
from blockadapt.moments import FirstMoment, SecondMoment, statistics_dtype
from blockadapt.optimizers import checkpoint
from blockadapt.optimizers.storage import WIDTHS, block_state_names, state_shape
from blockadapt.optimizers.update import Places, State, Update
from blockadapt.partition import MAX_BLOCK, IndexGroups, Partition, index_groups, partition, require_grouping
from blockadapt.spectrum import INVERSE_ROOT, SpectralFunction, Spectrum, SpectrumClip, resolution_of
from blockadapt.validation import (
    Described,
    refusal,
    require,
    require_bool,
    require_choice,
    require_integer,
    require_lr,
    require_number,
)

_NOT_OPTIONS = ("params", "param_names", "base_lr", "initial_lr", "differentiable")
_FAMILY_OPTIONS = ("betas", "alpha", "beta1", "beta1_decay", "amsgrad", "backend", "process_group")
"""Options that some optimizers of the family have in their param groups, and others do not."""

Closure = Callable[[], Any]
Group = dict[str, Any]


class BlockOptimizer(Optimizer):
    """Base of the family. A subclass names its options and says how the moments and the step size move.

    Everything else is here: param groups, state, atomic steps, checkpoints.
    """

    averages_gradient: ClassVar[bool]
    """Whether a first moment is kept; without it the gradient itself is used (β₁ = 0)."""

    decouples_weight_decay: ClassVar[bool] = False

    spectral_function: ClassVar[SpectralFunction] = INVERSE_ROOT
    """f in s(λ) = clip(f(λ̂), λₗ, λᵤ); a subclass may bring another."""

    def __init__(self, params: Any, defaults: dict[str, Any], backend: str | Kernel, process_group: Any) -> None:
        rule = "None (blocks are not shared among processes yet)"
        require(process_group is None, type(self).__name__, "process_group", rule, process_group)
        self.kernels = get_kernel(backend, type(self).__name__)
        self._backend = backend
        self._places = Places()
        super().__init__(params, {**defaults, "skipped_steps": 0})

    # What a subclass says ------------------------------------------------------------------------------------------

    def _require_options(self, group: Group) -> None:
        """Raise unless the options of its own are valid."""

    def _first_moment(self, group: Group, step: int) -> FirstMoment:
        """How m moves at this step; by default it is the gradient."""
        return FirstMoment(0.0, 1.0)

    def _second_moment(self, group: Group, step: int) -> SecondMoment:
        """How V moves at this step."""
        raise NotImplementedError

    def _step_size(self, lr: float, step: int) -> float:
        """αₜ."""
        return lr

    # The step ------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # type: ignore[attr-defined]  # as in torch's own optimizers; the public one imports for 1 s
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step. If it raises, parameters and state are as before.

        Args:
            closure: Reevaluates the model, calls backward and returns the loss.

        Returns:
            The loss, if there is a closure.

        Raises:
            NonFiniteGradientError: A gradient is not finite, and the group has `on_nonfinite="raise"`.
            ValueError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._has_usable_gradients():
            update = Update(self._places, self.spectral_function)
            for group in self.param_groups:
                self._prepare(group, update)
            update.apply_(self.kernels)
        return loss

    def _prepare(self, group: Group, update: Update) -> None:
        """Put one param group's part of the step into `update`; changes nothing."""
        spanning = index_groups(group["grouping"], group["params"])
        active = [p for p in group["params"] if p.grad is not None]
        if not active:
            return
        kept = block_state_names(group.get("amsgrad", False), group["refresh_every"])
        # Parameters of a group are almost always at the same step.
        known: dict[tuple[int, torch.dtype], Coefficients] = {}
        for params in [group["params"]] if spanning else [[p] for p in active]:
            # Blocks keep their state with the first parameter; spanning blocks have several.
            owner = params[0]
            held: State = self.state.get(owner, {})
            step = steps_taken(held) + 1
            key = step, statistics_dtype(owner)
            coefficients = known.get(key) or known.setdefault(key, self.coefficients(group, *key))
            cut = cut_of(group, params)
            closed = _is_closed(group, step)
            names = [] if closed else kept
            states = [self._state(p, update, cut, names if p is owner else ()) for p in params]
            stale = [name for name in WIDTHS if name in held and name not in names]
            if stale:  # the interval has closed, or an option was switched off
                update.finish.append(partial(self._free, owner, stale))
            if closed:
                for param, state in zip(params, states, strict=True):
                    update.add_scaled(param, param.grad, state, coefficients)
                continue
            # Before n steps V has no full rank, and a basis of its null space would be an arbitrary one to keep.
            due = step <= max(cut.sizes, default=1) or (step - 1) % group["refresh_every"] == 0
            refresh = due or "basis" not in held
            if isinstance(cut, IndexGroups):
                update.add_group(cut, params, states, refresh, coefficients)
            else:
                update.add_parameter(cut, owner, owner.grad, states[0], refresh, coefficients)

    def coefficients(self, group: Group, step: int, dtype: torch.dtype) -> Coefficients:
        """All numbers of this group's step number `step`, for statistics of this dtype."""
        lr = float(group["lr"])
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
        clip: SpectrumClip | None = group["clip"]
        if clip is not None:
            schedule = lr / float(group["base_lr"])
            lower, upper = (clip.final_lr * schedule,) * 2 if clip.is_closed(step) else clip.bounds(step, schedule)
            spectrum = spectrum._replace(lower=lower, upper=upper)
        return Coefficients(descent, first, second, spectrum)

    # State ---------------------------------------------------------------------------------------------------------

    def _state(self, param: Tensor, update: Update, cut: Partition | IndexGroups, names: Sequence[str]) -> State:
        """The state of a parameter with all that this step needs; what is new is kept only if the step succeeds."""
        state: State = self.state.get(param, {})
        if not state or not all(name in state for name in names):
            missing = self._missing(param, state, cut, names)
            state = {**state, **missing}
            update.finish.append(lambda: self.state[param].update(missing))
        update.counters.append(state["step"])
        return state

    def _missing(self, param: Tensor, held: State, cut: Partition | IndexGroups, names: Sequence[str]) -> State:
        """What this step needs and the state does not hold: zeros."""
        zeros = partial(torch.zeros, dtype=statistics_dtype(param), device=param.device)
        missing: State = {}
        if not held:
            missing["step"] = torch.zeros((), dtype=torch.int64)
            if self.averages_gradient:
                missing["exp_avg"] = zeros(param.shape)
        elif "second_moment" in names and "second_moment" not in held:
            rule = "left closed once it has closed, because the second moment was freed then"
            value = Described(f"an open interval at step {steps_taken(held) + 1}")
            raise RuntimeError(refusal(type(self).__name__, "clip", rule, value))
        for name in names:
            if name not in held:
                missing[name] = zeros(state_shape(name, cut))
        return missing

    def _free(self, param: Tensor, names: Sequence[str]) -> None:
        for name in names:
            del self.state[param][name]
        self._places.drop(param)

    def _expected_state(
        self, group: Group, params: Sequence[Tensor], saved: Sequence[State | None]
    ) -> list[dict[str, tuple[int, ...]]]:
        """The names and shapes of the state of each parameter at the step where it was saved."""
        shapes: list[dict[str, tuple[int, ...]]] = []
        spanning = index_groups(group["grouping"], params)
        for position, (param, state) in enumerate(zip(params, saved, strict=True)):
            expected: dict[str, tuple[int, ...]] = {"step": ()}
            if self.averages_gradient:
                expected["exp_avg"] = tuple(param.shape)
            count = state.get("step") if state else None
            step = int(count) if isinstance(count, Tensor) and count.numel() == 1 else 0
            closed = step > 0 and _is_closed(group, step)
            if not closed and (position == 0 or not spanning):
                cut = cut_of(group, params if spanning else [param])
                for name in block_state_names(group.get("amsgrad", False), group["refresh_every"]):
                    expected[name] = state_shape(name, cut)
            shapes.append(expected)
        return shapes

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because of a non-finite gradient, under `on_nonfinite="skip"`."""
        return max(int(group["skipped_steps"]) for group in self.param_groups)

    def _has_usable_gradients(self) -> bool:
        """Whether to step. Raises at what can never be used; a step to be skipped is counted."""
        owner, skip = type(self).__name__, False
        for index, group in enumerate(self.param_groups):
            grads = []
            for position, param in enumerate(group["params"]):
                grad = param.grad
                if grad is None:
                    continue
                if grad.layout != torch.strided:
                    name = _parameter_name(group, index, position)
                    raise ValueError(refusal(owner, "grad", f"dense (for {name})", grad.layout))
                if grad.numel():
                    grads.append(grad)
            if group["on_nonfinite"] == "propagate" or not grads:
                continue
            if _are_small(grads) or _largest_magnitude(grads) <= _gradient_limit(group["params"]):
                continue
            if group["on_nonfinite"] == "raise":
                raise NonFiniteGradientError(_describe_nonfinite(owner, group, index))
            skip = True
        if skip:
            for group in self.param_groups:
                group["skipped_steps"] += 1
        return not skip

    # torch.optim.Optimizer -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; its options are checked before anything is kept."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._require_group(group)
        except Exception:
            del self.param_groups[before:]
            raise
        lr = group["lr"]
        group.setdefault("base_lr", lr.clone() if isinstance(lr, Tensor) else lr)

    def _require_group(self, group: Group) -> None:
        """Raise unless every option of this group is valid for its parameters."""
        owner = type(self).__name__
        for name in [name for name in group if name not in {*self.defaults, *_NOT_OPTIONS}]:
            # Other keys are the user's own; a slip in an option's name must not become one.
            nearest = difflib.get_close_matches(name, self.defaults, n=1, cutoff=0.8)
            if nearest or name in _FAMILY_OPTIONS:
                meant = f", did you mean `{nearest[0]}`?" if nearest and name not in _FAMILY_OPTIONS else "."
                raise TypeError(f"{owner}: `{name}` is not an option of a param group{meant}")
        require_lr(owner, group["lr"])
        require_number(owner, "eps", group["eps"], above=0)
        require_number(owner, "weight_decay", group["weight_decay"], least=0)
        self._require_options(group)
        clip = group["clip"]
        require(clip is None or isinstance(clip, SpectrumClip), owner, "clip", "a SpectrumClip or None", clip)
        rule = "> 0 where `clip` is set, because its bounds follow lr / base_lr"
        require(clip is None or float(group["lr"]) > 0, owner, "lr", rule, group["lr"])
        require_integer(owner, "refresh_every", group["refresh_every"], least=1)
        for name in ("amsgrad", "bias_correction", "maximize"):
            if name in self.defaults:
                require_bool(owner, name, group[name])
        if "beta1_decay" in self.defaults:
            require_number(owner, "beta1_decay", group["beta1_decay"], above=0, most=1)
        require_choice(owner, "on_nonfinite", group["on_nonfinite"], ("raise", "skip", "propagate"))
        for param in group["params"]:
            require(param.is_floating_point(), owner, "params", "real floating-point tensors", param.dtype)
            require(param.layout == torch.strided, owner, "params", "dense tensors", param.layout)
        require_grouping(owner, group["grouping"], group["block_size"], group["params"])
        if isinstance(group["grouping"], IndexGroups) or group["grouping"] == "joint":
            kinds = {(statistics_dtype(p), p.device) for p in group["params"]}
            rule = "on one device and of one precision where blocks span them"
            value = Described(" and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)))
            require(len(kinds) <= 1, owner, "params", rule, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_backend": self._backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        checkpoint.unshield_(state["state"])
        super().__setstate__(state)
        self.kernels = get_kernel(self._backend, type(self).__name__)
        self._places = Places()

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain data: `torch.load(weights_only=True)` reads it."""
        state_dict = super().state_dict()
        return {**state_dict, "param_groups": [checkpoint.plain(group) for group in state_dict["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, or raise ValueError with the reason and change nothing. Statistics keep their precision."""

        def checked(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            return checkpoint.fitted(self, loaded)

        handle = self.register_load_state_dict_pre_hook(checked)  # the last one: it sees what other hooks made
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()


def cut_of(group: Group, params: Sequence[Tensor]) -> Partition | IndexGroups:
    """How the blocks are cut that live with params[0]: all of `params` where blocks may span them, else one."""
    spanning = index_groups(group["grouping"], params)
    return spanning or partition(params[0].shape, group["grouping"], group["block_size"])


def steps_taken(state: State) -> int:
    """Of a parameter with this state, which is empty before its first step."""
    return int(state["step"]) if state else 0


def _is_closed(group: Group, step: int) -> bool:
    """Whether the clip's interval has closed, so that blocks keep nothing."""
    clip: SpectrumClip | None = group["clip"]
    return clip is not None and clip.is_closed(step)


def _are_small(grads: Sequence[Tensor]) -> bool:
    """Whether all are surely usable, found in one fast pass: Σ g² is in float32's range only if every g² is."""
    if all(grad.is_cpu and grad.is_contiguous() for grad in grads):
        flat = [grad.view(-1) for grad in grads]
        squares = sum([float(torch.dot(g, g)) for g in flat])
    else:  # one synchronisation for all
        squares = float(torch.nn.utils.get_total_norm(grads).square())
    return squares <= torch.finfo(torch.float32).max


def _largest_magnitude(grads: Sequence[Tensor]) -> float:
    """max |g| over all of them; NaN if any is NaN. One synchronisation."""
    return float(torch.nn.utils.get_total_norm(grads, norm_type=math.inf))


def _gradient_limit(params: Sequence[Tensor]) -> float:
    """The |g| up to which the trace of g gᵀ is finite in the statistics' dtype, in a block of any size."""
    smallest = min(torch.finfo(statistics_dtype(param)).max for param in params)
    return math.sqrt(smallest / MAX_BLOCK)


def _describe_nonfinite(owner: str, group: Group, index: int) -> str:
    """Name the first parameter with such a gradient, and how many of its entries are bad."""
    limit = _gradient_limit(group["params"])
    for position, param in enumerate(group["params"]):
        if param.grad is not None and (bad := int((~(param.grad.to(statistics_dtype(param)).abs() <= limit)).sum())):
            name = _parameter_name(group, index, position)
            return (
                f"{owner}: the gradient of {name} has {bad} of {param.numel()} entries that are not finite or exceed "
                f"{limit:.2g}; parameters and state are unchanged."
            )
    raise AssertionError("no gradient is bad")


def _parameter_name(group: Group, index: int, position: int) -> str:
    if "param_names" in group:
        return repr(group["param_names"][position])
    return f"parameter {position} of group {index} (shape {tuple(group['params'][position].shape)})"
