"""Many tensors in one optimizer: each moves as it would alone, whatever is done to one of them between steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockadapt import BlockAdam, BlockRMSprop, NonFiniteGradientError, SpectrumClip
from blockadapt.kernels import Batch, Segment
from blockadapt.kernels.cpu.kernel import NumbaChange, NumbaKernel
from blockadapt.kernels.segments import Segments
from blockadapt.optimizers import base
from blockadapt.optimizers.preparation import Preparation
from blockadapt.optimizers.standing import Standing
from support.blocks import training
from support.contract_cases import everything

SHAPES = [(12, 7), (16, 16), (3,), (33, 2), (4, 2, 3, 3), (1,), (16, 16), (12, 7)]
CHANGED = 1


def params(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients_(params: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


def turned(t: Tensor) -> Tensor:
    """The same numbers, with other strides."""
    return t.t().contiguous().t()


def in_place(t: Tensor, other: Tensor) -> None:
    t.data = other


CHANGES: dict[str, Callable[[nn.Parameter, dict[str, Any]], object]] = {
    "nothing": lambda p, s: None,
    "x elsewhere": lambda p, s: in_place(p, p.detach().clone()),
    "x turned": lambda p, s: in_place(p, turned(p.detach())),
    "x in float64": lambda p, s: in_place(p, p.detach().double()) or in_place(p.grad, p.grad.double()),
    "m elsewhere": lambda p, s: s.update(exp_avg=s["exp_avg"].clone()),
    "m elsewhere, in place": lambda p, s: in_place(s["exp_avg"], s["exp_avg"].clone()),
    "m turned where it lies": lambda p, s: s["exp_avg"].t_(),
    "m negated": lambda p, s: in_place(s["exp_avg"], torch._neg_view(s["exp_avg"])),
    "V elsewhere": lambda p, s: in_place(s["second_moment"], s["second_moment"].clone()),
    "U elsewhere": lambda p, s: in_place(s["basis"], s["basis"].clone()),
    "gradient turned": lambda p, s: setattr(p, "grad", turned(p.grad)),
    "gradient negated": lambda p, s: setattr(p, "grad", torch._neg_view(-p.grad)),
    "gradient missing": lambda p, s: setattr(p, "grad", None),
    "at another step": lambda p, s: s["step"].add_(3),
    "state anew": lambda p, s: s.clear(),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_each_moves_as_it_would_alone_whatever_happens_to_one_of_them(change: str, every: int) -> None:
    together, alone = params(SHAPES), params(SHAPES)
    options: dict[str, Any] = {"lr": 0.01, "block_size": 5, "refresh_every": every}
    one = BlockAdam(together, **options)
    each = [BlockAdam([param], **options) for param in alone]
    for step in range(9):
        for these in (together, alone):
            give_gradients_(these, step)
        if step == 6 and (change != "U elsewhere" or every > 1):
            CHANGES[change](together[CHANGED], one.state[together[CHANGED]])
            CHANGES[change](alone[CHANGED], each[CHANGED].state[alone[CHANGED]])
        one.step()
        for optimizer in each:
            optimizer._preparation.standing.clear()  # each unit is looked at, as in a first step
            optimizer.step()
    assert all(map(torch.equal, together, alone))
    for a, b, optimizer in zip(together, alone, each, strict=True):
        assert str(one.state[a]) == str(optimizer.state[b])


CLOSED = SpectrumClip(final_lr=0.01, gamma=1e3)
OF_BLOCKS = ("V elsewhere", "U elsewhere", "at another step", "state anew")  # an interval that opens again is refused
WHILE_CLOSED = [
    (cls, change)
    for change in CHANGES
    if change not in OF_BLOCKS
    for cls in (BlockAdam, BlockRMSprop)
    if cls is BlockAdam or not change.startswith("m ")  # the other has no m
]


@pytest.mark.parametrize(("cls", "change"), WHILE_CLOSED)
def test_a_closed_clip_moves_each_as_it_would_alone(cls: Any, change: str) -> None:
    together, alone = params(SHAPES), params(SHAPES)
    options: dict[str, Any] = {"clip": CLOSED, "weight_decay": 0.1, "maximize": True}
    groups = [{}] * 3 + [{"lr": 0.02}] * 4 + [{"clip": None}]
    one = cls([{"params": [param], **group} for param, group in zip(together, groups, strict=True)], lr=0.01, **options)
    each = [cls([param], **{"lr": 0.01, **options, **group}) for param, group in zip(alone, groups, strict=True)]
    for step in range(5):
        for these in (together, alone):
            give_gradients_(these, step)
        if step == 3:
            CHANGES[change](together[CHANGED], one.state[together[CHANGED]])
            CHANGES[change](alone[CHANGED], each[CHANGED].state[alone[CHANGED]])
        one.step()
        for optimizer in each:
            optimizer._preparation.standing.clear()
            optimizer.step()
    assert all(map(torch.equal, together, alone))
    for a, b, optimizer in zip(together, alone, each, strict=True):
        assert str(one.state[a]) == str(optimizer.state[b])
        assert ("second_moment" in one.state[a]) is (a is together[-1])


@pytest.mark.parametrize("options", [{"refresh_every": 2}, {"clip": CLOSED}], ids=["open", "closed"])
def test_what_stands_is_not_looked_at_one_by_one(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = params(SHAPES)
    optimizer = BlockAdam(weights, lr=0.01, **options)
    prepared: list[object] = []
    original = Preparation._add
    monkeypatch.setattr(
        Preparation, "_add", lambda self, unit, *rest: prepared.append(unit) or original(self, unit, *rest)
    )
    give_gradients_(weights, 0)
    optimizer.step()
    if "clip" in options:  # closes at the second step
        optimizer.step()
    prepared.clear()
    monkeypatch.setattr(base, "require_gradients", lambda *gradients: prepared.append(gradients))
    for step in range(3):
        give_gradients_(weights, step)
        optimizer.step()
    assert not prepared


@pytest.mark.parametrize("options", [{}, {"clip": CLOSED}, {"weight_decay": 0.1}], ids=["open", "closed", "decay"])
def test_one_bad_gradient_of_what_stands_is_refused(options: dict[str, Any]) -> None:
    weights = params(SHAPES)
    optimizer = BlockAdam([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.01, **options)
    for step in range(4):
        give_gradients_(weights, step)
        optimizer.step()
    assert weights[-1].grad is not None
    weights[-1].grad.view(-1)[0] = float("nan")
    before = [weight.detach().clone() for weight in weights]
    with pytest.raises(NonFiniteGradientError, match=f"parameter {len(weights) - 3} of group 1"):
        optimizer.step()
    assert all(map(torch.equal, weights, before))


def test_no_segment_lives_while_tensors_stand() -> None:
    """Python's collector would visit thousands of them in every step."""
    of_other_tests = [found for found in gc.get_objects() if type(found) is Segment]
    living: list[int] = []

    class Watched(NumbaKernel):
        def prepare(self, batch: Batch, segments: Sequence[Segment]) -> NumbaChange:
            change = super().prepare(batch, segments)
            living.append(sum(type(found) is Segment for found in gc.get_objects()) - len(of_other_tests))
            return change

    weights = params([(16, 16)] * 40)
    optimizer = BlockAdam([{"params": weights[:20]}, {"params": weights[20:], "lr": 0.02}], backend=Watched())
    for step in range(3):
        give_gradients_(weights, step)
        optimizer.step()
    assert living[0] >= len(weights)
    assert living[1:] == [0, 0]


def test_segments_as_columns_are_the_same_segments() -> None:
    segments = [training(5, count, torch.float32).segment()._replace(refresh=count > 1) for count in (3, 40, 1)]
    columns = Segments.of(segments)
    assert len(columns) == 3
    assert [*columns] == columns[:] == segments
    assert columns[-1] == segments[-1]
    assert Segments.of(columns) is columns
    one = Segments(columns.places, columns.grads, columns.recipes[:1])
    assert [segment.place for segment in one] == columns.places
    assert [segment.refresh for segment in one] == [True] * 3


def test_a_step_that_fails_leaves_what_stands_as_it_was() -> None:
    (weights, twins) = (params(SHAPES) for _ in range(2))
    optimizer, plain = (BlockAdam(these, lr=0.01) for these in (weights, twins))
    for step in range(3):
        give_gradients_(weights, step)
        give_gradients_(twins, step)
        optimizer.step()
        plain.step()
    before = everything(optimizer)
    weights[3].grad = torch.full_like(weights[3], torch.inf)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert everything(optimizer) == before
    give_gradients_(weights, 3)
    give_gradients_(twins, 3)
    optimizer.step()
    plain.step()
    assert everything(optimizer) == everything(plain)


def test_tensors_of_any_size_keep_what_their_blocks_keep() -> None:
    """Under `refresh_every` m, V, U and Λ are 1 + 5.5 + 4.5 + 1 numbers a coordinate, also in tensors of one block."""
    for shapes in ([(10, 320)], [(10,)] * 50):
        weights = params(shapes)
        optimizer = BlockAdam(weights, refresh_every=10)
        give_gradients_(weights, 0)
        optimizer.step()
        state = [t for held in optimizer.state.values() for t in held.values() if t.is_floating_point()]
        assert sum(t.numel() for t in state) == 12 * sum(weight.numel() for weight in weights)


def test_standing_holds_no_unit_that_has_to_be_copied() -> None:
    weights = [*params(SHAPES), nn.Parameter(torch.randn(20, 4, dtype=torch.bfloat16))]
    optimizer = BlockAdam(weights, lr=0.01)
    give_gradients_(weights, 0)
    optimizer.step()
    standing: Standing = optimizer._preparation.standing[0]
    assert [unit.owner is weights[-1] for unit in standing.others] == [True]
