"""Schedules that cycle momentum find it in every optimizer that has β₁ or β₂, as in torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from blockadapt import BlockAdaFom, BlockAdagrad, BlockAdam, BlockAdamW, BlockRMSprop, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from support.contract_cases import give_gradients_, param_bits, run

Scheduler = Callable[[torch.optim.Optimizer], Any]


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(11)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


CYCLES: dict[str, Scheduler] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
}
every_cycle = pytest.mark.parametrize("make", CYCLES.values(), ids=CYCLES.keys())


@every_cycle
def test_a_cycle_gives_rmsprop_the_momentum_that_torchs_gets_and_it_is_beta1(make: Scheduler) -> None:
    params, by_hand = parameters((4, 3)), parameters((4, 3))
    ours, theirs = BlockRMSprop(params, alpha=0.95), torch.optim.RMSprop(parameters((2,)))
    adam = BlockAdam(by_hand, bias_correction=False)
    schedulers = [make(o) for o in (ours, theirs)]
    seen = set()
    for t in range(1, 7):
        group, reference = ours.param_groups[0], theirs.param_groups[0]
        assert (group["lr"], group["momentum"]) == (reference["lr"], reference["momentum"])
        seen.add(group["momentum"])
        adam.param_groups[0].update(lr=group["lr"], betas=(group["momentum"], 0.95))
        for optimizer in (ours, adam):
            run(optimizer, [t])
        give_gradients_(reference["params"], t)
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
    assert len(seen) > 2
    assert param_bits(params) == param_bits(by_hand)


@every_cycle
def test_a_cycle_moves_the_beta1_of_adafom(make: Scheduler) -> None:
    params, by_hand = parameters((4, 3)), parameters((4, 3))
    ours, manual = BlockAdaFom(params, beta1=0.5), BlockAdaFom(by_hand)
    scheduler = make(ours)
    for t in range(1, 7):
        group = ours.param_groups[0]
        manual.param_groups[0].update(lr=group["lr"], beta1=group["momentum"])
        for optimizer in (ours, manual):
            run(optimizer, [t])
        scheduler.step()
    assert param_bits(params) == param_bits(by_hand)
    assert ours.param_groups[0]["beta1"] == 0.5


@every_cycle
@pytest.mark.parametrize("cls", [BlockRMSprop, BlockAdaFom])
def test_a_cycle_resumes_bit_for_bit(cls: type[BlockOptimizer], make: Scheduler) -> None:
    params, again = parameters((4, 3)), parameters((4, 3))
    whole, part = cls(params), cls(again)
    schedules = [make(whole), make(part)]
    for optimizer, schedule, steps in ((whole, schedules[0], 6), (part, schedules[1], 3)):
        for t in range(1, steps + 1):
            run(optimizer, [t])
            schedule.step()
    resumed = cls(again)
    schedule = make(resumed)
    schedule.load_state_dict(schedules[1].state_dict())
    resumed.load_state_dict(part.state_dict())
    for t in range(4, 7):
        run(resumed, [t])
        schedule.step()
    assert param_bits(again) == param_bits(params)


def test_momentum_set_in_mid_training_starts_from_zero_and_taken_away_is_freed() -> None:
    (weight,) = params = parameters((4, 3))
    optimizer = BlockRMSprop(params)
    run(optimizer, [1, 2])
    assert "exp_avg" not in optimizer.state[weight]
    optimizer.param_groups[0]["momentum"] = 0.5
    run(optimizer, [3])
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], 0.5 * weight.grad)
    optimizer.param_groups[0]["momentum"] = None
    run(optimizer, [4])
    assert "exp_avg" not in optimizer.state[weight]
    optimizer.param_groups[0]["momentum"] = 1.5
    with pytest.raises(ValueError, match=r"^BlockRMSprop: `momentum` must be in \[0, 1\), got 1\.5\.$"):
        run(optimizer, [5])


def test_momentum_zero_moves_as_none_does_after_closing() -> None:
    """Their coefficients are equal then, though only one keeps a first moment: they were moved as one."""
    params = parameters((4, 3), (4, 3))
    with torch.no_grad():
        params[1].copy_(params[0])
    clip = SpectrumClip(final_lr=0.1, gamma=1e3)
    optimizer = BlockRMSprop([{"params": [param]} for param in params], clip=clip)
    optimizer.param_groups[1]["momentum"] = 0.0
    for t in (1, 2, 3):  # the last one stands as the one before left it
        for param in params:
            param.grad = torch.arange(12.0).view(4, 3) - t
        optimizer.step()
    assert [*optimizer.state[params[0]]] == ["step"]
    assert [*optimizer.state[params[1]]] == ["step", "exp_avg"]
    torch.testing.assert_close(*params)


def test_momentum_is_no_option_where_there_is_betas_or_none() -> None:
    for cls in (BlockAdam, BlockAdamW, BlockAdagrad):
        with pytest.raises(TypeError, match=rf"^{cls.__name__}: `momentum` is not an option of a param group\.$"):
            cls([{"params": parameters((4, 3)), "momentum": 0.9}])
