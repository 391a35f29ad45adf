"""What any torch optimizer owes its user, asked of every class with every kind of option."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from blockadapt import BlockAdam, BlockAdamW, SpectrumClip, plan
from blockadapt.kernels import Kernel
from blockadapt.kernels.cpu.kernel import NumbaKernel
from blockadapt.kernels.eigh import EighKernel
from blockadapt.optimizers import BlockOptimizer
from support.contract_cases import (
    CASES,
    CLASSES,
    CLOSING,
    OPEN,
    PLAIN,
    STEPS_TO_CLOSE,
    Net,
    OptimizerCase,
    bits,
    case,
    everything,
    give_gradients_,
    grad_bits,
    loss_of,
    param_bits,
    run,
    state_bits,
    train,
    twins,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_class = pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.cls.__name__)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(11)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal, in float64, up to the order of sums: BLAS may choose it by the number of blocks in a batch."""
    torch.testing.assert_close(list(actual), list(expected), rtol=1e-9, atol=1e-9)


# Param groups ------------------------------------------------------------------------------------------------------

GROUP_OPTIONS: dict[str, Any] = {
    "lr": 0.3,
    "betas": (0.5, 0.6),
    "alpha": 0.5,
    "beta1": 0.5,
    "eps": 0.1,
    "weight_decay": 0.3,
    "amsgrad": True,
    "grouping": "output",
    "block_size": 2,
    "clip": OPEN,
    "bias_correction": None,  # the opposite of the default
    "beta1_decay": 0.5,
    "refresh_every": 4,
    "maximize": True,
    "on_nonfinite": "propagate",
}
WITHOUT_EFFECT = {(cls, "on_nonfinite") for cls in CLASSES} | {(case("BlockAdagrad-plain").cls, "bias_correction")}


def group_options() -> list[Any]:
    pairs = []
    for cls in CLASSES:
        signature = inspect.signature(cls).parameters
        for name in signature:
            if name not in ("params", "capturable", "backend", "process_group"):  # test_capturable.py has a device
                value = GROUP_OPTIONS[name] if name != "bias_correction" else not signature[name].default
                pairs.append(pytest.param(cls, name, value, id=f"{cls.__name__}-{name}"))
    return pairs


@pytest.mark.parametrize(("cls", "name", "value"), group_options())
def test_groups_with_different_options_step_as_separate_optimizers_would(
    cls: type[BlockOptimizer], name: str, value: Any
) -> None:
    shapes = ((3, 5), (2,))
    together, apart, default = (parameters(*shapes, *shapes, dtype=torch.float64) for _ in range(3))
    base = {"betas": (0.9, 0.6)} if name == "amsgrad" else {}  # V must be able to fall within six steps
    grouped = cls([{"params": together[:2]}, {"params": together[2:], name: value}], **base)
    alone = [cls(apart[:2], **base), cls(apart[2:], **base, **{name: value})]
    plain = cls(default, **base)
    for step in range(1, 7):
        for params in (together, apart, default):
            give_gradients_(params, step)
        for optimizer in (grouped, *alone, plain):
            optimizer.step()
    assert_close(together, apart)
    moved_as_by_default = torch.allclose(together[2], default[2], rtol=1e-6)
    assert moved_as_by_default == ((cls, name) in WITHOUT_EFFECT)


@every_case
def test_named_parameters_are_stepped_alike_and_their_names_are_kept(case: OptimizerCase) -> None:
    plain, named = twins()
    run(case.build(plain.parameters()), range(1, 5))
    optimizer = case.build(named.named_parameters())
    run(optimizer, range(1, 5))
    names = [name for name, _ in named.named_parameters()]
    assert param_bits(named.parameters()) == param_bits(plain.parameters())
    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names


@every_case
def test_a_group_added_late_steps_as_an_optimizer_started_then(case: OptimizerCase) -> None:
    early, late, early_alone, late_alone = twins(dtype=torch.float64, count=4)
    optimizer = case.build(early.parameters())
    run(optimizer, range(1, 4))
    optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.05})
    alone = [case.build(early_alone.parameters()), case.build(late_alone.parameters(), lr=0.05)]
    run(alone[0], range(1, 4))
    for step in range(4, 7):
        for model in (early, late, early_alone, late_alone):
            give_gradients_(model.parameters(), step)
        for each in (optimizer, *alone):
            each.step()
    assert_close([*early.parameters(), *late.parameters()], [*early_alone.parameters(), *late_alone.parameters()])


@every_class
def test_the_clip_of_a_late_group_is_measured_against_its_own_lr(case: OptimizerCase) -> None:
    """After the first group's lr has fallen, α* is final_lr / 10 there and final_lr in the new groups."""
    shapes = ((4, 3), (5, 2), (2, 2))
    together, apart = (parameters(*shapes, dtype=torch.float64) for _ in range(2))
    optimizer = case.build(together[:1], lr=0.01, clip=OPEN)
    alone = [case.build([param], lr=lr, clip=OPEN) for param, lr in zip(apart, (0.01, 0.5, 0.01), strict=True)]
    for first in (optimizer, alone[0]):
        run(first, [1, 2])
        first.param_groups[0]["lr"] = 0.001
    optimizer.add_param_group({"params": [together[1]], "lr": 0.5})
    optimizer.add_param_group({"params": [together[2]]})
    for params in (together, apart):
        give_gradients_(params, 3)
    for each in (optimizer, *alone):
        each.step()
    assert_close(together, apart)


def test_keys_of_the_users_own_are_kept_in_a_group() -> None:
    (param,) = parameters((3,))
    optimizer = BlockAdam([{"params": [param], "layer": "head", "lr_scale": 0.5}])
    assert optimizer.param_groups[0]["layer"] == "head"
    assert optimizer.state_dict()["param_groups"][0]["lr_scale"] == 0.5


@every_class
def test_a_param_list_may_be_a_generator_or_one_tensor(case: OptimizerCase) -> None:
    (param,) = parameters((3,))
    assert case.build(p for p in [param]).param_groups[0]["params"][0] is param
    assert case.build([{"params": param}]).param_groups[0]["params"][0] is param


# Schedulers --------------------------------------------------------------------------------------------------------

Scheduler = Callable[[torch.optim.Optimizer], Any]


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 6)], milestones=[4])


def _chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
    "warm-up from 0": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, epoch / 4)),
}


def scheduled_lrs(optimizer: torch.optim.Optimizer, make: Scheduler, step: Callable[[int], None]) -> list[float]:
    """The lr of each of ten steps under a scheduler."""
    scheduler = make(optimizer)
    lrs = []
    for t in range(1, 11):
        lrs.append(float(optimizer.param_groups[0]["lr"]))
        step(t)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    return lrs


def reference_lrs(make: Scheduler, lr: float) -> list[float]:
    """What the same scheduler gives torch's own SGD."""
    (param,) = parameters((2,))
    sgd = torch.optim.SGD([param], lr=lr)

    def step(t: int) -> None:
        give_gradients_([param], t)
        sgd.step()

    return scheduled_lrs(sgd, make, step)


def stepped_by_hand(build: Callable[[list[nn.Parameter]], BlockOptimizer], lrs: list[float]) -> list[bytes]:
    """Where an optimizer goes whose lr is set before each step."""
    params = parameters((4, 3), (3,))
    optimizer = build(params)
    for t, lr in enumerate(lrs, start=1):
        optimizer.param_groups[0]["lr"] = lr
        run(optimizer, [t])
    return param_bits(params)


every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())


@every_scheduler
@every_class
def test_a_scheduler_gives_the_lrs_that_it_gives_sgd_and_the_steps_use_them(
    case: OptimizerCase, make: Scheduler
) -> None:
    params = parameters((4, 3), (3,))
    optimizer = case.build(params, lr=0.05)
    lrs = scheduled_lrs(optimizer, make, lambda t: run(optimizer, [t]))
    assert lrs == reference_lrs(make, 0.05)
    assert param_bits(params) == stepped_by_hand(case.build, lrs)


@every_scheduler
def test_a_scheduler_works_on_a_tensor_lr(make: Scheduler) -> None:
    params = parameters((4, 3), (3,))
    optimizer = BlockAdam(params, lr=torch.tensor(0.05, dtype=torch.float64))
    lrs = scheduled_lrs(optimizer, make, lambda t: run(optimizer, [t]))
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert lrs == pytest.approx(reference_lrs(make, 0.05), rel=1e-12)
    assert param_bits(params) == stepped_by_hand(BlockAdam, lrs)


@every_scheduler
def test_no_scheduler_moves_the_lr_that_clip_bounds_are_measured_against(make: Scheduler) -> None:
    """α* = final_lr · lr / peak_lr, where peak_lr is the largest lr so far, that of the constructor included."""
    params = parameters((4, 3), (3,))
    optimizer = BlockAdam(params, lr=0.05, clip=OPEN)
    lrs = scheduled_lrs(optimizer, make, lambda t: run(optimizer, [t]))
    assert param_bits(params) == stepped_by_hand(lambda p: BlockAdam(p, lr=0.05, clip=OPEN), lrs)


@every_scheduler
def test_a_scheduler_starts_from_the_lr_that_the_group_has_when_it_is_made(make: Scheduler) -> None:
    """As with any torch optimizer: scaling `group["lr"]` before making the scheduler must not be undone by it."""

    def scaled_first(optimizer: torch.optim.Optimizer) -> Any:
        optimizer.param_groups[0]["lr"] = 0.04
        return make(optimizer)

    optimizer = BlockAdam(parameters((2,)), lr=0.005)
    assert scheduled_lrs(optimizer, scaled_first, lambda t: run(optimizer, [t])) == reference_lrs(make, 0.04)


@pytest.mark.parametrize("cls", [BlockAdam, BlockAdamW])
def test_one_cycle_moves_beta1_as_it_does_for_adam_and_the_steps_use_it(cls: type[BlockOptimizer]) -> None:
    params, by_hand = parameters((4, 3)), parameters((4, 3))
    optimizers = cls(params, lr=0.01), torch.optim.Adam(parameters((2,)), lr=0.01)
    schedulers = [lr_scheduler.OneCycleLR(o, 0.1, total_steps=8) for o in optimizers]
    manual = cls(by_hand)
    for t in range(1, 7):
        group, adam = (o.param_groups[0] for o in optimizers)
        assert (group["lr"], *group["betas"]) == (adam["lr"], *adam["betas"])
        manual.param_groups[0].update(lr=group["lr"], betas=group["betas"])
        run(optimizers[0], [t])
        run(manual, [t])
        give_gradients_(adam["params"], t)
        optimizers[1].step()
        for scheduler in schedulers:
            scheduler.step()
    assert param_bits(params) == param_bits(by_hand)
    assert manual.param_groups[0]["betas"][0] != 0.9


@every_case
def test_a_step_at_lr_zero_moves_nothing_but_counts(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.parameters(), lr=0.05)
    optimizer.param_groups[0]["lr"] = 0.0
    before = param_bits(model.parameters())
    run(optimizer, [1])
    assert param_bits(model.parameters()) == before
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


@every_class
def test_an_optimizer_may_be_made_with_lr_zero(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.parameters(), lr=0.0)
    before = param_bits(model.parameters())
    run(optimizer, [1])
    assert param_bits(model.parameters()) == before
    optimizer.param_groups[0]["lr"] = 0.1
    run(optimizer, [2])
    assert param_bits(model.parameters()) != before


# lr as a tensor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "1-element"])
@every_case
def test_a_tensor_lr_updated_in_place_is_the_same_number(case: OptimizerCase, shape: tuple[int, ...]) -> None:
    by_number, by_tensor = twins()
    numbers = case.build(by_number.parameters(), lr=0.05)
    lr = torch.full(shape, 0.05, dtype=torch.float64)
    tensors = case.build(by_tensor.parameters(), lr=lr)
    for step, value in enumerate((0.05, 0.3, 0.1), start=1):
        numbers.param_groups[0]["lr"] = value
        lr.fill_(value)
        run(numbers, [step])
        run(tensors, [step])
    assert param_bits(by_tensor.parameters()) == param_bits(by_number.parameters())
    assert tensors.param_groups[0]["lr"] is lr


# Closures ----------------------------------------------------------------------------------------------------------


@every_case
def test_a_closure_runs_once_with_grad_enabled_and_its_loss_is_returned(case: OptimizerCase) -> None:
    plain, closed_over = twins()
    train(plain, case.build(plain.parameters()), [1, 2])
    optimizer = case.build(closed_over.parameters())
    calls: list[tuple[bool, Tensor]] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(closed_over, len(calls) + 1)
        loss.backward()
        calls.append((torch.is_grad_enabled(), loss))
        return loss

    first = optimizer.step(closure)
    with torch.no_grad():
        second = optimizer.step(closure=closure)
    assert [enabled for enabled, _ in calls] == [True, True]
    assert first is calls[0][1]
    assert second is calls[1][1]
    assert param_bits(closed_over.parameters()) == param_bits(plain.parameters())


@every_class
def test_a_step_without_closure_returns_none_and_needs_no_gradient(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.parameters())
    before = everything(optimizer)
    assert optimizer.step() is None
    assert everything(optimizer) == before


# Hooks -------------------------------------------------------------------------------------------------------------


@every_class
def test_step_hooks_run_around_each_step_until_removed(case: OptimizerCase) -> None:
    (param,) = parameters((3,))
    optimizer = case.build([param])
    seen: list[tuple[str, bytes]] = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", bits(param)))),
        optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", bits(param)))),
    ]
    before = bits(param)
    run(optimizer, [1])
    after = bits(param)
    assert seen == [("pre", before), ("post", after)]
    assert before != after
    for handle in handles:
        handle.remove()
    run(optimizer, [2])
    assert len(seen) == 2


@every_class
def test_a_step_pre_hook_may_change_the_gradient(case: OptimizerCase) -> None:
    hooked, by_hand = parameters((3,)), parameters((3,))
    optimizer = case.build(hooked)

    def halve(*_: Any) -> None:
        assert hooked[0].grad is not None
        hooked[0].grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    run(optimizer, [1])
    other = case.build(by_hand)
    give_gradients_(by_hand, 1)
    assert by_hand[0].grad is not None
    by_hand[0].grad.mul_(0.5)
    other.step()
    assert param_bits(hooked) == param_bits(by_hand)


@every_class
def test_state_dict_hooks_see_and_may_replace_the_state(case: OptimizerCase) -> None:
    (param,) = parameters((3,))
    optimizer = case.build([param], clip=OPEN)
    run(optimizer, [1])
    order: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: order.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, state_dict: {**state_dict, "epoch": 5})
    state_dict = optimizer.state_dict()
    assert order == ["pre"]
    assert state_dict["epoch"] == 5


@every_class
def test_load_state_dict_hooks_see_and_may_replace_what_is_loaded(case: OptimizerCase) -> None:
    saved, fresh = parameters((3,)), parameters((3,))
    source, target = case.build(saved, clip=OPEN), case.build(fresh, clip=OPEN)
    run(source, [1, 2])
    steps_after: list[int] = []

    def relabel(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    target.register_load_state_dict_pre_hook(relabel)
    target.register_load_state_dict_post_hook(lambda o: steps_after.append(int(o.state[fresh[0]]["step"])))
    for _ in range(2):
        target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["lr"] == 0.25
    assert steps_after == [2, 2]
    assert state_bits(target) == state_bits(source)


# AMP ---------------------------------------------------------------------------------------------------------------


@every_case
def test_a_grad_scaler_changes_nothing_and_skips_an_infinite_step(case: OptimizerCase) -> None:
    plain, scaled = twins()
    train(plain, case.build(plain.parameters()), [1, 2])
    optimizer = case.build(scaled.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in (1, "overflow", 2):
        optimizer.zero_grad()
        before, scale = everything(optimizer), scaler.get_scale()
        if step == "overflow":
            scaler.scale(loss_of(scaled, 9) * torch.inf).backward()
        else:
            scaler.scale(loss_of(scaled, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == "overflow":
            assert everything(optimizer) == before
            assert scaler.get_scale() == scale / 2
    assert param_bits(scaled.parameters()) == param_bits(plain.parameters())


# Copies ------------------------------------------------------------------------------------------------------------


def deepcopied(model: nn.Module, optimizer: BlockOptimizer) -> tuple[nn.Module, BlockOptimizer]:
    return copy.deepcopy((model, optimizer))


def pickled(model: nn.Module, optimizer: BlockOptimizer) -> tuple[nn.Module, BlockOptimizer]:
    return pickle.loads(pickle.dumps((model, optimizer)))


@pytest.mark.parametrize("duplicate", [deepcopied, pickled])
@every_case
def test_a_copy_continues_bit_for_bit_and_on_its_own(case: OptimizerCase, duplicate: Callable[..., Any]) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.parameters())
    train(model, optimizer, range(1, 6))  # `refresh_every=3` is then in mid-interval
    other_model, other = duplicate(model, optimizer)
    assert type(other) is case.cls
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    before = everything(optimizer)
    train(other_model, other, range(6, 9))
    assert everything(optimizer) == before
    train(model, optimizer, range(6, 9))
    assert everything(other) == everything(optimizer)


@pytest.mark.parametrize("duplicate", [deepcopied, pickled])
def test_a_copy_keeps_its_backend(duplicate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = twins(count=1)
    _, other = duplicate(model, BlockAdam(model.parameters(), backend="eigh"))

    def refuse(*_: Any) -> None:
        raise AssertionError("eigh was called")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    with pytest.raises(AssertionError, match="eigh was called"):
        run(other, [1])


@pytest.mark.parametrize("duplicate", [deepcopied, pickled])
@pytest.mark.parametrize("kernel", [NumbaKernel, EighKernel])
def test_a_copy_has_a_kernel_object_of_its_own(duplicate: Callable[..., Any], kernel: type[Kernel]) -> None:
    """A kernel that was given as an object has taken a step: it knows addresses, which a copy must not."""
    (model,) = twins(count=1)
    optimizer = BlockAdam(model.parameters(), backend=kernel())
    train(model, optimizer, [1, 2])
    other_model, other = duplicate(model, optimizer)
    before = everything(optimizer)
    train(other_model, other, [3])
    assert everything(optimizer) == before
    train(model, optimizer, [3])
    assert everything(other) == everything(optimizer)


@every_class
def test_a_copy_takes_a_new_group(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    _, other = deepcopied(model, case.build(model.parameters()))
    other.add_param_group({"params": parameters((3,))})
    run(other, [1])
    _, again = deepcopied(nn.Module(), other)
    again.load_state_dict(other.state_dict())
    assert everything(again) == everything(other)


# Parameters that are not stepped, or twice in the model ------------------------------------------------------------


@every_case
def test_a_parameter_without_gradient_is_untouched(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.parameters())
    unused = model.linear.weight
    before = bits(unused)
    for step in range(1, 6):
        give_gradients_(model.parameters(), step)
        unused.grad = None
        optimizer.step()
    assert bits(unused) == before
    assert (unused in optimizer.state) == case.spans  # blocks that span it keep its moments, all zero
    assert bits(model.conv.weight) != bits(twins(count=1)[0].conv.weight)


@every_case
def test_a_frozen_parameter_is_untouched_and_can_be_thawed(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    model.linear.requires_grad_(False)
    optimizer = case.build(model.parameters())
    before = bits(model.linear.weight)
    train(model, optimizer, [1, 2])
    assert bits(model.linear.weight) == before
    model.linear.requires_grad_(True)
    train(model, optimizer, [3])
    assert bits(model.linear.weight) != before


@every_class
def test_a_parameter_first_used_late_starts_at_step_one(case: OptimizerCase) -> None:
    late, alone = parameters((4, 3)), parameters((4, 3))
    other = parameters((2, 2))
    optimizer, reference = case.build([*other, *late]), case.build(alone)
    for step in (1, 2, 3):
        give_gradients_(other, step)
        optimizer.step()
    for step in (4, 5):
        for params in (late, alone):
            give_gradients_(params, step)
        optimizer.step()
        reference.step()
    assert param_bits(late) == param_bits(alone)
    assert int(optimizer.state[late[0]]["step"]) == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


@every_class
def test_a_tied_parameter_is_stepped_once_with_the_sum_of_its_gradients(case: OptimizerCase) -> None:
    model = Tied()
    alone = nn.Parameter(model.encode.weight.detach().clone())
    optimizer, reference = case.build(model.parameters()), case.build([alone])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        assert model.encode.weight.grad is not None
        alone.grad = model.encode.weight.grad.clone()
        optimizer.step()
        reference.step()
    assert len(optimizer.param_groups[0]["params"]) == 1
    assert model.decode.weight is model.encode.weight
    assert bits(model.encode.weight) == bits(alone)


@every_class
def test_parameters_without_elements_do_no_harm(case: OptimizerCase) -> None:
    empty, full = parameters((0, 3), (3, 2))
    alone = parameters((0, 3), (3, 2))[1:]
    run(optimizer := case.build([empty, full]), [1, 2])
    reference = case.build(alone)
    for step in (1, 2):
        give_gradients_([empty, *alone], step)
        reference.step()
    assert bits(full) == bits(alone[0])
    assert optimizer.state_dict()["state"][0]["second_moment"].numel() == 0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("grouping", ["auto", "input", "output", "chunk", "tensor", "joint", "diagonal"])
def test_a_group_without_any_element_steps(grouping: str, shape: tuple[int, ...]) -> None:
    run(optimizer := BlockAdam(parameters(shape), grouping=grouping), [1, 2])
    assert optimizer.param_groups[0]["params"][0].shape == shape


# Gradients belong to the user --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"maximize": True, "weight_decay": 0.1}], ids=["plain", "ascent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_case
def test_gradients_are_never_modified(case: OptimizerCase, dtype: torch.dtype, options: dict[str, Any]) -> None:
    (model,) = twins(count=1, dtype=dtype)
    optimizer = case.build(model.parameters(), **options)
    params = list(model.parameters())
    for step in range(1, 5):
        give_gradients_(params, step)
        grads, before = [p.grad for p in params], grad_bits(params)
        optimizer.step()
        assert grad_bits(params) == before
        assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))


@every_class
def test_zero_grad_frees_or_fills_the_gradients(case: OptimizerCase) -> None:
    params = parameters((3, 2), (2,))
    optimizer = case.build(params)
    give_gradients_(params, 1)
    optimizer.zero_grad(set_to_none=False)
    assert [float(p.grad.abs().sum()) for p in params if p.grad is not None] == [0.0, 0.0]
    optimizer.zero_grad()
    assert [p.grad for p in params] == [None, None]


@every_case
def test_maximize_is_minimize_on_the_negated_gradient(case: OptimizerCase) -> None:
    up, down = twins()
    ascent, descent = case.build(up.parameters(), maximize=True), case.build(down.parameters(), maximize=False)
    for step in range(1, 6):
        give_gradients_(up.parameters(), step)
        for a, b in zip(up.parameters(), down.parameters(), strict=True):
            assert a.grad is not None
            b.grad = -a.grad
        ascent.step()
        descent.step()
    assert param_bits(up.parameters()) == param_bits(down.parameters())


# What is refused ---------------------------------------------------------------------------------------------------


@every_class
def test_an_empty_param_list_is_refused(case: OptimizerCase) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        case.build([])


@every_class
def test_a_tensor_that_is_no_leaf_is_refused(case: OptimizerCase) -> None:
    (param,) = parameters((3,))
    with pytest.raises(ValueError, match="non-leaf"):
        case.build([param * 2])


@every_class
def test_a_parameter_twice_in_a_group_or_in_two_groups_is_refused(case: OptimizerCase) -> None:
    (param,) = parameters((3,))
    with pytest.raises(ValueError, match="each parameter once"):
        case.build([param, param])
    with pytest.raises(ValueError, match="more than one parameter group"):
        case.build([{"params": [param]}, {"params": [param]}])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.int64, torch.float8_e4m3fn], ids=str)
@every_class
def test_parameters_that_are_not_real_numbers_are_refused(case: OptimizerCase, dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=f"`params` must be real floating-point tensors of 16 bits or more, got {dtype}"
    ):
        case.build([torch.zeros(3, dtype=dtype)])


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip", "propagate"])
@every_class
def test_a_sparse_gradient_is_refused_by_name_with_nothing_changed(case: OptimizerCase, on_nonfinite: str) -> None:
    model = nn.Sequential()
    model.add_module("dense", nn.Linear(3, 3))
    model.add_module("words", nn.Embedding(5, 3, sparse=True))
    optimizer = case.build(model.named_parameters(), on_nonfinite=on_nonfinite)
    before = everything(optimizer)
    model.dense(model.words(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError, match=r"`grad` must be dense .*'words\.weight'.*, got torch\.sparse_coo\.$"):
        optimizer.step()
    assert everything(optimizer) == before


# State -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@every_case
def test_statistics_have_the_promised_dtype_and_lie_with_the_parameter(case: OptimizerCase, dtype: torch.dtype) -> None:
    (model,) = twins(count=1, dtype=dtype)
    optimizer = case.build(model.parameters())
    run(optimizer, range(1, STEPS_TO_CLOSE + 2))
    promised = torch.float64 if dtype == torch.float64 else torch.float32
    assert len(optimizer.state) == len(list(model.parameters()))
    for param, state in optimizer.state.items():
        for name in {*state} & {"step", "cut"}:
            assert (state[name].dtype, state[name].device.type) == (torch.int64, "cpu")
        for name in {*state} - {"step", "cut"}:
            assert (name, state[name].dtype, state[name].device) == (name, promised, param.device)
        assert param.dtype == dtype
        assert bool(param.isfinite().all())


@every_case
def test_a_half_precision_run_follows_the_float32_run(case: OptimizerCase) -> None:
    (half,) = twins(count=1, dtype=torch.bfloat16)
    full = copy.deepcopy(half).float()
    optimizers = case.build(half.parameters(), lr=0.1), case.build(full.parameters(), lr=0.1)
    give_gradients_(half.parameters(), 1)
    for a, b in zip(half.parameters(), full.parameters(), strict=True):
        assert a.grad is not None
        b.grad = a.grad.float()
    for optimizer in optimizers:
        optimizer.step()
    assert [bits(p.bfloat16()) for p in full.parameters()] == param_bits(half.parameters())
    assert state_bits(optimizers[0]) == state_bits(optimizers[1])


@every_case
def test_step_counts_are_exact_beyond_the_reach_of_float32(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.parameters())
    run(optimizer, [1])
    for state in optimizer.state.values():
        state["step"].fill_(2**24)
    run(optimizer, [2, 3, 4])
    assert {int(state["step"]) for state in optimizer.state.values()} == {2**24 + 3}
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@every_class
def test_a_block_keeps_the_triangle_of_its_second_moment_and_no_more(case: OptimizerCase) -> None:
    weight, kernel, bias = parameters((20, 3), (2, 4, 3, 3), (7,))
    optimizer = case.build([weight, kernel, bias], block_size=10)
    run(optimizer, [1])
    shapes = [tuple(optimizer.state[p]["second_moment"].shape) for p in (weight, kernel, bias)]
    assert shapes == [(2 * 3, 55), (2 * 4, 45), (1, 28)]
    names = {"step", "cut", "second_moment"} | ({"exp_avg"} if optimizer.averages_gradient else set())
    assert all({*state} == names for state in optimizer.state.values())


def test_diagonal_state_is_a_vector() -> None:
    (param,) = parameters((6, 5))
    run(optimizer := BlockAdam([param], grouping="diagonal"), [1])
    assert optimizer.state[param]["second_moment"].numel() == 30


closing_cases = pytest.mark.parametrize("case", [c for c in CASES if c.clip is CLOSING], ids=lambda case: case.id)


@closing_cases
def test_once_the_clip_has_closed_there_is_no_second_moment_and_no_eigh(
    case: OptimizerCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.parameters(), backend="eigh")
    run(optimizer, range(1, STEPS_TO_CLOSE))
    assert any("second_moment" in state for state in optimizer.state.values())

    def refuse(*_: Any) -> None:
        raise AssertionError("eigh after the clip has closed")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    before = param_bits(model.parameters())
    run(optimizer, range(STEPS_TO_CLOSE, STEPS_TO_CLOSE + 3))
    names = {"step", "exp_avg"} if optimizer.averages_gradient else {"step"}
    assert [{*state} for state in optimizer.state.values()] == [names] * len(before)
    assert param_bits(model.parameters()) != before


def test_a_clip_that_never_closes_may_have_a_tiny_gamma() -> None:
    clipped, plain = parameters((3,)), parameters((3,))
    run(BlockAdam(clipped, clip=SpectrumClip(gamma=1e-200)), [1])
    run(BlockAdam(plain), [1])
    assert param_bits(clipped) == param_bits(plain)


def test_a_freed_second_moment_cannot_be_asked_back() -> None:
    params = parameters((3,))
    optimizer = BlockAdam(params, clip=CLOSING)
    run(optimizer, range(1, STEPS_TO_CLOSE + 1))
    optimizer.param_groups[0]["clip"] = None
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="`clip` must be left closed once it has closed"):
        run(optimizer, [4])
    assert everything(optimizer) == before


@every_class
def test_a_step_makes_one_eigh_call_a_block_size(case: OptimizerCase, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters((20, 3), (2, 4, 3, 3), (7,), (), (10,), (30, 6), (4, 2, 3, 3), (7, 2))
    optimizer = case.build(params, block_size=10, backend="eigh")
    real, seen = torch.linalg.eigh, []

    def counted(matrices: Tensor) -> Any:
        seen.append((matrices.shape[-1], matrices.shape[0]))
        return real(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    run(optimizer, [1])
    assert dict(seen) == {n: count for n, count in plan(optimizer).sizes.items() if n > 1}
    assert len(seen) == len(dict(seen))


# Memory layouts ----------------------------------------------------------------------------------------------------


@every_class
def test_channels_last_weights_step_as_contiguous_ones(case: OptimizerCase) -> None:
    plain, last = parameters((4, 3, 3, 3)), parameters((4, 3, 3, 3))
    last = [nn.Parameter(last[0].detach().to(memory_format=torch.channels_last))]
    optimizers = case.build(plain), case.build(last)
    for step in range(1, 4):
        give_gradients_(plain, step)
        assert plain[0].grad is not None
        last[0].grad = plain[0].grad.to(memory_format=torch.channels_last)
        for optimizer in optimizers:
            optimizer.step()
    assert last[0].is_contiguous(memory_format=torch.channels_last)
    assert param_bits(last) == param_bits(plain)


@pytest.mark.parametrize("grouping", ["auto", "input", "output", "chunk", "tensor", "joint", "diagonal"])
def test_a_transposed_parameter_steps_as_a_contiguous_one(grouping: str) -> None:
    plain = parameters((6, 5))
    turned = [nn.Parameter(plain[0].detach().t().contiguous().t())]
    assert not turned[0].is_contiguous()
    run(BlockAdam(plain, grouping=grouping, block_size=4), range(1, 4))
    run(BlockAdam(turned, grouping=grouping, block_size=4), range(1, 4))
    assert param_bits(turned) == param_bits(plain)


@pytest.mark.parametrize(
    "shape", [(3, 2, 5), (3, 2, 3, 3), (3, 2, 2, 2, 2), (2, 3, 9, 9), (3, 2, 1, 1), (2, 2, 2, 2, 2, 2)], ids=str
)
@pytest.mark.parametrize("block_size", [1, 4, 100])
@pytest.mark.parametrize("grouping", ["auto", "filter", "input", "output", "chunk", "tensor", "diagonal"])
def test_weights_of_any_dimension_are_moved_in_every_coordinate(
    grouping: str, block_size: int, shape: tuple[int, ...]
) -> None:
    (param,) = parameters(shape)
    before = param.detach().clone()
    run(BlockAdam([param], lr=0.1, grouping=grouping, block_size=block_size), [1])
    assert int((param != before).sum()) == before.numel()


# torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BlockAdam-plain", "BlockAdagrad-clip"])
def test_a_compiled_training_step_equals_the_plain_one_without_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, compiled = twins()
    optimizers = case(name).build(plain.parameters()), case(name).build(compiled.parameters())

    def step(x: int, model: Net, optimizer: BlockOptimizer) -> None:
        train(model, optimizer, [x])

    torch._dynamo.reset()
    fast = torch.compile(step, backend="eager")
    with caplog.at_level(logging.CRITICAL, "torch.__trace"):
        for t in (1, 2):
            step(t, plain, optimizers[0])
            fast(t, compiled, optimizers[1])
    assert param_bits(compiled.parameters()) == param_bits(plain.parameters())
