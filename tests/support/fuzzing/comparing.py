"""How training begins, and steps of both sides, compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TextIO

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.nn import Parameter

from blockadapt import IndexGroups
from blockadapt.optimizers import BlockOptimizer
from blockadapt.spectrum import Estimate
from support.cases import METHODS, Options, flat, joined_gradients, make_oracle, mixed_index_groups
from support.fuzzing.choices import DTYPES, GROUPINGS, VALID, index, laid_out, models
from support.fuzzing.followed import Group, Unit
from support.guards import Canaries, Pages, guard_
from support.oracle import Array, Shape

TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-3}
"""Deviation of a step from the oracle's in units of its longest, by the statistics' dtype.

Both state their error where V is nearly singular, where √λ is known to √(ε λ_max) only: that is what δ ≥ 1e-2 damps.
A state that is lost, taken for another, or one step late is off by tens of percent.
"""


class Compared(RuleBasedStateMachine):
    """Begins with a random model, and has the rules that take a step of it and of the oracle."""

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
            self.deviations[unit.tolerance] = max(self.deviations.get(unit.tolerance, 0.0), worst)
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
            close = max([TOLERANCE[torch.float64], *(unit.tolerance for unit in group.units)])  # 0 before a unit moves
            assert abs(found.ratio / own - 1) <= close, "it measured otherwise"
            group.ratios[:] = [ratio * found.ratio / own for ratio in group.ratios]

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
