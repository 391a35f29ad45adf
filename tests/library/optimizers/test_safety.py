"""What a script may do to parameters, state and options: it goes on rightly, or is refused with nothing changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from blockadapt import BlockAdam, BlockRMSprop, IndexGroups, NonFiniteGradientError, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from support.cases import each_backend
from support.contract_cases import CLASSES, CLOSING, STEPS_TO_CLOSE, everything, give_gradients_, param_bits, run
from support.fuzzing import bits_of_all


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(5)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


def refuses(optimizer: BlockOptimizer, message: str) -> None:
    """A step raises this, in the class's own words, and changes nothing."""
    before = bits_of_all(optimizer)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=rf"^{type(optimizer).__name__}: .*{message}"):
        optimizer.step()
    assert bits_of_all(optimizer) == before


# State follows its parameter ---------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("first", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("then", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "refresh_every": 3}, {"grouping": "joint"}], ids=str)
def test_a_cast_model_goes_on_as_from_a_checkpoint(
    first: torch.dtype, then: torch.dtype, options: dict[str, Any], backend: str
) -> None:
    """Loading into a model of the other dtype is tested elsewhere; here the model is cast under the optimizer."""
    model = nn.ParameterList([parameter(7, 5, dtype=first), parameter(4, dtype=first)])
    optimizer = BlockAdam(model.parameters(), block_size=3, backend=backend, **options)
    run(optimizer, [1, 2, 3, 4])
    twin = copy.deepcopy(model).to(then)
    loaded = BlockAdam(twin.parameters(), block_size=3, backend=backend, **options)
    loaded.load_state_dict(optimizer.state_dict())
    model.to(then)
    for each in (optimizer, loaded):
        run(each, [5, 6, 7])
    assert everything(optimizer) == everything(loaded)
    assert all(v.dtype == (torch.float64 if then == torch.float64 else torch.float32) for v in statistics(optimizer))


def statistics(optimizer: BlockOptimizer) -> list[Tensor]:
    kept = [state.items() for state in optimizer.state.values()]
    return [value for items in kept for name, value in items if name not in ("step", "cut")]


REPLACEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda t: t.double(),
    "columns first": lambda t: t.mT.contiguous().mT,
    "a slice of another": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "a view of zeros and itself": lambda t: torch.cat([torch.zeros_like(t), t])[len(t) :],
}


@each_backend
@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS.keys())
@pytest.mark.parametrize("name", ["exp_avg", "second_moment", "largest", "basis", "eigenvalues"])
@pytest.mark.parametrize("grouping", ["chunk", "input", "joint", "diagonal"])
def test_a_replaced_state_tensor_keeps_its_numbers(
    name: str, replace: Callable[[Tensor], Tensor], grouping: str, backend: str
) -> None:
    options = {"grouping": grouping, "block_size": 4, "amsgrad": True, "refresh_every": 20, "backend": backend}
    weight, twin = parameter(6, 6), parameter(6, 6)
    optimizer, untouched = BlockAdam([weight], **options), BlockAdam([twin], **options)
    for each in (optimizer, untouched):
        run(each, range(1, 7))
    state = optimizer.state[weight]
    if state[name].ndim < 2:
        pytest.skip("one number in a row")
    state[name] = replace(state[name])
    for each in (optimizer, untouched):
        run(each, [7, 8])
    assert everything(optimizer) == everything(untouched)


@each_backend
def test_a_first_moment_in_half_precision_goes_on_from_its_numbers(backend: str) -> None:
    weight, twin = parameter(12, 7), parameter(12, 7)
    optimizer, other = BlockAdam([weight], backend=backend), BlockAdam([twin], backend=backend)
    for each in (optimizer, other):
        run(each, [1, 2])
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].bfloat16()
    other.state[twin]["exp_avg"].copy_(other.state[twin]["exp_avg"].bfloat16())
    for each in (optimizer, other):
        run(each, [3])
    assert everything(optimizer) == everything(other)


@each_backend
@pytest.mark.parametrize(
    "replaced", [lambda p: p.t().contiguous().t(), lambda p: torch.stack([p, p], -1)[..., 0], lambda p: p.clone()]
)
def test_replaced_data_is_stepped_where_it_lies(replaced: Callable[[Tensor], Tensor], backend: str) -> None:
    weight, twin = parameter(6, 6), parameter(6, 6)
    optimizer, untouched = BlockAdam([weight], backend=backend), BlockAdam([twin], backend=backend)
    for each in (optimizer, untouched):
        run(each, [1, 2])
    old = weight.data
    weight.data = replaced(old)
    left = old.clone()
    for each in (optimizer, untouched):
        run(each, [3])
    assert torch.equal(old, left)
    assert param_bits([weight]) == param_bits([twin])


@each_backend
def test_memory_that_is_read_in_another_order_is_stepped_in_that_order(backend: str) -> None:
    weight, twin = parameter(6, 6), parameter(6, 6)
    optimizer, copied = BlockAdam([weight], backend=backend), BlockAdam([twin], backend=backend)
    for each in (optimizer, copied):
        run(each, [1, 2])
    weight.data = weight.data.t()  # at the same address
    twin.data = twin.data.t().contiguous()
    for each in (optimizer, copied):
        run(each, [3])
    assert param_bits([weight]) == param_bits([twin])


# What is refused ---------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize(
    "change",
    [{"block_size": 4}, {"block_size": 1}, {"grouping": "output"}, {"grouping": IndexGroups([list(range(64))])}],
    ids=str,
)
def test_a_cut_that_is_not_the_state_s_is_refused_until_the_state_is_dropped(
    change: dict[str, Any], backend: str
) -> None:
    weight = parameter(8, 8)
    optimizer = BlockAdam([weight], block_size=8, backend=backend)
    run(optimizer, [1, 2])
    optimizer.param_groups[0].update(change)
    give_gradients_([weight], 3)
    refuses(optimizer, "state")
    del optimizer.state[weight]
    twin = parameter(8, 8)
    twin.data.copy_(weight)
    fresh = BlockAdam([twin], **{"block_size": 8, **change}, backend=backend)
    run(optimizer, [3, 4])
    run(fresh, [3, 4])
    assert param_bits([weight]) == param_bits([twin])


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
@pytest.mark.parametrize("shape", [(5000, 4), (5,), (5, 3), (4, 5), ()])
def test_data_of_another_shape_is_refused(shape: tuple[int, ...], backend: str) -> None:
    for steps in ([], [1, 2]):  # with the gradient of the old shape, and with state besides
        weight = parameter(5, 4)
        optimizer = BlockAdam([weight], backend=backend)
        run(optimizer, steps)
        give_gradients_([weight], 3)
        weight.data = torch.zeros(shape)
        refuses(optimizer, "shape")


@each_backend
def test_data_of_another_shape_is_refused_with_its_own_gradient_too(backend: str) -> None:
    weight = parameter(5, 4)
    optimizer = BlockAdam([weight], backend=backend)
    run(optimizer, [1])
    weight.grad = None
    weight.data = torch.zeros(4, 5)
    give_gradients_([weight], 2)
    refuses(optimizer, "shape")


def test_data_that_are_no_longer_real_numbers_are_refused() -> None:
    weight = parameter(5, 4)
    optimizer = BlockAdam([weight])
    run(optimizer, [1])
    weight.grad = None
    weight.data = weight.data.to(torch.complex64)
    weight.grad = torch.zeros_like(weight)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"^BlockAdam: "):
        optimizer.step()


def two_tensor() -> nn.Parameter:
    return nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))


@pytest.mark.parametrize("cls", CLASSES)
def test_tensor_subclasses_are_refused(cls: type[BlockOptimizer]) -> None:
    with pytest.raises(ValueError, match=rf"^{cls.__name__}: `params` must be plain tensors, got TwoTensor"):
        cls([two_tensor()], on_nonfinite="propagate")


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


SPOILED: dict[str, Any] = {
    "another shape": lambda state: state.update(exp_avg=torch.zeros(4)),
    "a transposed shape": lambda state: state.update(second_moment=torch.zeros(6, 4)),
    "a foreign entry": lambda state: state.update(exp_avg_sq=torch.zeros(4, 4)),
    "no tensor": lambda state: state.update(exp_avg=[0.0] * 16),
    "a lost moment": lambda state: state.pop("exp_avg"),
    "a lost second moment": lambda state: state.pop("second_moment"),
    "a lost step": lambda state: state.pop("step"),
    "a sparse moment": lambda state: state.update(exp_avg=torch.zeros(4, 4).to_sparse()),
    "complex": lambda state: state.update(exp_avg=torch.zeros(4, 4, dtype=torch.complex64)),
    "subclass": lambda state: state.update(exp_avg=TwoTensor(torch.ones(4, 4), torch.ones(4, 4))),
    "a negative step": lambda state: state.update(step=torch.tensor(-3)),
    "a step that is no number": lambda state: state.update(step=torch.tensor(torch.nan)),
    "an infinite step": lambda state: state.update(step=torch.tensor(torch.inf)),
    "a step beyond int64": lambda state: state.update(step=torch.tensor(1e19)),
    "half a step": lambda state: state.update(step=torch.tensor(2.5)),
    "an imaginary step": lambda state: state.update(step=torch.tensor(2j)),
}


@each_backend
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
@pytest.mark.parametrize("grouping", ["auto", "joint"])
def test_a_spoiled_state_is_refused(spoil: Callable[[dict[str, Any]], object], grouping: str, backend: str) -> None:
    weight, bias = parameter(4, 4), parameter(3)
    params = [bias, weight] if grouping == "auto" else [weight, bias]  # the first keeps what spanning blocks keep
    optimizer = BlockAdam(params, block_size=3, grouping=grouping, backend=backend)
    run(optimizer, [1, 2])
    spoil(optimizer.state[weight])
    before, kept = param_bits([weight, bias]), dict(optimizer.state[weight])
    counts = [int(optimizer.state[bias]["step"])]
    give_gradients_([weight, bias], 3)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"^BlockAdam: "):
        optimizer.step()
    assert param_bits([weight, bias]) == before
    assert {name: id(value) for name, value in optimizer.state[weight].items()} == {n: id(v) for n, v in kept.items()}
    assert [int(optimizer.state[bias]["step"])] == counts


@pytest.mark.parametrize("step", [torch.nan, 2.5])
def test_the_counter_of_a_parameter_that_shares_blocks_is_looked_at_too(step: float) -> None:
    weight, bias = parameter(4, 4), parameter(3)
    optimizer = BlockAdam([weight, bias], grouping="joint")
    run(optimizer, [1])
    optimizer.state[bias]["step"] = torch.tensor(step)
    give_gradients_([weight, bias], 2)
    refuses(optimizer, f"`step` must be of whole numbers .*, got {step}")


@pytest.mark.parametrize("step", [torch.nan, 2.5])
def test_a_saved_counter_that_is_not_whole_is_refused(step: float) -> None:
    weight = parameter(4, 4)
    optimizer = BlockAdam([weight])
    run(optimizer, [1, 2])
    before, saved = everything(optimizer), optimizer.state_dict()
    saved["state"][0]["step"] = torch.tensor(step)
    with pytest.raises(ValueError, match=r"^BlockAdam.load_state_dict: `step` must be of whole numbers"):
        optimizer.load_state_dict(saved)
    assert everything(optimizer) == before


def test_a_counter_whose_data_were_replaced_is_looked_at_again() -> None:
    weight = parameter(4, 4)
    optimizer = BlockAdam([weight])
    run(optimizer, [1, 2])
    optimizer.state[weight]["step"].data = torch.tensor(2.5)
    give_gradients_([weight], 3)
    refuses(optimizer, "`step` must be a count of steps")


@each_backend
@pytest.mark.parametrize("grouping", ["auto", "joint"])
@pytest.mark.parametrize("whole", [{}, None], ids=["empty", "cleared"])
def test_a_state_that_was_thrown_away_begins_anew(whole: dict[Tensor, Any] | None, grouping: str, backend: str) -> None:
    """Also in a dict that does not make entries by itself, as torch's does."""
    params, twins = [parameter(4, 4), parameter(3)], [parameter(4, 4), parameter(3)]
    optimizer = BlockAdam(params, grouping=grouping, backend=backend)
    run(optimizer, [1, 2])
    with torch.no_grad():
        for param, twin in zip(params, twins, strict=True):
            twin.copy_(param)
    fresh = BlockAdam(twins, grouping=grouping, backend=backend)
    if whole is None:
        optimizer.state.clear()
    else:
        optimizer.state = dict(whole)
    for each in (optimizer, fresh):
        run(each, [3, 4, 5])
    assert everything(optimizer) == everything(fresh)


@each_backend
def test_a_state_in_another_dict_goes_on(backend: str) -> None:
    weight, twin = parameter(4, 4), parameter(4, 4)
    optimizer, untouched = BlockAdam([weight], backend=backend), BlockAdam([twin], backend=backend)
    for each in (optimizer, untouched):
        run(each, [1, 2])
    optimizer.state = {param: dict(state) for param, state in optimizer.state.items()}
    for each in (optimizer, untouched):
        run(each, [3, 4])
    assert everything(optimizer) == everything(untouched)


@pytest.mark.parametrize("grouping", ["auto", "joint"])
@pytest.mark.parametrize("value", [None, [], "state", torch.zeros(3)], ids=repr)
def test_a_state_that_is_no_dict_is_refused(value: object, grouping: str) -> None:
    weight, bias = parameter(4, 4), parameter(3)
    optimizer = BlockAdam([weight, bias], grouping=grouping)
    run(optimizer, [1, 2])
    give_gradients_([weight, bias], 3)
    before = param_bits([weight, bias])
    whole, optimizer.state[bias] = optimizer.state[bias], value  # type: ignore[assignment]
    rule = rf"^BlockAdam: `state` must be a dict of tensors \(for parameter 1 .*, got {type(value).__name__}"
    with pytest.raises(ValueError, match=rule):
        optimizer.step()
    assert param_bits([weight, bias]) == before
    optimizer.state[bias] = whole
    whole_of_all, optimizer.state = optimizer.state, value  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^BlockAdam: `state` must be a dict with that of each parameter"):
        optimizer.step()
    assert param_bits([weight, bias]) == before
    optimizer.state = whole_of_all
    optimizer.step()


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


@pytest.mark.parametrize("estimate", [None, "x", (1.0,), (float("nan"), 1), (1.0, "x")], ids=repr)
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


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", float("nan")),
        ("lr", -1.0),
        ("eps", 0.0),
        ("on_nonfinite", "typo"),
        ("refresh_every", 0),
        ("block_size", 0),
    ],
)
def test_an_option_set_later_is_checked_like_one_given_at_first(
    cls: type[BlockOptimizer], name: str, value: object
) -> None:
    weight = parameter(4, 3)
    optimizer = cls([weight])
    run(optimizer, [1])
    with pytest.raises(ValueError, match=name) as first:
        cls([parameter(4, 3)], **{name: value})
    optimizer.param_groups[0][name] = value
    give_gradients_([weight], 2)
    before = param_bits([weight])
    with pytest.raises(ValueError, match=name) as later:
        optimizer.step()
    assert str(later.value) == str(first.value)
    assert param_bits([weight]) == before


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
    refuses(optimizer, "lr")
    assert optimizer.param_groups[1]["peak_lr"] == 1e-3


def test_a_clip_set_on_a_group_made_with_lr_zero_is_refused() -> None:
    weight = parameter(4, 3)
    optimizer = BlockAdam([weight], lr=0.0)
    run(optimizer, [1])
    optimizer.param_groups[0]["clip"] = SpectrumClip()
    give_gradients_([weight], 2)
    refuses(optimizer, "lr")


# Autograd, options that take effect, memory --------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"grouping": "joint"}, {"clip": CLOSING}, {"grouping": "diagonal"}], ids=str)
def test_autograd_notices_a_step(dtype: torch.dtype, options: dict[str, Any], backend: str) -> None:
    weight = parameter(4, 3, dtype=dtype)
    optimizer = BlockAdam([weight], backend=backend, **options)
    for step in range(1, STEPS_TO_CLOSE + 3):
        old = (weight * weight).sum()
        give_gradients_([weight], step)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()


@each_backend
def test_a_gradient_with_the_negative_bit_descends(backend: str) -> None:
    weight, twin = parameter(4, 3), parameter(4, 3)
    optimizer, plain = BlockAdam([weight], backend=backend), BlockAdam([twin], backend=backend)
    for step in (1, 2):
        give_gradients_([weight, twin], step)
        assert twin.grad is not None
        weight.grad = torch._neg_view(-twin.grad)
        optimizer.step()
        plain.step()
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


@pytest.mark.parametrize("cls", [BlockAdam, BlockRMSprop])
@pytest.mark.parametrize("grouping", ["auto", "joint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weight_decay_of_huge_weights_is_told_like_a_gradient_that_is_not_finite(
    cls: type[BlockOptimizer], grouping: str, dtype: torch.dtype
) -> None:
    huge = 1e25 if dtype == torch.float32 else 1e300
    for policy in ("raise", "skip"):
        weight = parameter(4, 3, dtype=dtype)
        optimizer = cls([weight], weight_decay=0.1, grouping=grouping, on_nonfinite=policy)
        run(optimizer, [1])
        weight.data.fill_(huge)
        weight.grad = torch.ones_like(weight)
        before = everything(optimizer)
        if policy == "raise":
            with pytest.raises(NonFiniteGradientError, match=rf"^{cls.__name__}: "):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.skipped_steps == 1
            optimizer.param_groups[0]["skipped_steps"] = 0
        assert everything(optimizer) == before


@each_backend
def test_a_removed_group_and_its_state_are_let_go(backend: str) -> None:
    kept, removed = parameter(4, 3), parameter(40, 30)
    optimizer = BlockAdam([{"params": [kept]}, {"params": [removed]}], backend=backend)
    run(optimizer, [1, 2])
    watched = [weakref.ref(removed), *(weakref.ref(value) for value in optimizer.state[removed].values())]
    optimizer.state.pop(optimizer.param_groups.pop()["params"][0])
    del removed
    run(optimizer, [3])
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


@each_backend
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "refresh_every": 4}, {"grouping": "joint"}], ids=str)
def test_matrices_are_freed_when_the_clip_has_closed(options: dict[str, Any], backend: str) -> None:
    weight = parameter(40, 30)
    optimizer = BlockAdam([weight], clip=CLOSING, backend=backend, **options)
    run(optimizer, range(1, STEPS_TO_CLOSE))
    matrices = [weakref.ref(v) for name, v in optimizer.state[weight].items() if name not in ("step", "exp_avg", "cut")]
    addresses = {ref().untyped_storage().data_ptr() for ref in matrices}  # type: ignore[union-attr]
    assert matrices
    run(optimizer, [STEPS_TO_CLOSE, STEPS_TO_CLOSE + 1])
    gc.collect()
    assert [ref() for ref in matrices] == [None] * len(matrices)
    tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.layout == torch.strided]
    assert not [t for t in tensors if t.numel() and t.untyped_storage().data_ptr() in addresses and t.numel() > 1200]
    assert {*optimizer.state[weight]} == {"step", "exp_avg"}


@each_backend
def test_the_state_of_an_empty_parameter_follows_a_cast(backend: str) -> None:
    """Else the joint moment is float64 beside float32 numbers: the fast kernel takes one for the other."""
    models = [
        nn.ParameterList([parameter(0, dtype=torch.float64)] * empty + [parameter(2, dtype=torch.float64)])
        for empty in (0, 1)
    ]
    for model in models:
        optimizer = BlockAdam(model.parameters(), grouping="joint", backend=backend)
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.5)
            optimizer.step()
            model.float()
    assert param_bits([models[0][-1]]) == param_bits([models[1][-1]])


def test_a_cast_empty_parameter_does_not_stop_a_step_half_way() -> None:
    weight, empty = parameter(2), parameter(0)
    optimizer = BlockAdam([empty, weight], clip=CLOSING)
    run(optimizer, range(1, STEPS_TO_CLOSE + 2))
    nn.ParameterList([empty, weight]).double()
    run(optimizer, [STEPS_TO_CLOSE + 2])


@pytest.mark.parametrize("name", ["eps", "lr", "skipped_steps", "estimate"])
def test_an_option_that_is_gone_is_told(name: str) -> None:
    weight = parameter(3)
    optimizer = BlockAdam([weight])
    del optimizer.param_groups[0][name]
    give_gradients_([weight], 1)
    refuses(optimizer, name)


@pytest.mark.parametrize(("name", "value"), [("refresh_every", 1.0), ("block_size", 10.0), ("amsgrad", 0)])
def test_an_option_that_equals_a_valid_one_is_checked_too(name: str, value: object) -> None:
    """Else a checkpoint is written that cannot be loaded."""
    weight = parameter(3)
    optimizer = BlockAdam([weight])
    run(optimizer, [1])
    optimizer.param_groups[0][name] = value
    give_gradients_([weight], 2)
    refuses(optimizer, name)


def test_a_state_with_other_strides_can_be_saved_before_the_next_step() -> None:
    weight = parameter(7)
    optimizer = BlockAdam([weight], block_size=2, refresh_every=2)
    run(optimizer, [1])
    before = everything(optimizer)
    basis = optimizer.state[weight]["basis"]
    optimizer.state[weight]["basis"] = basis.repeat_interleave(2)[::2]
    assert everything(optimizer) == before


def test_data_put_back_after_a_refusal_can_be_saved() -> None:
    weight = parameter(7)
    first, optimizer = BlockAdam([weight], block_size=2), BlockAdam([weight])
    run(first, [1])
    optimizer.load_state_dict(first.state_dict())
    before = everything(first)
    old, weight.data = weight.data, torch.ones(5, 5)
    with pytest.raises(ValueError, match="shape"):
        optimizer.step()
    weight.grad, weight.data = None, old
    optimizer.step()
    assert everything(optimizer) == before


def test_data_of_another_shape_are_refused_without_a_first_moment_too() -> None:
    weight = parameter(4, 4)
    optimizer = BlockRMSprop([weight], grouping="diagonal")
    run(optimizer, [1])
    weight.grad = None
    weight.data = torch.ones(2, 8)
    give_gradients_([weight], 2)
    refuses(optimizer, "shape")


def test_a_state_on_another_kind_of_device_is_told() -> None:
    weight = parameter(4, 4)
    optimizer = BlockAdam([weight])
    run(optimizer, [1])
    optimizer.state[weight]["exp_avg"] = torch.zeros(4, 4, device="meta")
    give_gradients_([weight], 2)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"^BlockAdam: "):
        optimizer.step()
