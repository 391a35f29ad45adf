"""What may be done between steps; the oracle follows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch import nn

from blockadapt import IndexGroups
from support.files import through_a_file
from support.fuzzing.choices import DTYPES, GROUPINGS, VALID, index, laid_out, models
from support.fuzzing.followed import Group, cut
from support.fuzzing.refusing import Refusing
from support.oracle import Shape


class Actions(Refusing):
    """Has a rule for each. Where one cannot be, as a cut that is not the state's, the step is refused."""

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
                self._refused()
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
                self._refused()
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
        saved = through_a_file(self.optimizer.state_dict())
        self.kernel = kernel if self.backend == "numba" else "eigh"
        self.optimizer = self.method.cls(  # type: ignore[assignment]
            [{"params": group.params} for group in self.groups], backend=self.kernel
        )
        self.optimizer.load_state_dict(saved)
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
