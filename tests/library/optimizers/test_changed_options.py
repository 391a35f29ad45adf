"""What a script sets in param groups after the first step: it counts from the next step on, or is refused untouched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from blockadapt import BlockAdam, IndexGroups, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from support.cases import each_backend
from support.changes import CLOSED, parameter, refuses, trained
from support.contract_cases import CLASSES, everything, give_gradients_, param_bits, run

# What goes on --------------------------------------------------------------------------------------------------------


@each_backend
def test_a_cut_changed_in_name_only_goes_on(backend: str) -> None:
    weight, twin = parameter(8, 8), parameter(8, 8)
    optimizer, untouched = BlockAdam([weight], backend=backend), BlockAdam([twin], backend=backend)
    run(optimizer, [1, 2])
    run(untouched, [1, 2])
    optimizer.param_groups[0].update(grouping="input", block_size=9)  # "auto" of a matrix; both give columns of 8
    run(optimizer, [3])
    run(untouched, [3])
    assert param_bits([weight]) == param_bits([twin])


@each_backend
def test_amsgrad_switched_off_is_off_at_the_next_step(backend: str) -> None:
    weight, twin = parameter(4, 3), parameter(4, 3)
    optimizer = BlockAdam([weight], amsgrad=True, betas=(0.9, 0.5), backend=backend)
    plain = BlockAdam([twin], betas=(0.9, 0.5), backend=backend)
    for each in (optimizer, plain):
        run(each, [1])
    with torch.no_grad():
        twin.copy_(weight)
    optimizer.param_groups[0]["amsgrad"] = False
    run(optimizer, [2])
    run(plain, [2])
    assert param_bits([weight]) == param_bits([twin])
    assert "largest" not in optimizer.state[weight]


@each_backend
def test_a_basis_that_was_not_kept_so_far_is_found_anew_at_once(backend: str) -> None:
    """Step 8 with `refresh_every=10` would use the basis of step 1, which nobody kept."""
    (kept, optimizer), (always, other) = (trained(steps=7, backend=backend) for _ in range(2))
    optimizer.param_groups[0]["refresh_every"] = 10
    for each in (optimizer, other):
        each.step()
    torch.testing.assert_close(kept, always, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [{"refresh_every": 3}, {"amsgrad": True}, {"clip": CLOSED}, {"clip": SpectrumClip(gamma=1e-3)}],
    ids=["refresh", "amsgrad", "closed clip", "open clip"],
)
@pytest.mark.parametrize("back", [False, True], ids=["on", "off"])
def test_a_checkpoint_between_a_change_of_options_and_the_next_step_goes_on(change: dict[str, Any], back: bool) -> None:
    before = {} if not back or change.get("clip") is CLOSED else change
    param, optimizer = trained(**before)
    unchanged = {"refresh_every": 1, "amsgrad": False, "clip": None}
    optimizer.param_groups[0].update({name: unchanged[name] for name in change} if back else change)
    twin = nn.Parameter(param.detach().clone())
    twin.grad = param.grad.clone()
    resumed = BlockAdam([twin])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        optimizer.step()
        resumed.step()
    assert everything(resumed) == everything(optimizer)


# What is refused: another cut ----------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((8, 8), {"block_size": 4}),
        ((8, 8), {"block_size": 1}),
        ((8, 8), {"grouping": "output"}),  # as many blocks, as large
        ((8, 8), {"grouping": IndexGroups([list(range(64))])}),
        ((12, 7), {"block_size": 6}),
        ((12, 7), {"block_size": 4}),
        ((12, 7), {"grouping": "output"}),
        ((12, 7), {"grouping": "diagonal"}),
        ((12, 7), {"grouping": "joint"}),
        ((12, 7), {"grouping": IndexGroups([range(i, i + 7) for i in range(0, 84, 7)])}),
    ],
    ids=str,
)
def test_a_cut_that_is_not_the_state_s_is_refused_until_the_state_is_dropped(
    shape: tuple[int, int], change: dict[str, Any], backend: str
) -> None:
    weight = parameter(*shape)
    optimizer = BlockAdam([weight], block_size=8, backend=backend)
    run(optimizer, [1, 2])
    optimizer.param_groups[0].update(change)
    give_gradients_([weight], 3)
    refuses(optimizer, "`grouping` must be what cut the blocks of .* when their state was made")
    del optimizer.state[weight]
    twin = parameter(*shape)
    twin.data.copy_(weight)
    fresh = BlockAdam([twin], **{"block_size": 8, **change}, backend=backend)
    run(optimizer, [3, 4])
    run(fresh, [3, 4])
    assert param_bits([weight]) == param_bits([twin])


def test_explicit_blocks_in_another_order_are_another_cut() -> None:
    _, optimizer = trained((4,), grouping=IndexGroups([[0, 1], [2, 3]]))
    optimizer.param_groups[0]["grouping"] = IndexGroups([[2, 3], [0, 1]])
    refuses(optimizer, "`grouping` must be what cut the blocks")


# What is refused: a value that cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": float("nan")}, "`lr` must be a finite number >= 0, got nan"),
        ({"lr": -1.0}, "`lr` must be a finite number >= 0, got -1.0"),
        ({"lr": torch.tensor(float("inf"))}, "`lr` must be a finite number >= 0, got inf"),
        ({"betas": (1.5, 2)}, r"`betas\[0\]` must be in \[0, 1\), got 1.5"),
        ({"betas": [0.9, float("nan")]}, r"`betas\[1\]` must be in \[0, 1\), got nan"),
        ({"on_nonfinite": "typo"}, "`on_nonfinite` must be one of"),
        ({"block_size": 0}, r"`block_size` must be an integer in \[1, 4096\], got 0"),
        ({"grouping": "rows"}, "`grouping` must be one of"),
        ({"eps": 0}, "`eps` must be a finite number > 0, got 0"),
        ({"eps": 0.0}, "`eps` must be a finite number > 0, got 0.0"),
        ({"weight_decay": torch.zeros(2)}, "`weight_decay` must be a finite number >= 0"),
        ({"refresh_every": 0}, "`refresh_every` must be an integer >= 1, got 0"),
        ({"maximize": "yes"}, "`maximize` must be True or False, got 'yes'"),
        ({"clip": 0.1}, "`clip` must be a SpectrumClip or None, got 0.1"),
    ],
    ids=str,
)
def test_an_option_set_later_is_checked_like_one_given_at_first(
    cls: type[BlockOptimizer], change: dict[str, Any], message: str
) -> None:
    optimizer = cls([parameter(4, 3)])
    if not change.keys() <= optimizer.param_groups[0].keys():
        return  # an option that this class does not have
    with pytest.raises(ValueError, match=message) as first:
        cls([parameter(4, 3)], **change)
    run(optimizer, [1])
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=message) as later:
        optimizer.step()
    assert str(later.value) == str(first.value)
    refuses(optimizer, message)


@pytest.mark.parametrize(("name", "value"), [("refresh_every", 1.0), ("block_size", 10.0), ("amsgrad", 0)])
def test_an_option_that_equals_a_valid_one_is_checked_too(name: str, value: object) -> None:
    """Else a checkpoint is written that cannot be loaded."""
    weight = parameter(3)
    optimizer = BlockAdam([weight])
    run(optimizer, [1])
    optimizer.param_groups[0][name] = value
    give_gradients_([weight], 2)
    refuses(optimizer, f"`{name}` must be ")


@pytest.mark.parametrize("name", ["eps", "lr", "skipped_steps", "estimate"])
def test_an_option_that_is_gone_is_told(name: str) -> None:
    weight = parameter(3)
    optimizer = BlockAdam([weight])
    del optimizer.param_groups[0][name]
    give_gradients_([weight], 1)
    refuses(optimizer, f"`{name}` must be ")


def test_a_pair_of_betas_changed_in_place_is_noticed() -> None:
    _, optimizer = trained(betas=[0.9, 0.99])
    optimizer.param_groups[0]["betas"][0] = 2.0
    refuses(optimizer, r"`betas\[0\]` must be in \[0, 1\), got 2.0")


@pytest.mark.parametrize("lr", ["fast", None, float("nan")])
@pytest.mark.parametrize("moves", [True, False], ids=["moved", "frozen"])
def test_an_lr_that_is_none_is_refused_whole_where_a_clip_follows_it(moves: bool, lr: Any) -> None:
    """Also in a group that has no gradient: its largest lr is remembered when the others have been written."""
    weight, other = parameter(4, 3), parameter(3)
    optimizer = BlockAdam([{"params": [weight]}, {"params": [other], "clip": SpectrumClip(0.1)}])
    run(optimizer, [1])
    give_gradients_([weight, other] if moves else [weight], 2)
    other.grad = other.grad if moves else None
    optimizer.param_groups[1]["lr"] = lr
    refuses(optimizer, "`lr` must be ")
    assert optimizer.param_groups[1]["peak_lr"] == 1e-3


def test_a_clip_set_on_a_group_made_with_lr_zero_is_refused() -> None:
    weight = parameter(4, 3)
    optimizer = BlockAdam([weight], lr=0.0)
    run(optimizer, [1])
    optimizer.param_groups[0]["clip"] = SpectrumClip()
    give_gradients_([weight], 2)
    refuses(optimizer, "`lr` must be ")


def test_a_clip_on_a_group_that_began_with_no_lr_is_refused() -> None:
    _, optimizer = trained(lr=0.0)
    optimizer.param_groups[0].update(lr=0.1, clip=SpectrumClip())
    refuses(optimizer, "`lr` must be > 0 where `clip` has a `final_lr`")


# What is refused: what steps themselves keep in a group --------------------------------------------------------------


@pytest.mark.parametrize(
    "estimate", [None, "x", (1.0,), (float("nan"), 1), (1.0, "x"), (10**400, 1), (1.0, 2**63)], ids=str
)
def test_an_estimate_that_is_none_is_refused_where_a_clip_goes_by_it(estimate: Any) -> None:
    weight = parameter(4, 3)
    optimizer = BlockAdam([weight], clip=SpectrumClip("auto", gamma=0.1))
    run(optimizer, [1, 2])
    optimizer.state_dict()  # it has been read
    optimizer.param_groups[0]["estimate"] = estimate
    give_gradients_([weight], 3)
    refuses(optimizer, "`estimate` must be a pair of a finite number >= 0 and a count of steps")


def test_an_estimate_that_is_none_keeps_no_other_from_being_read_once() -> None:
    params, twins = [parameter(4, 3), parameter(3)], [parameter(4, 3), parameter(3)]
    optimizer, untouched = (
        BlockAdam([{"params": [param]} for param in some], clip=SpectrumClip("auto", gamma=0.1))
        for some in (params, twins)
    )
    for each in (optimizer, untouched):
        run(each, [1])
    kept = optimizer.param_groups[1]["estimate"]
    optimizer.param_groups[1]["estimate"] = None
    for _ in range(2):
        with pytest.raises(ValueError, match="`estimate` must be a pair"):
            optimizer.state_dict()
    optimizer.param_groups[1]["estimate"] = kept
    assert everything(optimizer) == everything(untouched)


@pytest.mark.parametrize("skipped", ["x", None, 1.5, -1])
@pytest.mark.parametrize("skips", [True, False])
def test_a_count_of_skipped_steps_that_is_none_is_refused(skipped: Any, skips: bool) -> None:
    weight, bias = parameter(4, 3), parameter(3)
    optimizer = BlockAdam([{"params": [weight]}, {"params": [bias]}], on_nonfinite="skip")
    run(optimizer, [1])
    give_gradients_([weight, bias], 2)
    if skips:
        weight.grad = torch.full_like(weight, torch.nan)
    optimizer.param_groups[1]["skipped_steps"] = skipped
    refuses(optimizer, "`skipped_steps` must be an integer >= 0")
