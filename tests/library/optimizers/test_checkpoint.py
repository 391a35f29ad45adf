"""A resumed run is the uninterrupted run, bit for bit; a state that does not fit is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from blockadapt import BlockAdaFom, BlockAdagrad, BlockAdam, BlockAdamW, BlockRMSprop, IndexGroups, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from support.cases import each_backend
from support.changes import trained
from support.contract_cases import (
    CASES,
    CLASSES,
    CLOSING,
    OPEN,
    STEPS_TO_CLOSE,
    Net,
    OptimizerCase,
    everything,
    give_gradients_,
    param_bits,
    run,
    scattered_groups,
    state_bits,
    train,
    twins,
)
from support.files import through_a_file

SAVED_AT, END = 5, 8
"""Kept bases (`refresh_every=3`, blocks of 2) are found anew at steps 1, 2, 4 and 7: step 5 is in mid-interval."""

RESUMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": OPEN},
    "clip closed": {"clip": CLOSING},
    "clip closing after": {"clip": SpectrumClip(final_lr=0.1, gamma=31.0)},  # at step 7
    "refresh": {"refresh_every": 3, "block_size": 2, "grouping": "input"},
    "explicit": {"grouping": scattered_groups(Net.COORDINATES)},
    "joint": {"grouping": "joint"},
    "decay": {"weight_decay": 0.1},
}
AMSGRAD: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True},
    "amsgrad refresh": {"amsgrad": True, **RESUMED["refresh"]},
}


def resumed_cases() -> list[Any]:
    return [
        pytest.param(cls, {"block_size": 4, **options}, id=f"{cls.__name__}-{name}")
        for cls in CLASSES
        for name, options in {**RESUMED, **(AMSGRAD if issubclass(cls, BlockAdam) else {})}.items()
    ]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(11)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


# Resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cls", "options"), resumed_cases())
def test_a_resumed_run_equals_the_uninterrupted_one(
    cls: type[BlockOptimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    (model,) = twins(count=1, dtype=dtype)
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, range(1, SAVED_AT + 1))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    other = Net().to(dtype)
    resumed = cls(other.parameters())  # the options come from the checkpoint, as in torch
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert everything(resumed) == everything(optimizer)

    for each, its in ((model, optimizer), (other, resumed)):
        train(each, its, range(SAVED_AT + 1, END + 1))
    assert everything(resumed) == everything(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_statistics_of_half_precision_parameters_come_back_unrounded(case: OptimizerCase, dtype: torch.dtype) -> None:
    model, other = twins(dtype=dtype)
    optimizer, resumed = case.build(model.parameters()), case.build(other.parameters())
    run(optimizer, range(1, 5))
    resumed.load_state_dict(optimizer.state_dict())
    assert state_bits(resumed) == state_bits(optimizer)
    unrounded = [
        not torch.equal(value, value.to(dtype).float())
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    assert any(unrounded) or case.id in ("BlockRMSprop-closing", "BlockAdagrad-closing")  # those keep no statistics


@pytest.mark.parametrize("cls", CLASSES)
def test_a_schedule_and_its_clip_resume_together(cls: type[BlockOptimizer]) -> None:
    def made() -> tuple[Net, BlockOptimizer, lr_scheduler.LRScheduler]:
        (model,) = twins(count=1)
        optimizer = cls(model.parameters(), lr=0.05, clip=OPEN)
        return model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5)

    def go_on(model: Net, optimizer: BlockOptimizer, scheduler: lr_scheduler.LRScheduler, steps: range) -> None:
        for step in steps:
            train(model, optimizer, [step])
            scheduler.step()

    first, second = made(), made()
    go_on(*first, range(1, 4))
    saved = through_a_file([part.state_dict() for part in first])
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    assert second[1].param_groups[0]["lr"] == 0.05 / 8
    go_on(*first, range(4, 7))
    go_on(*second, range(4, 7))
    assert everything(second[1]) == everything(first[1])


def test_a_clip_resumes_against_the_lr_of_the_first_run_not_of_the_script() -> None:
    params, fresh = parameters((4, 3)), parameters((4, 3))
    optimizer = BlockAdam(params, lr=0.08, clip=OPEN)
    optimizer.param_groups[0]["lr"] = 0.02
    run(optimizer, [1, 2])
    resumed = BlockAdam(fresh, lr=0.02, clip=OPEN)  # a script that was restarted with the lr as it is now
    with torch.no_grad():
        fresh[0].copy_(params[0])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in (optimizer, resumed):
        run(each, [3])
    assert param_bits(fresh) == param_bits(params)


def test_a_late_group_is_resumed_with_its_own_clip() -> None:
    params, fresh = parameters((4, 3), (3,)), parameters((4, 3), (3,))
    optimizers = []
    for a, b in (params, fresh):
        optimizer = BlockAdam([a], lr=0.01, clip=OPEN)
        run(optimizer, [1])
        optimizer.add_param_group({"params": [b], "lr": 0.5, "clip": CLOSING})
        optimizers.append(optimizer)
    run(optimizers[0], range(2, 7))
    optimizers[1].load_state_dict(through_a_file(optimizers[0].state_dict()))
    assert [group["clip"] for group in optimizers[1].param_groups] == [OPEN, CLOSING]
    assert everything(optimizers[1])[1:] == everything(optimizers[0])[1:]


def test_parameters_that_were_never_used_have_no_state_and_that_fits() -> None:
    params, fresh = parameters((4, 3), (3,)), parameters((4, 3), (3,))
    optimizer, resumed = BlockAdam(params), BlockAdam(fresh)
    give_gradients_(params[:1], 1)
    optimizer.step()
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert state_bits(resumed) == state_bits(optimizer)
    assert state_bits(resumed)[1] == {}


@pytest.mark.parametrize("grouping", ["joint", "tensor", "diagonal", IndexGroups([])])
def test_the_state_of_parameters_without_coordinates_resumes(grouping: Any) -> None:
    options: dict[str, Any] = {"grouping": grouping, "refresh_every": 2, "amsgrad": True}
    optimizer, resumed = (BlockAdam(parameters((0,), (3, 0)), **options) for _ in range(2))
    run(optimizer, [1, 2])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert state_bits(resumed) == state_bits(optimizer)
    run(resumed, [3])
    assert [int(state["step"]) for state in resumed.state.values()] == [3, 3]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_untrained_state_fits(cls: type[BlockOptimizer]) -> None:
    source, target = cls(parameters((3,)), lr=0.25), cls(parameters((3,)))
    target.load_state_dict(through_a_file(source.state_dict()))
    assert target.param_groups[0]["lr"] == 0.25
    assert not target.state


def test_a_state_that_has_counted_no_step_fits() -> None:
    """`torch.distributed.checkpoint` makes one, and fills it in place."""
    state_dict = saved_state()
    for state in state_dict["state"].values():
        state["step"].zero_()
    optimizer = BlockAdam(parameters((4, 3), (3,)))
    optimizer.load_state_dict(state_dict)
    assert [int(state["step"]) for state in optimizer.state.values()] == [0, 0]


def test_adam_and_adamw_share_their_state() -> None:
    """The statistics mean the same in both; only the decay differs, and that is the class's."""
    adam, adamw = BlockAdam(parameters((4, 3))), BlockAdamW(parameters((4, 3)))
    run(adam, [1, 2])
    adamw.load_state_dict(adam.state_dict())
    assert state_bits(adamw) == state_bits(adam)


@pytest.mark.parametrize(
    ("option", "first", "then"),
    [("amsgrad", True, False), ("amsgrad", False, True), ("refresh_every", 5, 1), ("refresh_every", 1, 5)],
)
def test_an_option_changed_in_mid_training_resumes(option: str, first: Any, then: Any) -> None:
    params, fresh = parameters((4, 3)), parameters((4, 3))
    optimizer, resumed = BlockAdam(params, **{option: first}), BlockAdam(fresh)
    run(optimizer, range(1, 6))
    optimizer.param_groups[0][option] = then
    run(optimizer, [6, 7])
    with torch.no_grad():
        fresh[0].copy_(params[0])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in (optimizer, resumed):
        run(each, [8, 9])
    assert param_bits(fresh) == param_bits(params)


@pytest.mark.parametrize("build", [BlockRMSprop, BlockAdaFom])
def test_a_checkpoint_from_between_a_new_momentum_and_the_next_step_resumes(build: Any) -> None:
    params, fresh = parameters((4, 3)), parameters((4, 3))
    optimizer, resumed = build(params), build(fresh)
    run(optimizer, range(1, 6))
    optimizer.param_groups[0]["momentum"] = 0.8
    with torch.no_grad():
        fresh[0].copy_(params[0])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in (optimizer, resumed):
        run(each, [6, 7])
    assert param_bits(fresh) == param_bits(params)


# What a checkpoint holds -------------------------------------------------------------------------------------------


def only_plain_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and only_plain_data(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(only_plain_data, value))
    return type(value) in (int, float, bool, str, type(None))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_checkpoint_holds_tensors_and_plain_data(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.named_parameters())
    run(optimizer, [1])
    state_dict = optimizer.state_dict()
    assert only_plain_data(state_dict["param_groups"])
    assert all(type(value) is Tensor for state in state_dict["state"].values() for value in state.values())


@pytest.mark.parametrize(
    "options",
    [
        {"lr": np.float64(0.1)},
        {"lr": Fraction(1, 8)},
        {"weight_decay": np.float64(0.1)},
        {"eps": np.longdouble(0.125)},
        {"betas": tuple(np.array([0.9, 0.99]))},
        {"clip": SpectrumClip(np.float64(0.1), np.float32(0.125))},
        {"clip": SpectrumClip(1, gamma=Fraction(1, 8))},
    ],
    ids=str,
)
def test_numbers_of_other_kinds_do_not_spoil_a_checkpoint(options: dict[str, Any]) -> None:
    source, target = BlockAdam(parameters((3,)), **options), BlockAdam(parameters((3,)))
    run(source, [1])
    target.load_state_dict(through_a_file(source.state_dict()))
    (name,) = options
    assert target.param_groups[0][name] == source.param_groups[0][name]


def test_a_tensor_lr_is_resumed_as_a_tensor_of_its_own() -> None:
    lr = torch.tensor(0.25)
    source, target = BlockAdam(parameters((3,)), lr=lr, clip=OPEN), BlockAdam(parameters((3,)), clip=OPEN)
    run(source, [1])
    target.load_state_dict(source.state_dict())
    before = everything(target)
    lr.fill_(9.0)
    assert everything(target) == before
    assert float(target.param_groups[0]["lr"]) == 0.25


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_loading_shares_nothing_with_what_was_loaded(case: OptimizerCase) -> None:
    model, other = twins()
    optimizer, resumed = case.build(model.parameters()), case.build(other.parameters())
    run(optimizer, [1, 2])
    state_dict = optimizer.state_dict()
    resumed.load_state_dict(state_dict)
    source = everything(optimizer)
    run(resumed, [3, 4])
    assert everything(optimizer) == source
    target = everything(resumed)
    for state in state_dict["state"].values():
        for value in state.values():
            value.zero_()
    for group in state_dict["param_groups"]:
        group["lr"] = 7.0
    assert everything(resumed) == target


@each_backend
def test_a_checkpoint_counts_by_its_numbers_whatever_its_strides(backend: str) -> None:
    (param, optimizer), (twin, plain) = trained(backend=backend), trained(backend=backend)
    saved = plain.state_dict()
    for name in ("exp_avg", "second_moment"):
        saved["state"][0][name] = saved["state"][0][name].t().contiguous().t()
        assert not saved["state"][0][name].is_contiguous()
    plain.load_state_dict(saved)
    for each in (optimizer, plain):
        each.step()
    assert everything(plain) == everything(optimizer)
    assert twin.equal(param)


def test_a_state_dict_does_not_expose_the_explicit_blocks() -> None:
    optimizer = BlockAdam(parameters((3,)), grouping=IndexGroups([[0, 1], [2]]))
    optimizer.state_dict()["param_groups"][0]["grouping"][0].append(99)
    assert optimizer.param_groups[0]["grouping"].groups == [[0, 1], [2]]


# What is refused ---------------------------------------------------------------------------------------------------

Spoil = Callable[[dict[str, Any]], object]


def saved_state(cls: type[BlockOptimizer] = BlockAdam, **options: Any) -> dict[str, Any]:
    optimizer = cls(parameters((4, 3), (3,)), **{"block_size": 2, **options})
    run(optimizer, [1, 2])
    return copy.deepcopy(optimizer.state_dict())


def refused(optimizer: BlockOptimizer, state_dict: dict[str, Any], message: str) -> None:
    """The state is refused with this message; optimizer and state are as before."""
    before, kept = everything(optimizer), copy.deepcopy(state_dict)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert everything(optimizer) == before
    assert str(state_dict) == str(kept)
    run(optimizer, [9])


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


NEEDED = "`state` must be a state with step, exp_avg, cut, second_moment"
CUT = (
    "`grouping` must be what cut the blocks of parameter 0 when their state was made (delete that state to begin anew)"
)

TAMPERED: dict[str, tuple[Spoil, str]] = {
    "missing tensor": (
        lambda s: s["state"][0].pop("exp_avg"),
        f"{NEEDED} (for parameter 0), got one without 'exp_avg'.",
    ),
    "missing step": (
        lambda s: s["state"][1].pop("step"),
        f"{NEEDED} (for parameter 1), got one without 'step'.",
    ),
    "missing cut": (
        lambda s: s["state"][0].pop("cut"),
        f"{NEEDED} (for parameter 0), got one without 'cut'.",
    ),
    "foreign tensor": (
        lambda s: s["state"][0].update(exp_avg_sq=torch.zeros(4, 3)),
        "`state` must be a state with nothing but step, exp_avg, cut, second_moment, largest, basis, eigenvalues "
        "(for parameter 0), got 'exp_avg_sq'.",
    ),
    "no dict": (
        lambda s: s["state"].update({0: [1, 2]}),
        "`state` must be a dict of tensors (for parameter 0), got list.",
    ),
    "truncated second moment": (
        lambda s: s["state"][0].update(second_moment=s["state"][0]["second_moment"][:-1]),
        "`second_moment` must be a plain tensor of shape (6, 3) (in the state of parameter 0), got shape (5, 3).",
    ),
    "complex second moment": (
        lambda s: s["state"][0].update(second_moment=s["state"][0]["second_moment"] * 1j),
        "`second_moment` must be of real numbers (in the state of parameter 0), got torch.complex64.",
    ),
    "flattened first moment": (
        lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg"].flatten()),
        "`exp_avg` must be a plain tensor of shape (4, 3) (in the state of parameter 0), got shape (12,).",
    ),
    "step that is no tensor": (
        lambda s: s["state"][0].update(step=2),
        "`step` must be a plain tensor of shape () (in the state of parameter 0), got int.",
    ),
    "step that is a vector": (
        lambda s: s["state"][0].update(step=torch.ones(2, dtype=torch.int64)),
        "`step` must be a plain tensor of shape () (in the state of parameter 0), got shape (2,).",
    ),
    "step that is negative": (
        lambda s: s["state"][0]["step"].fill_(-1),
        "`step` must be a count of steps (in the state of parameter 0), got -1.",
    ),
    "other block size": (
        lambda s: s["param_groups"][0].update(block_size=3),
        f"{CUT}, got one that gives runs of 3 down a column of 4.",
    ),
    "other grouping": (
        lambda s: s["param_groups"][0].update(grouping="diagonal"),
        f"{CUT}, got one that gives runs of 1 along a row of 12.",
    ),
    "other format": (
        lambda s: s["param_groups"][0].update(blockadapt_format=1),
        "`state_dict` must be of format 2, which this version reads, got 1.",
    ),
    "missing option": (
        lambda s: s["param_groups"][0].pop("eps"),
        "param group 0 of the state has no `eps`; another optimizer or version wrote it.",
    ),
    "impossible option": (
        lambda s: s["param_groups"][0].update(lr=-1.0),
        "the saved options do not fit this model. BlockAdam: `lr` must be a finite number >= 0, got -1.0.",
    ),
    "blocks of another model": (
        lambda s: s["param_groups"][0].update(grouping=[[0, 1], [2]]),
        "the saved options do not fit this model. "
        "BlockAdam: `grouping` must be blocks that hold each of the group's 15 coordinates once, "
        "got coordinate 3 in none.",
    ),
    "one parameter fewer": (
        lambda s: s["param_groups"][0]["params"].pop(),
        "the state has groups of [1] parameters, the optimizer has groups of [2].",
    ),
    "one group more": (
        lambda s: s["param_groups"].append({**s["param_groups"][0], "params": [2]}),
        "the state has groups of [2, 1] parameters, the optimizer has groups of [2].",
    ),
}


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize(("spoil", "reason"), TAMPERED.values(), ids=TAMPERED.keys())
def test_a_damaged_state_is_refused_with_the_reason(spoil: Spoil, reason: str, trained: bool) -> None:
    optimizer = BlockAdam(parameters((4, 3), (3,)), block_size=2)
    if trained:
        run(optimizer, [1, 2, 3])
    state_dict = saved_state()
    spoil(state_dict)
    refused(optimizer, state_dict, exactly(f"BlockAdam.load_state_dict: {reason}"))


@pytest.mark.parametrize("cls", CLASSES)
def test_the_state_of_another_model_is_refused(cls: type[BlockOptimizer]) -> None:
    optimizer = cls(parameters((6, 3), (3,)), block_size=2)
    reasons = (
        r"`exp_avg` must be a plain tensor of shape \(6, 3\)|`grouping` must be what cut the blocks of parameter 0"
    )
    refused(optimizer, saved_state(cls), reasons)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("source", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_the_state_of_a_torch_optimizer_is_refused(
    cls: type[BlockOptimizer], source: type[torch.optim.Optimizer]
) -> None:
    theirs = source(parameters((4, 3), (3,)), lr=0.1)
    give_gradients_(theirs.param_groups[0]["params"], 1)
    theirs.step()
    message = rf"^{cls.__name__}\.load_state_dict: `state_dict` must be of format 2.* got one without a format; another"
    refused(cls(parameters((4, 3), (3,))), theirs.state_dict(), message)


OF_TORCH = [
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("target", OF_TORCH)
def test_torchs_optimizers_never_step_with_our_state(cls: type[BlockOptimizer], target: str) -> None:
    """torch's own load compares only the lengths of groups. But statistics have other names here, or options are not
    there.
    """
    params = parameters((4, 3), (5, 3))
    ours = cls(params, block_size=2)
    give_gradients_(params, 1)
    ours.step()
    theirs = getattr(torch.optim, target)(params, lr=0.1)
    if target == "SparseAdam":
        for param in params:
            param.grad = param.grad.to_sparse()
    before = param_bits(params)

    def load_and_step() -> None:
        theirs.load_state_dict(through_a_file(ours.state_dict()))  # NAdam and ASGD fail here already
        theirs.step(lambda: 0.0)

    with pytest.raises(TypeError if target == "Adafactor" else KeyError):  # whose `eps` are two
        load_and_step()
    assert param_bits(params) == before


SIBLINGS = [
    (a, b)
    for a in CLASSES
    for b in CLASSES
    if a is not b and not (issubclass(a, BlockAdam) and issubclass(b, BlockAdam))
]


@pytest.mark.parametrize(("cls", "source"), SIBLINGS)
def test_the_state_of_a_sibling_is_refused(cls: type[BlockOptimizer], source: type[BlockOptimizer]) -> None:
    message = "another optimizer or version wrote it|is not an option of a param group"
    refused(cls(parameters((4, 3), (3,))), saved_state(source), f"^{cls.__name__}.load_state_dict: .*({message})")


@pytest.mark.parametrize(
    ("cls", "source", "reason"),
    [
        (BlockAdagrad, BlockRMSprop, "BlockAdagrad: `alpha` is not an option of a param group."),
        (
            BlockRMSprop,
            BlockAdagrad,
            "param group 0 of the state has no `alpha`, `momentum`; another optimizer or version wrote it.",
        ),
        (
            BlockAdaFom,
            BlockAdagrad,
            "param group 0 of the state has no `beta1`, `beta1_decay`, `momentum`; another optimizer",
        ),
    ],
)
def test_the_refusal_says_what_tells_the_sibling(
    cls: type[BlockOptimizer], source: type[BlockOptimizer], reason: str
) -> None:
    refused(cls(parameters((4, 3), (3,))), saved_state(source), re.escape(reason))


def test_a_clipped_state_without_the_lr_it_began_with_is_refused() -> None:
    state_dict = saved_state(clip=OPEN, lr=0.0123)
    group = state_dict["param_groups"][0]
    (first_lr,) = [name for name, value in group.items() if value == 0.0123 and name != "lr"]
    del group[first_lr]
    refused(BlockAdam(parameters((4, 3), (3,)), clip=OPEN), state_dict, first_lr)


def test_a_first_moment_is_refused_where_none_is_kept() -> None:
    state_dict = saved_state(BlockRMSprop)
    state_dict["state"][0]["exp_avg"] = torch.zeros(4, 3)
    message = r"`state` must be a state with nothing but step, cut, .* \(for parameter 0\), got 'exp_avg'\.$"
    refused(BlockRMSprop(parameters((4, 3), (3,))), state_dict, message)


def test_a_state_without_second_moment_is_refused_while_the_clip_is_open() -> None:
    params = parameters((4, 3), (3,))
    optimizer = BlockAdam(params, clip=CLOSING)
    run(optimizer, range(1, STEPS_TO_CLOSE + 1))
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["step"].fill_(STEPS_TO_CLOSE - 1)
    refused(
        BlockAdam(parameters((4, 3), (3,)), clip=CLOSING),
        state_dict,
        exactly(f"BlockAdam.load_state_dict: {NEEDED} (for parameter 0), got one without 'cut', 'second_moment'."),
    )


@pytest.mark.parametrize("missing", [0, 1])
def test_a_joint_state_that_lacks_one_parameter_is_refused(missing: int) -> None:
    """Blocks that span parameters step them together, so all of them have state or none has."""
    state_dict = saved_state(grouping="joint")
    del state_dict["state"][missing]
    refused(BlockAdam(parameters((4, 3), (3,)), grouping="joint"), state_dict, f"parameter {missing}")


@pytest.mark.parametrize(
    ("not_a_state", "found"),
    [
        ({}, []),
        ({"model": {}, "optimizer": {}}, ["model", "optimizer"]),
        (nn.Linear(2, 2).state_dict(), ["bias", "weight"]),
        ([1, 2], "list"),
        (None, "NoneType"),
    ],
    ids=["empty", "whole", "model", "list", "none"],
)
def test_what_is_no_optimizer_state_is_refused(not_a_state: Any, found: Any) -> None:
    rule = "`state_dict` must be an optimizer's, with 'state' and 'param_groups'"
    message = exactly(f"BlockAdam.load_state_dict: {rule}, got one with {found}.")
    refused(BlockAdam(parameters((4, 3), (3,))), not_a_state, message)
