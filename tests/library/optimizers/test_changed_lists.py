"""Which parameters and groups an optimizer lists, and how that is changed: each is listed once, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blockadapt import BlockAdam, plan
from blockadapt.optimizers import BlockOptimizer
from support.changes import parameter
from support.contract_cases import CLASSES, give_gradients_, param_bits, run


@pytest.mark.parametrize("cls", CLASSES)
def test_a_parameter_listed_twice_is_refused(cls: type[BlockOptimizer]) -> None:
    weight = parameter(3, 2)
    rule = f"^{cls.__name__}: `params` must be each parameter once, got entry"
    with pytest.raises(ValueError, match=f"{rule} 1 a second time"):
        cls([weight, weight])
    with pytest.raises(ValueError, match=f"{rule} 2 a second time"):
        cls([{"params": (pair for pair in [("a", weight), ("b", parameter(2)), ("c", weight)])}])
    with pytest.raises(ValueError, match="more than one parameter group"):  # torch's own words
        cls([{"params": [weight]}, {"params": [weight]}])


LISTED: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "again in its group": (
        lambda groups: groups[0]["params"].append(groups[0]["params"][0]),
        "`params` must be each parameter once, got entry 1 of group 0 a second time",
    ),
    "again in another group": (
        lambda groups: groups[0]["params"].append(groups[1]["params"][0]),
        "`params` must be each parameter once, got entry 0 of group 1 a second time",
    ),
    "a group again": (lambda groups: groups.append(groups[0]), "got entry 0 of group 2 a second time"),
    "a copy of a group": (lambda groups: groups.append(dict(groups[0])), "got entry 0 of group 2 a second time"),
    "a name": (
        lambda groups: groups[1]["params"].append("weight"),
        "`params` must be tensors, got str as entry 1 of group 1",
    ),
    "nothing": (lambda groups: groups[1]["params"].append(None), "got NoneType as entry 1 of group 1"),
    "no list": (
        lambda groups: groups[1].update(params=groups[1]["params"][0]),
        "`params` must be a list in every param group, got Parameter in group 1",
    ),
    "no params": (lambda groups: groups[1].pop("params"), "`params` must be a list in .*, got NoneType in group 1"),
    "no group": (lambda groups: groups.append("mine"), "`params` must be a list in .*, got NoneType in group 2"),
}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("how", LISTED)
def test_parameters_that_are_listed_wrongly_later_are_refused(how: str, cls: type[BlockOptimizer]) -> None:
    """Nothing is moved, not even once."""
    change, message = LISTED[how]
    weight, bias = parameter(4, 3), parameter(3)
    optimizer = cls([{"params": [weight]}, {"params": [bias]}])
    run(optimizer, [1, 2])
    give_gradients_([weight, bias], 3)
    before = param_bits([weight, bias])
    change(optimizer.param_groups)
    with pytest.raises(ValueError, match=rf"^{cls.__name__}: .*{message}"):
        optimizer.step()
    assert param_bits([weight, bias]) == before


def test_a_parameter_that_was_listed_later_needs_no_name() -> None:
    weight, bias = parameter(4, 3), parameter(3)
    optimizer = BlockAdam([("weight", weight)])
    optimizer.param_groups[0]["params"].append(bias)
    give_gradients_([weight, bias], 1)
    bias.grad = torch.zeros(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"^BlockAdam: `grad` must be dense \(for parameter 1 of group 0"):
        optimizer.step()


@pytest.mark.parametrize("grouping", ["auto", "joint"])
def test_an_optimizer_saves_and_plans_a_parameter_without_a_name(grouping: str) -> None:
    weight, bias = parameter(4, 3), parameter(3)
    optimizer = BlockAdam([("weight", weight)], grouping=grouping)
    optimizer.param_groups[0]["params"].append(bias)
    run(optimizer, [1])
    assert len(optimizer.state_dict()["state"]) == 2
    expected = ["weight", "0.1"] if grouping == "auto" else ["weight … 0.1"]
    assert [row.name for row in plan(optimizer).rows] == expected


@pytest.mark.parametrize("cls", CLASSES)
def test_no_step_is_skipped_where_no_group_is_left(cls: type[BlockOptimizer]) -> None:
    optimizer = cls([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups.clear()
    assert optimizer.skipped_steps == 0
