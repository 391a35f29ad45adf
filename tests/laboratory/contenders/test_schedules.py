"""Schedules against their formulas and torch's schedulers, and continued from a file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR

from blockadapt import BlockAdam, SpectrumClip
from blockadapt_experiments.contenders.schedules import BatchSettings, Schedule, ScheduleSettings, make_schedule
from support.files import through_a_file

EPOCHS, STEPS = 8, 5

VALUES = [5.0, 4.0, 4.0, 4.5, 3.0, math.nan, 3.5, 2.0]
"""Validation values; epochs 2, 3, 5 and 6 (from 0) bring no new best."""


def sgd(*lrs: float) -> SGD:
    return SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs])


def learning_rates(schedule: Schedule, epochs: int = EPOCHS, steps: int = STEPS) -> list[list[float]]:
    """What each step of a run is taken with."""
    seen = []
    for epoch in range(epochs):
        for _ in range(steps):
            seen.append(schedule.lr)
            schedule.after_step()
        schedule.after_epoch(VALUES[epoch % len(VALUES)])
    return seen


def scheduled(settings: ScheduleSettings, *lrs: float, epochs: int = EPOCHS, steps: int = STEPS) -> list[list[float]]:
    return learning_rates(make_schedule(settings, sgd(*lrs), epochs, steps), epochs, steps)


# The formulas ------------------------------------------------------------------------------------------------------


def test_constant_stays() -> None:
    assert scheduled(ScheduleSettings(), 0.3, 2.0) == [[0.3, 2.0]] * (EPOCHS * STEPS)


def test_sqrt_is_lr_over_the_root_of_the_step() -> None:
    expected = [[0.3 / math.sqrt(t), 2.0 / math.sqrt(t)] for t in range(1, EPOCHS * STEPS + 1)]
    np.testing.assert_allclose(scheduled(ScheduleSettings(kind="sqrt"), 0.3, 2.0), expected, rtol=1e-15)


def test_cosine_falls_to_zero_after_the_last_step() -> None:
    optimizer = sgd(0.3, 2.0)
    schedule = make_schedule(ScheduleSettings(kind="cosine"), optimizer, EPOCHS, STEPS)
    expected = [[lr * (1 + math.cos(math.pi * t / 40)) / 2 for lr in (0.3, 2.0)] for t in range(EPOCHS * STEPS)]
    np.testing.assert_allclose(learning_rates(schedule), expected, rtol=1e-14)
    assert schedule.lr == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["constant", "cosine", "step"])
def test_a_warm_up_rises_evenly_to_the_full_rate(kind: Any) -> None:
    """A fifth of 40 steps: the eighth has all of it, and what the kind does comes after."""
    seen = [lr for (lr,) in scheduled(ScheduleSettings(kind=kind, warmup=0.2, at=(0.5,)), 2.0)]
    np.testing.assert_allclose(seen[:8], [2.0 * t / 8 for t in range(1, 9)], rtol=1e-14)
    after = {
        "constant": [2.0] * 32,
        "cosine": [1 + math.cos(math.pi * t / 32) for t in range(32)],
        "step": [2.0] * 12 + [0.2] * 20,
    }
    np.testing.assert_allclose(seen[8:], after[kind], rtol=1e-14)


def test_step_divides_by_ten_after_half_and_three_quarters_of_the_epochs() -> None:
    expected = [[1.0]] * (4 * STEPS) + [[0.1]] * (2 * STEPS) + [[0.01]] * (2 * STEPS)
    np.testing.assert_allclose(scheduled(ScheduleSettings(kind="step"), 1.0), expected, rtol=1e-15)


def test_step_falls_within_an_epoch_where_the_fraction_does() -> None:
    """Three quarters of two epochs of four steps are six steps."""
    expected = [[1.0]] * 4 + [[0.5]] * 2 + [[0.25]] * 2
    settings = ScheduleSettings(kind="step", factor=0.5)
    np.testing.assert_allclose(scheduled(settings, 1.0, epochs=2, steps=4), expected, rtol=1e-15)


def test_step_places_fractions_that_are_not_exact_in_binary_on_the_whole_epoch() -> None:
    """0.07 · 100 is 7.000000000000001, and 0.55 · 100 is 55.00000000000001."""
    settings = ScheduleSettings(kind="step", at=(0.07, 0.55))
    seen = scheduled(settings, 1.0, epochs=100, steps=1)
    np.testing.assert_allclose(seen, [[1.0]] * 7 + [[0.1]] * 48 + [[0.01]] * 45, rtol=1e-15)


def test_step_counts_planned_epochs_where_later_ones_have_fewer_steps() -> None:
    schedule = make_schedule(ScheduleSettings(kind="step"), sgd(1.0), epochs=4, steps_per_epoch=8)
    seen = []
    for steps in (8, 4, 2, 1):
        seen.append(schedule.lr)
        for _ in range(steps):
            schedule.after_step()
        schedule.after_epoch()
    np.testing.assert_allclose(seen, [[1.0], [1.0], [0.1], [0.01]], rtol=1e-15)


def test_dev_halves_after_each_epoch_without_a_new_best() -> None:
    """An equal value is no new best, nor is NaN; one that is only better than the last is none either."""
    powers = [0, 0, 0, 1, 2, 2, 3, 4]
    expected = [[0.5**power] for power in powers for _ in range(STEPS)]
    assert scheduled(ScheduleSettings(kind="dev"), 1.0) == expected
    thirds = [[(1 / 3) ** power] for power in powers for _ in range(STEPS)]
    np.testing.assert_allclose(scheduled(ScheduleSettings(kind="dev", factor=1 / 3), 1.0), thirds, rtol=1e-15)


def test_dev_needs_a_value() -> None:
    schedule = make_schedule(ScheduleSettings(kind="dev"), sgd(1.0), EPOCHS, STEPS)
    with pytest.raises(ValueError, match=r'^schedule: `value` must be a number under kind "dev", got None\.$'):
        schedule.after_epoch()
    assert schedule.state_dict() == make_schedule(ScheduleSettings(), sgd(1.0), EPOCHS, STEPS).state_dict()


# torch's schedulers ------------------------------------------------------------------------------------------------

MINIMUM: dict[str, Any] = {"patience": 0, "threshold": 0.0, "eps": 0.0}

TORCH: dict[str, Callable[[Optimizer], Any]] = {
    "sqrt": lambda optimizer: LambdaLR(optimizer, lambda steps: (steps + 1) ** -0.5),
    "step": lambda optimizer: MultiStepLR(optimizer, [EPOCHS // 2, 3 * EPOCHS // 4], gamma=0.1),
    "dev": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, **MINIMUM),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS * STEPS),
}


@pytest.mark.parametrize("kind", TORCH)
def test_torch_schedulers_move_the_same_way(kind: Any) -> None:
    optimizer = sgd(0.3, 2.0)
    scheduler = TORCH[kind](optimizer)
    expected = []
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            expected.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            if kind in ("sqrt", "cosine"):
                scheduler.step()
        if kind in ("step", "dev"):
            scheduler.step(*[VALUES[epoch]] * (kind == "dev"))
    # torch's cosine goes from one rate to the next, and rounds each time
    accuracy = 1e-12 if kind == "cosine" else 1e-14
    np.testing.assert_allclose(scheduled(ScheduleSettings(kind=kind), 0.3, 2.0), expected, rtol=accuracy)


def test_torchs_warm_up_before_a_cosine_moves_the_same_way() -> None:
    optimizer, steps, rising = sgd(0.3, 2.0), EPOCHS * STEPS, EPOCHS * STEPS // 4
    warm_up = LinearLR(optimizer, start_factor=1 / rising, total_iters=rising - 1)
    fall = CosineAnnealingLR(optimizer, steps - rising)
    scheduler = SequentialLR(optimizer, [warm_up, fall], milestones=[rising])
    expected = []
    for _ in range(steps):
        expected.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    found = scheduled(ScheduleSettings(kind="cosine", warmup=0.25), 0.3, 2.0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_end_of_a_clipped_spectrum_follows() -> None:
    """With a closed interval a step is α* m, and α* = final_lr · lr/peak_lr."""
    param = torch.nn.Parameter(torch.zeros(3))
    clip = SpectrumClip(final_lr=0.5, gamma=1e6)
    optimizer = BlockAdam([param], lr=1e-3, betas=(0.0, 0.999), clip=clip, bias_correction=False)
    schedule = make_schedule(ScheduleSettings(kind="step"), optimizer, epochs=4, steps_per_epoch=1)
    for expected in (0.5, 0.5, 0.05, 0.005):
        before = param.detach().clone()
        param.grad = torch.ones(3)
        optimizer.step()
        torch.testing.assert_close(before - param.detach(), torch.full((3,), expected))
        schedule.after_step()
        schedule.after_epoch()


# Resumption --------------------------------------------------------------------------------------------------------


def moved_on(schedule: Schedule, steps: range) -> list[list[float]]:
    """What each of these steps of a run is taken with; epochs end where they do."""
    seen = []
    for step in steps:
        seen.append(schedule.lr)
        schedule.after_step()
        if (step + 1) % STEPS == 0:
            schedule.after_epoch(VALUES[step // STEPS])
    return seen


@pytest.mark.parametrize("kind", ["constant", "step", "dev", "sqrt", "cosine"])
@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("made_before", [True, False])
def test_a_resumed_schedule_goes_on_to_the_same_bits(kind: Any, optimizer_first: bool, made_before: bool) -> None:
    """Saved after every step in turn; whichever is loaded first, and even if it is made from a loaded optimizer."""
    settings, total = ScheduleSettings(kind=kind, at=(0.3, 0.55)), EPOCHS * STEPS
    expected = scheduled(settings, 0.3, 2.0)
    for saved_at in range(1, total):
        optimizer = sgd(0.3, 2.0)
        schedule = make_schedule(settings, optimizer, EPOCHS, STEPS)
        seen = moved_on(schedule, range(saved_at))
        state = through_a_file({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
        optimizer = sgd(0.3, 2.0)
        if not made_before:
            optimizer.load_state_dict(state["optimizer"])
        schedule = make_schedule(settings, optimizer, EPOCHS, STEPS)
        if optimizer_first:
            optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        if not optimizer_first:
            optimizer.load_state_dict(state["optimizer"])
        assert seen + moved_on(schedule, range(saved_at, total)) == expected


@pytest.mark.parametrize("kind", ["step", "dev", "sqrt", "cosine"])
def test_a_loaded_schedule_sets_the_learning_rates_by_itself(kind: Any) -> None:
    source, target = (make_schedule(ScheduleSettings(kind=kind), sgd(0.3, 2.0), EPOCHS, STEPS) for _ in range(2))
    moved_on(source, range(6 * STEPS))
    target.load_state_dict(source.state_dict())
    assert target.lr == source.lr != [0.3, 2.0]


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    schedule = make_schedule(ScheduleSettings(kind="sqrt"), sgd(1.0), EPOCHS, STEPS)
    other = make_schedule(ScheduleSettings(kind="sqrt"), sgd(1.0, 2.0), EPOCHS, STEPS)
    other.after_step()
    before = schedule.state_dict()
    with pytest.raises(ValueError, match=r"^schedule: `state` must be one of 1 param groups, got 2\.$"):
        schedule.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"^schedule: `state` must be one with \['best', .*\], got \['steps'\]\.$"):
        schedule.load_state_dict({"steps": 3})
    assert schedule.state_dict() == before
    assert schedule.lr == [1.0]


# Minibatches -------------------------------------------------------------------------------------------------------


def test_minibatches_stay_unless_they_grow() -> None:
    assert {BatchSettings(size=64).batch_size(epoch) for epoch in range(1000)} == {64}


def test_minibatches_grow_geometrically_every_period() -> None:
    batch = BatchSettings(size=10, growth="geometric", rate=1.5, period=2, most=100)
    assert [batch.batch_size(epoch) for epoch in range(15)] == [
        10,
        10,
        15,
        15,
        22,
        22,
        34,
        34,
        51,
        51,
        76,
        76,
        100,
        100,
        100,
    ]


def test_minibatches_grow_linearly_every_period() -> None:
    batch = BatchSettings(size=10, growth="linear", rate=0.25, period=1, most=20)
    assert [batch.batch_size(epoch) for epoch in range(7)] == [10, 12, 15, 18, 20, 20, 20]


@pytest.mark.parametrize("growth", ["geometric", "linear"])
def test_minibatches_never_pass_the_most_however_long_the_run(growth: Any) -> None:
    batch = BatchSettings(size=1, growth=growth, rate=1e300, most=4096)
    assert batch.batch_size(10**6) == batch.batch_size(2) == 4096
    sizes = [BatchSettings(size=7, growth=growth, rate=1.01).batch_size(epoch) for epoch in range(2000)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 4096


# Refusals ----------------------------------------------------------------------------------------------------------

BAD: list[tuple[type[Any], dict[str, Any], str]] = [
    (
        ScheduleSettings,
        {"kind": "exponential"},
        "schedule: `kind` must be one of 'constant', 'step', 'dev', 'sqrt', 'cosine', got 'exponential'.",
    ),
    (ScheduleSettings, {"factor": 1.0}, "schedule: `factor` must be in (0, 1), got 1.0."),
    (ScheduleSettings, {"at": (0.5, 1.5)}, "schedule: `at[1]` must be in (0, 1), got 1.5."),
    (ScheduleSettings, {"warmup": 1.0}, "schedule: `warmup` must be in [0, 1), got 1.0."),
    (BatchSettings, {"size": 0}, "batch: `size` must be an integer >= 1, got 0."),
    (BatchSettings, {"growth": "twice"}, "batch: `growth` must be one of 'none', 'geometric', 'linear', got 'twice'."),
    (
        BatchSettings,
        {"growth": "geometric", "rate": 0.5},
        "batch: `rate` must be a finite number in [1, inf), got 0.5.",
    ),
    (BatchSettings, {"growth": "linear", "rate": -1.0}, "batch: `rate` must be a finite number >= 0, got -1.0."),
    (BatchSettings, {"period": 0}, "batch: `period` must be an integer >= 1, got 0."),
    (BatchSettings, {"size": 64, "most": 32}, "batch: `most` must be an integer >= 64, got 32."),
]


@pytest.mark.parametrize(("settings", "values", "sentence"), BAD, ids=[sentence.split("`")[1] for *_, sentence in BAD])
def test_a_bad_setting_is_refused_in_one_sentence(settings: type[Any], values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        settings(**values)


def test_a_bad_count_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^batch: `epoch` must be an integer >= 0, got -1\.$"):
        BatchSettings().batch_size(-1)
    with pytest.raises(ValueError, match=r"^schedule: `epochs` must be an integer >= 1, got 0\.$"):
        make_schedule(ScheduleSettings(), sgd(1.0), epochs=0, steps_per_epoch=1)
    with pytest.raises(ValueError, match=r"^schedule: `steps_per_epoch` must be an integer >= 1, got 0\.$"):
        make_schedule(ScheduleSettings(), sgd(1.0), epochs=1, steps_per_epoch=0)
