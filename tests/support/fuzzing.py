"""Training as a user may mistreat it: random models, options and actions between steps, against the dense oracle.

A `Training` is a Hypothesis state machine. Its rules come in three kinds:

    actions     what may be done between steps; the oracle follows
    steps       one step of both; parameters, first moments and kinds of state are compared
    offences    something impossible, one step that must be refused with nothing changed, and the repair

x and m of the oracle are set to the library's before each step, so that each step is compared on its own and half
precision only rounds once; V, Σ̂ and U the oracle keeps for itself. All tensors lie in guarded memory.

Run as a script it is the child process that guard pages need: `python tests/support/fuzzing.py numba 3 1000 log`.
"""

from __future__ import annotations

import copy
import faulthandler
import io
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.nn import Parameter

from blockadapt import IndexGroups, NonFiniteGradientError, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from blockadapt.spectrum import Estimate
from support.cases import METHODS, Options, blocks_of, flat, joined_gradients, make_oracle, mixed_index_groups
from support.guards import Canaries, Pages, guard_
from support.oracle import Array, DenseOracle, Shape

SHAPES: list[Shape] = [
    (),
    (0,),
    (3, 0),
    (1,),
    (7,),
    (5, 3),
    (4, 4),
    (3, 1),
    (2, 2, 3),
    (2, 3, 2, 2),
    (3, 2, 1, 1),
    (9, 8),
    (1, 1, 9, 8),
]

GROUPINGS = ["auto", "input", "output", "filter", "chunk", "tensor", "diagonal", "joint", "explicit"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CLIPS = [
    None,
    SpectrumClip(0.05, 0.05),
    SpectrumClip(0.02, 2.0),
    SpectrumClip(0.1, 60.0),
    SpectrumClip("auto", 0.05),
    SpectrumClip("auto", 60.0),
]
"""γ = 60 closes at step 4."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-3}
"""Deviation of a step from the oracle's in units of its longest, by the statistics' dtype.

Both state their error where V is nearly singular, where √λ is known to √(ε λ_max) only: that is what δ ≥ 1e-2 damps.
A state that is lost, taken for another, or one step late is off by tens of percent.
"""

VALID: dict[str, list[Any]] = {
    "lr": [1e-3, 0.02, 0.1, torch.tensor(0.05)],
    "betas": [(0.9, 0.999), (0.0, 0.9), [0.5, 0.95]],
    "alpha": [0.99, 0.9],
    "beta1": [0.9, 0.0, 0.5],
    "momentum": [None, 0.9, 0.0, 0.5],
    "beta1_decay": [1.0, 0.9],
    "eps": [1e-2, 0.3],
    "weight_decay": [0.0, 0.1],
    "amsgrad": [False, True],
    "bias_correction": [False, True],
    "refresh_every": [1, 2, 5],
    "maximize": [False, True],
    "on_nonfinite": ["raise", "skip", "propagate"],
    "clip": CLIPS,
}
INVALID: dict[str, list[Any]] = {
    "lr": [math.nan, math.inf, -1.0, "fast", None, torch.ones(2)],
    "betas": [(1.5, 2), (0.9,), (0.9, math.nan), 0.9, None],
    "alpha": [1.0, -0.1, math.nan, "x"],
    "beta1": [1.0, -0.1, None],
    "momentum": [1.0, -0.1, "x"],
    "beta1_decay": [0.0, 1.5, math.nan],
    "eps": [0.0, -1e-8, math.nan, None],
    "weight_decay": [-0.1, math.inf, "x"],
    "amsgrad": ["yes", None, 2],
    "bias_correction": [1.5, "no"],
    "refresh_every": [0, -1, 1.5, None],
    "maximize": ["up"],
    "on_nonfinite": ["typo", None],
    "capturable": [True, None, "yes"],
    "skipped_steps": ["x", None, -1],
    "clip": ["tight", 0.1],
    "block_size": [0, -3, 2.5, 5000, None],
    "grouping": ["typo", None, 3, IndexGroups([[0, 1], [1, 2]]), IndexGroups([[10**9]])],
}

index = st.integers(0, 11)
"""Which of a list, counted around it: the lists' lengths change as training goes on."""

models = st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 3)), min_size=1, max_size=3)


@dataclass(eq=False)
class Unit:
    """Parameters that share blocks, and their oracle."""

    params: list[Parameter]
    oracle: DenseOracle
    t: int = 0
    tolerance: float = 0.0
    """The coarsest of all precisions that its state has had."""
    freed: bool = False
    starved: bool = False
    """Whether a gradient of it was zero: a kept basis of the null space is then arbitrary."""


@dataclass(eq=False)
class Group:
    """One param group as the oracle sees it."""

    params: list[Parameter]
    options: Options
    units: list[Unit] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """What a clip has measured, of all units."""

    def closes(self, clip: SpectrumClip | None, t: int) -> bool:
        """Whether a clip has closed at step t. It cannot before it knows on what."""
        return clip is not None and (clip.final_lr != "auto" or bool(self.ratios)) and is_closed(clip, t)


class Training(RuleBasedStateMachine):
    """See the module's docstring."""

    backend: ClassVar[str] = "numba"
    make_guard: ClassVar[Callable[[], Canaries | Pages]] = Canaries
    log: ClassVar[TextIO | None] = None
    deviations: ClassVar[dict[float, float]] = {}
    """The largest that was seen, by what was tolerated."""

    # How it begins -------------------------------------------------------------------------------------------------

    @initialize(
        method=st.sampled_from(sorted(METHODS)),
        dtype=st.sampled_from(DTYPES),
        model=models,
        options=st.data(),
        steps=st.integers(0, 3),
    )
    def begin(self, method: str, dtype: torch.dtype, model: list[tuple[Shape, int]], options: Any, steps: int) -> None:
        self._tell("begin", method, dtype, model)
        self.method, self.dtype = METHODS[method], dtype
        self.guard = self.make_guard()
        self.rng = np.random.default_rng(len(model))
        self.frozen: set[Parameter] = set()
        self.skipped = 0
        group = self._group(model, options)
        self.groups = [group]
        self.kernel = self.backend
        self.optimizer: BlockOptimizer = self._built()
        self._guard()
        for layout in range(steps):
            self._give_gradients(layout)
            self._step()

    def _group(self, model: list[tuple[Shape, int]], choices: Any) -> Group:
        params = [self._parameter(shape, layout) for shape, layout in model]
        known = self.method.cls(params).defaults
        options: Options = {name: choices.draw(st.sampled_from(VALID[name]), name) for name in VALID if name in known}
        options["lr"] = float(options["lr"])
        options["block_size"] = choices.draw(st.integers(1, 6), "block_size")
        options["grouping"] = self._grouping(choices.draw(st.sampled_from(GROUPINGS), "grouping"), params)
        self._tell("group", model, options)
        group = Group(params, options)
        self._make_units(group)
        return group

    def _parameter(self, shape: Shape, layout: int) -> Parameter:
        values = torch.from_numpy(np.asarray(self.rng.standard_normal(shape))).to(self.dtype)
        return Parameter(laid_out(values, layout))

    @staticmethod
    def _grouping(name: str, params: list[Parameter]) -> str | IndexGroups:
        if name == "explicit":
            return mixed_index_groups(sum(p.numel() for p in params))
        return "chunk" if name == "filter" and any(p.ndim == 2 for p in params) else name

    def _make_units(self, group: Group) -> None:
        spans = isinstance(group.options["grouping"], IndexGroups) or group.options["grouping"] == "joint"
        group.units = [self._unit(params, group.options) for params in self._together(group, spans)]
        for unit in group.units:
            unit.oracle.ratios, unit.oracle.measures = group.ratios, False

    @staticmethod
    def _together(group: Group, spans: bool) -> list[list[Parameter]]:
        return [group.params] if spans else [[param] for param in group.params]

    def _unit(self, params: list[Parameter], options: Options) -> Unit:
        known = {name: value for name, value in options.items() if name != "on_nonfinite"}
        oracle = make_oracle(self.method, known, params)
        oracle.together = len(params) > 1
        return Unit(params, oracle)

    def _built(self) -> BlockOptimizer:
        groups = [{"params": group.params, **group.options} for group in self.groups]
        made: BlockOptimizer = self.method.cls(groups, backend=self.kernel)  # type: ignore[assignment]
        return made

    # Steps ---------------------------------------------------------------------------------------------------------

    @rule(layout=st.integers(0, 4), closure=st.booleans())
    def step(self, layout: int, closure: bool) -> None:
        self._tell("step", layout, closure)
        self._give_gradients(layout)
        self._step(closure)

    @rule(layout=st.integers(0, 4))
    def steps(self, layout: int) -> None:
        self._tell("steps", layout)
        for _ in range(3):
            self._give_gradients(layout)
            self._step()

    @rule(which=index)
    def step_with_zero_gradients(self, which: int) -> None:
        self._tell("zero", which)
        group = self.groups[which % len(self.groups)]
        self._give_gradients(0)
        if group.options["refresh_every"] == 1:
            for unit in group.units:
                unit.starved = True
                for param in unit.params:
                    if param.grad is not None:
                        param.grad = self.guard.moved(torch.zeros_like(param))
        self._step()

    def _give_gradients(self, layout: int) -> None:
        for param in self._params():
            param.grad = None
            if param not in self.frozen:
                values = self.rng.standard_normal(param.shape) * np.exp(0.3 * self.rng.standard_normal(param.shape))
                grad = torch.from_numpy(np.asarray(values)).to(param.dtype)
                if layout == 4:
                    param.grad = torch._neg_view(-self.guard.moved(grad))  # type: ignore[attr-defined]
                else:
                    param.grad = self.guard.moved(laid_out(grad, layout))

    def _step(self, closure: bool = False) -> None:
        """Both sides take a step; compare."""
        params = self._params()
        versions = [p._version for p in params]
        before, expected = {}, {}
        for group in self.groups:
            moved = []
            for unit in group.units:
                self._follow(unit)
                start = unit.oracle.x.copy()
                g, present = joined_gradients(unit.params)
                if any(p.grad is not None for p in unit.params):
                    unit.oracle.step(g, present)
                    unit.t += 1
                    unit.freed |= group.closes(group.options["clip"], unit.t)
                    moved.append(unit.oracle)
                before[id(unit)], expected[id(unit)] = start, g
            if moved:
                moved[0].measure(sum(oracle.along for oracle in moved), sum(oracle.square for oracle in moved))
        self.optimizer.step((lambda: torch.tensor(1.5)) if closure else None)
        for position, group in enumerate(self.groups):
            for unit in group.units:
                self._compare(group, unit, before[id(unit)], expected[id(unit)])
            self._compare_measured(position)
        for param, version in zip(params, versions, strict=True):
            if param.grad is not None and param.numel():
                assert param._version > version, "autograd does not notice the step"
        self._guard()

    def _follow(self, unit: Unit) -> None:
        """The oracle goes on from the library's x and m, which were compared when they were made."""
        unit.oracle.x[:] = flat(unit.params)
        m = [self.optimizer.state.get(p, {}).get("exp_avg") for p in unit.params]
        if m and all(one is not None for one in m):
            values = flat([one for one in m if one is not None])
            for block in unit.oracle.blocks:
                block.m = values[block.coordinates]
        else:  # one that is kept from now on begins with zeros
            for block in unit.oracle.blocks:
                block.m = np.zeros(len(block.coordinates))

    def _compare(self, group: Group, unit: Unit, start: Array, g: Array) -> None:
        statistics = torch.float64 if self.dtype == torch.float64 else torch.float32
        x = flat(unit.params)
        if not x.size:
            return
        step = np.abs(unit.oracle.x - start).max()
        deviation = np.abs(x - unit.oracle.x)
        rounding = torch.finfo(self.dtype).eps * np.maximum(np.abs(x), np.abs(start))
        if step > 0:
            worst = float((np.maximum(deviation - 2 * rounding, 0)).max() / step)
            unit.tolerance = max(unit.tolerance, TOLERANCE[statistics])
            Training.deviations[unit.tolerance] = max(self.deviations.get(unit.tolerance, 0.0), worst)
            assert worst <= unit.tolerance, f"step {unit.t} is off by {worst:.2g} of its length"
        else:
            assert not deviation.any(), "a parameter moved that should rest"
        states = [self.optimizer.state.get(p, {}) for p in unit.params]
        if all(p.grad is None for p in unit.params):
            return  # a state follows its parameter when it is stepped
        for state in states:
            for name, value in state.items():
                kind = torch.int64 if name in ("step", "cut") else statistics
                assert isinstance(value, Tensor), name
                assert value.dtype == kind, f"{name} is {value.dtype}"
            if state:
                assert int(state["step"]) == unit.t
                assert not (unit.freed and {"second_moment", "largest", "basis", "eigenvalues"} & {*state})
        if unit.t and unit.oracle.blocks and all("exp_avg" in state for state in states):
            m = flat([state["exp_avg"] for state in states])
            for block in unit.oracle.blocks:
                close = 16 * torch.finfo(statistics).eps * (np.abs(m).max() + np.abs(g).max() + np.abs(start).max())
                assert np.abs(m[block.coordinates] - block.m).max() <= close, "the first moment is another"

    def _compare_measured(self, position: int) -> None:
        """What a clip has measured is the oracle's, which then goes on from the library's."""
        group = self.groups[position]
        self.optimizer._estimates.read()
        found = Estimate(*self.optimizer.param_groups[position]["estimate"])
        assert found.steps == len(group.ratios), "a measurement is missing, or one too many"
        if found.ratio is not None:
            own = group.units[0].oracle.measured
            assert abs(found.ratio / own - 1) <= max(unit.tolerance for unit in group.units), "it measured otherwise"
            group.ratios[:] = [ratio * found.ratio / own for ratio in group.ratios]

    # Actions -------------------------------------------------------------------------------------------------------

    @rule(dtype=st.sampled_from(DTYPES))
    def cast_the_model(self, dtype: torch.dtype) -> None:
        self._tell("cast", dtype)
        self.dtype = dtype
        nn.ParameterList(self._params()).to(dtype)
        self._guard()

    @rule(which=index, layout=st.integers(0, 3), again=st.booleans())
    def replace_data(self, which: int, layout: int, again: bool) -> None:
        self._tell("replace", which, layout, again)
        param = self._param(which)
        values = param.detach().clone() if again else torch.randn_like(param)
        param.grad = None
        param.data = self.guard.moved(laid_out(values, layout))

    @rule(which=index)
    def freeze(self, which: int) -> None:
        self._tell("freeze", which)
        self.frozen.add(self._param(which).requires_grad_(False))

    @rule(which=index)
    def unfreeze(self, which: int) -> None:
        self._tell("unfreeze", which)
        param = self._param(which).requires_grad_(True)
        self.frozen.discard(param)

    @rule(model=models, options=st.data())
    def add_group(self, model: list[tuple[Shape, int]], options: Any) -> None:
        if len(self.groups) < 3:
            self._tell("add")
            group = self._group(model, options)
            self.optimizer.add_param_group({"params": group.params, **group.options})
            self.groups.append(group)
            self._guard()

    @rule(which=index)
    def remove_group(self, which: int) -> None:
        if len(self.groups) > 1:
            self._tell("remove", which)
            group = self.groups.pop(which % len(self.groups))
            self.optimizer.param_groups.pop(which % len(self.optimizer.param_groups))
            for param in group.params:
                self.optimizer.state.pop(param, None)

    @rule(which=index, name=st.sampled_from(sorted(VALID)), value=index)
    def change_an_option(self, which: int, name: str, value: int) -> None:
        position = which % len(self.groups)
        group = self.groups[position]
        new = VALID[name][value % len(VALID[name])]
        if name not in group.options or (name == "refresh_every" and any(unit.starved for unit in group.units)):
            return
        self._tell("option", position, name, new)
        if name == "clip" and any(unit.freed and not group.closes(new, unit.t + 1) for unit in group.units):
            with self._offence("clip"), self._option(position, "clip", new):
                self._refused(position)
            return
        self.optimizer.param_groups[position][name] = new
        group.options[name] = new
        for unit in group.units:
            fresh = self._unit(unit.params, {**group.options, "lr": float(group.options["lr"])}).oracle
            for attribute in ("lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "clip", "bias_correction"):
                setattr(unit.oracle, attribute, getattr(fresh, attribute))
            for attribute in ("beta1_decay", "refresh_every", "maximize"):
                setattr(unit.oracle, attribute, getattr(fresh, attribute))

    @rule(which=index, name=st.sampled_from(GROUPINGS), block_size=st.integers(1, 6))
    def cut_otherwise(self, which: int, name: str, block_size: int) -> None:
        """Where nothing is known yet the new cut counts; where the state was cut otherwise it is refused."""
        position = which % len(self.groups)
        group = self.groups[position]
        grouping = self._grouping(name, group.params)
        options = {**group.options, "grouping": grouping, "block_size": block_size}
        spanned, spans = (
            isinstance(cut, IndexGroups) or cut == "joint" for cut in (group.options["grouping"], grouping)
        )
        known = any(unit.t for unit in group.units)
        if spanned != spans and known:
            return  # what belongs to whom changes: neither promised nor forbidden where a group has few parameters
        differs = [
            unit
            for unit in group.units
            if unit.t
            and not unit.freed
            and sorted(cut(unit.params, options)) != sorted(cut(unit.params, group.options))
        ]
        self._tell("cut", position, grouping, block_size, len(differs))
        if differs:
            with (
                self._offence("cut"),
                self._option(position, "grouping", grouping),
                self._option(position, "block_size", block_size),
            ):
                self._refused(position)
        elif not known:
            self.optimizer.param_groups[position].update(grouping=grouping, block_size=block_size)
            group.options = options
            self._make_units(group)
            self._retune(group)

    def _retune(self, group: Group) -> None:
        base = self.optimizer.param_groups[self.groups.index(group)]["peak_lr"]
        for unit in group.units:
            unit.oracle.lr, unit.oracle.peak_lr = float(group.options["lr"]), float(base)

    @rule(kernel=st.sampled_from(["numba", "eigh"]))
    def save_and_load(self, kernel: str) -> None:
        self._tell("save and load", kernel)
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        self.kernel = kernel if self.backend == "numba" else "eigh"
        self.optimizer = self.method.cls(  # type: ignore[assignment]
            [{"params": group.params} for group in self.groups], backend=self.kernel
        )
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))
        self._guard()

    @rule(by_pickle=st.booleans())
    def copy_everything(self, by_pickle: bool) -> None:
        self._tell("copy", by_pickle)
        whole = self._params(), self.optimizer
        params, self.optimizer = pickle.loads(pickle.dumps(whole)) if by_pickle else copy.deepcopy(whole)
        twins = dict(zip(self._params(), params, strict=True))
        self.frozen = {twins[p] for p in self.frozen if p in twins}
        for group in self.groups:
            group.params = [twins[p] for p in group.params]
            for unit in group.units:
                unit.params = [twins[p] for p in unit.params]
        self._guard()

    @rule(threads=st.integers(1, 2))
    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @rule(which=index, name=index, how=st.integers(0, 2))
    def replace_a_state_tensor(self, which: int, name: int, how: int) -> None:
        """By one with the same numbers that lies otherwise, or is float64."""
        state = self.optimizer.state.get(self._param(which), {})
        if state:
            chosen = sorted(state)[name % len(state)]
            self._tell("state", which, chosen, how)
            value = state[chosen]
            if how == 0 and chosen != "cut":  # whose numbers float64 does not hold
                new = value.double()
            elif how == 1:
                new = laid_out(value, 2)
            else:
                new = value.clone()
            state[chosen] = self.guard.moved(new)

    @rule(which=index)
    def forget_the_state(self, which: int) -> None:
        group = self.groups[which % len(self.groups)]
        self._tell("forget", which)
        for param in group.params:
            self.optimizer.state.pop(param, None)
        self._make_units(group)
        self._retune(group)

    @rule(how=st.integers(0, 2))
    def exchange_the_dict_of_states(self, how: int) -> None:
        """For one that does not make entries by itself, with the same states or without any; or empty it."""
        self._tell("states", how)
        if how == 0:
            self.optimizer.state = dict(self.optimizer.state)
            return
        if how == 1:
            self.optimizer.state = {}
        else:
            self.optimizer.state.clear()
        for group in self.groups:
            self._make_units(group)
            self._retune(group)

    # Offences ------------------------------------------------------------------------------------------------------

    @rule(which=index, name=st.sampled_from(sorted(INVALID)), value=index)
    def set_an_option_that_cannot_be(self, which: int, name: str, value: int) -> None:
        position = which % len(self.groups)
        if name in self.optimizer.param_groups[position]:
            new = INVALID[name][value % len(INVALID[name])]
            with self._offence(f"option {name}={new!r}"), self._option(position, name, new):
                self._refused(position)

    @rule(which=index, shape=st.sampled_from(SHAPES))
    def give_data_of_another_shape(self, which: int, shape: Shape) -> None:
        param = self._param(which)
        if tuple(param.shape) == shape or "exp_avg" not in self.optimizer.state.get(param, {}):
            return  # without a first moment another shape may be cut into the same blocks
        with self._offence(f"{tuple(param.shape)} becomes {shape}"), self._data(param, torch.ones(shape)):
            self._refused()

    @rule(which=index, shape=st.sampled_from([(700,), (5, 5), (2, 2, 2, 2), ()]))
    def keep_the_gradient_of_another_shape(self, which: int, shape: Shape) -> None:
        param = self._param(which)
        if tuple(param.shape) == shape:
            return
        with self._offence(f"a gradient {tuple(param.shape)} for {shape}"):
            self._give_all_gradients()
            with self._data(param, torch.ones(shape), keep_grad=True):
                self._refused(given=True)

    @rule(which=index, how=st.integers(0, 3))
    def list_what_cannot_be(self, which: int, how: int) -> None:
        """A parameter a second time, in its group or another; a whole group a second time; no parameter."""
        groups = self.optimizer.param_groups
        group = groups[which % len(groups)]
        with self._offence(f"list {how}"):
            kept = list(group["params"])
            if how == 2:
                groups.append(group)
            else:
                group["params"].append(["weight", self._param(which), None, self._params()[0]][how])
            self._refused()
            group["params"][:] = kept
            del groups[len(self.groups) :]

    @rule(which=index, estimate=st.sampled_from([None, "x", (1.0,), (math.nan, 1), (1.0, "x")]))
    def spoil_what_a_clip_goes_by(self, which: int, estimate: Any) -> None:
        position = which % len(self.groups)
        clip = self.groups[position].options["clip"]
        if clip is not None and clip.final_lr == "auto":
            with self._offence(f"estimate {estimate}"), self._option(position, "estimate", estimate):
                self._refused()

    @rule(which=index, value=st.sampled_from([None, [], "state"]))
    def keep_what_is_no_state(self, which: int, value: Any) -> None:
        param = self._param(which)
        if param in self.optimizer.state:
            with self._offence(f"state {value!r}"):
                kept, self.optimizer.state[param] = self.optimizer.state[param], value
                self._refused()
                self.optimizer.state[param] = kept

    @rule(which=index, name=index, how=st.integers(0, 5))
    def spoil_the_state(self, which: int, name: int, how: int) -> None:
        state = self.optimizer.state.get(self._param(which), {})
        if not state:
            return
        chosen = sorted(state)[name % len(state)]
        value = state[chosen]
        with self._offence(f"state {chosen} {how}"):
            kept = dict(state)
            if how == 0:
                state["exp_avg_sq"] = torch.zeros(3)
            elif how == 1:
                state[chosen] = torch.zeros(*value.shape, 2, dtype=value.dtype)
            elif how == 2:
                state[chosen] = "foreign"
            elif how >= 4:
                state["step"] = torch.tensor(math.nan if how == 4 else 2.5)
            else:
                state[chosen] = value.to_sparse() if value.ndim else None
            self._refused()
            state.clear()
            state.update(kept)

    @rule(which=index, bad=st.sampled_from([math.nan, math.inf, -math.inf]))
    def meet_a_gradient_that_is_not_finite(self, which: int, bad: float) -> None:
        param = self._param(which)
        group = next(group for group in self.groups if any(p is param for p in group.params))
        policy = group.options["on_nonfinite"]
        if not param.numel() or policy == "propagate":
            return
        with self._offence(f"gradient {bad}, {policy}"):
            self._give_all_gradients()
            assert param.grad is not None
            param.grad.view(-1)[-1] = bad
            if policy == "raise" or any(g.options["on_nonfinite"] == "raise" for g in self.groups):
                before = bits_of_all(self.optimizer)
                skipped = self.optimizer.skipped_steps
                try:
                    self.optimizer.step()
                except NonFiniteGradientError:
                    assert bits_of_all(self.optimizer) == before
                else:
                    assert policy == "skip"
                    assert self.optimizer.skipped_steps == skipped + 1
                    self._unskip()
                    assert bits_of_all(self.optimizer) == before
            else:
                before = bits_of_all(self.optimizer)
                self.optimizer.step()
                self._unskip()
                assert bits_of_all(self.optimizer) == before

    @rule(which=index)
    def meet_a_sparse_gradient(self, which: int) -> None:
        param = self._param(which)
        if param.ndim and param.numel():
            with self._offence("sparse gradient"):
                self._give_all_gradients()
                param.grad = torch.zeros_like(param, memory_format=torch.contiguous_format).to_sparse()
                self._refused(given=True)

    def _unskip(self) -> None:
        for group in self.optimizer.param_groups:
            group["skipped_steps"] -= 1

    def _refused(self, position: int | None = None, given: bool = False) -> None:
        """One step is refused in one sentence, with nothing changed."""
        if not given:
            self._give_all_gradients()
        before = bits_of_all(self.optimizer)
        try:
            self.optimizer.step()
        except (ValueError, TypeError, RuntimeError) as error:
            text = str(error)
            owner = type(self.optimizer).__name__
            assert text.startswith(f"{owner}:"), f"not the owner's sentence: {text}"
        else:
            raise AssertionError("the step was not refused")
        assert bits_of_all(self.optimizer) == before, "the refused step changed something"

    def _give_all_gradients(self) -> None:
        frozen, self.frozen = self.frozen, set()
        wanted = {p: p.requires_grad for p in self._params()}
        self._give_gradients(0)
        self.frozen = frozen
        for param, want in wanted.items():
            param.requires_grad_(want)

    @contextmanager
    def _offence(self, what: str) -> Iterator[None]:
        """What is done inside is undone inside; training goes on as if nothing had been."""
        self._tell("offence", what)
        yield
        self._give_gradients(0)
        self._step()

    @contextmanager
    def _option(self, position: int, name: str, value: Any) -> Iterator[None]:
        group = self.optimizer.param_groups[position]
        kept, group[name] = group[name], value
        yield
        group[name] = kept

    @contextmanager
    def _data(self, param: Parameter, data: Tensor, keep_grad: bool = False) -> Iterator[None]:
        kept, grad = param.data, param.grad
        if not keep_grad:
            param.grad = None
        param.data = self.guard.moved(data.to(param.dtype))
        yield
        param.grad = None
        param.data = kept
        param.grad = grad

    # What is always true -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_wrote_beyond_a_tensor(self) -> None:
        if hasattr(self, "guard"):
            self.guard.check()

    def teardown(self) -> None:
        torch.set_num_threads(1)
        if hasattr(self, "guard"):
            self.groups, self.frozen = [], set()
            del self.optimizer
            self.guard.close()

    # Helpers -------------------------------------------------------------------------------------------------------

    def _params(self) -> list[Parameter]:
        return [p for group in self.groups for p in group.params]

    def _param(self, which: int) -> Parameter:
        params = self._params()
        return params[which % len(params)]

    def _guard(self) -> None:
        guard_(self.guard, self._params(), self.optimizer)

    def _tell(self, *what: object) -> None:
        """Keep a record of this sequence for a parent process: a child that dies cannot tell any more."""
        if self.log is not None:
            if what[0] == "begin":
                self.log.seek(0)
                self.log.truncate()
            self.log.write(" ".join(map(repr, what)) + "\n")
            self.log.flush()


def laid_out(values: Tensor, layout: int) -> Tensor:
    """The same numbers: contiguous (0), channels_last (1), dimensions backwards (2), every other of a storage (3)."""
    if layout == 1 and values.ndim == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == 2:
        backwards = list(reversed(range(values.ndim)))
        return values.permute(backwards).contiguous().permute(backwards)
    if layout == 3 and values.ndim:
        return values.repeat_interleave(2, dim=-1)[..., ::2]
    return values.contiguous()


def cut(params: list[Parameter], options: Options) -> list[list[int]]:
    """The blocks of these parameters as lists of coordinates; none where there are no coordinates."""
    blocks, _ = blocks_of(options["grouping"], options["block_size"], [tuple(p.shape) for p in params])
    return [block for block in blocks if block]


def is_closed(clip: SpectrumClip, t: int) -> bool:
    """λᵤ/λₗ = (1 + 1/(γt))² < 1.01."""
    return (1 + 1 / (clip.gamma * t)) ** 2 - 1 < 1e-2


def bits_of_all(optimizer: BlockOptimizer) -> tuple[Any, ...]:
    """`everything`, for lists and states that may hold what does not belong there."""
    optimizer._estimates.read()
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Tensor)]
    states = [
        {
            name: (id(value), value.to_dense().tolist() if isinstance(value, Tensor) else value)
            for name, value in (held.items() if isinstance(held, dict) else [("", held)])
        }
        for held in (optimizer.state.get(p, {}) for p in params)
    ]
    options = [{name: repr(v) for name, v in g.items() if name != "params"} for g in optimizer.param_groups]
    return repr([p.tolist() for p in params]), repr(states), options, len(optimizer.state)


def fuzz(backend: str, sequences: int, guard: Callable[[], Canaries | Pages], start: int | None = None) -> None:
    """Run so many sequences; raises with the shortest one that fails."""

    class Run(Training):
        pass

    Run.backend, Run.make_guard = backend, staticmethod(guard)
    if start is not None:
        seed(start)(Run)
    run_state_machine_as_test(
        Run,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=15,
            derandomize=start is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


if __name__ == "__main__":
    faulthandler.enable()
    kernel, number, sequences, record = sys.argv[1:]
    with Path(record).open("w") as Training.log:
        fuzz(kernel, int(sequences), Pages, start=int(number))
    print("deviations by tolerance:", Training.deviations)
