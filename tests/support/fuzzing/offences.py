"""What cannot be: the step is refused, and training goes on as if nothing had been."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule

from blockadapt import NonFiniteGradientError
from support.contract_cases import bits_of_all
from support.fuzzing.choices import INVALID, SHAPES, index
from support.fuzzing.refusing import Refusing
from support.oracle import Shape


class Offences(Refusing):
    """Has a rule for each."""

    @rule(which=index, name=st.sampled_from(sorted(INVALID)), value=index)
    def set_an_option_that_cannot_be(self, which: int, name: str, value: int) -> None:
        position = which % len(self.groups)
        if name in self.optimizer.param_groups[position]:
            new = INVALID[name][value % len(INVALID[name])]
            with self._offence(f"option {name}={new!r}"), self._option(position, name, new):
                self._refused()

    @rule(which=index, shape=st.sampled_from(SHAPES))
    def give_data_of_another_shape(self, which: int, shape: Shape) -> None:
        param = self._param(which)
        if tuple(param.shape) == shape or "exp_avg" not in self.optimizer.state.get(param, {}):
            return  # without a first moment another shape may be cut into the same blocks
        with self._offence(f"{tuple(param.shape)} becomes {shape}"), self._data(param, torch.ones(shape)):
            self._refused()

    @rule(which=index, other=index)
    def lay_two_parameters_in_one_place(self, which: int, other: int) -> None:
        """The smaller one into the larger one."""
        param, place = sorted((self._param(which), self._param(other)), key=torch.Tensor.numel)
        if param is place or not param.numel() or not place.is_contiguous():
            return
        with self._offence("one place"):
            kept, param.grad = param.data, None
            param.data = place.data.view(-1)[-param.numel() :].view(param.shape)
            self._refused()
            param.grad, param.data = None, kept

    @rule(which=index, other=index)
    def share_a_counter(self, which: int, other: int) -> None:
        """Other tensors of the state may be on their way to another precision, as copies."""
        one, two = (self.optimizer.state.get(self._param(i), {}) for i in (which, other))
        if one is not two and "step" in one and "step" in two and one["step"].dtype == two["step"].dtype == torch.int64:
            with self._offence("one counter"):
                kept, one["step"] = one["step"], two["step"]
                self._refused()
                one["step"] = kept

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
