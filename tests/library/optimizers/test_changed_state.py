"""What a script does to the state: it counts by its numbers however it lies, begins anew, or is refused untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from blockadapt import BlockAdam
from support.cases import each_backend
from support.changes import parameter, refuses, trained
from support.contract_cases import everything, give_gradients_, param_bits, run

# What goes on --------------------------------------------------------------------------------------------------------


REPLACEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda t: t.double(),
    "columns first": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
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
    state[name] = replace(state[name])
    for each in (optimizer, untouched):
        run(each, [7, 8])
    assert everything(optimizer) == everything(untouched)


@each_backend
@pytest.mark.parametrize("name", ["exp_avg", "second_moment", "basis", "eigenvalues", "largest"])
@pytest.mark.parametrize(
    "dressed",
    [
        lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: torch._neg_view(-t),
        lambda t: t.double(),
        lambda t: t.clone().requires_grad_(),
    ],
    ids=["transposed", "strided", "negated", "double", "with a gradient"],
)
def test_a_state_tensor_counts_by_its_numbers_however_it_lies(
    name: str, dressed: Callable[[Tensor], Tensor], backend: str
) -> None:
    options = {"amsgrad": True, "refresh_every": 20, "grouping": "chunk", "backend": backend}
    (param, optimizer), (twin, plain) = trained(**options), trained(**options)
    optimizer.state[param][name] = dressed(optimizer.state[param][name])
    for _ in range(2):
        optimizer.step()
        plain.step()
        assert param.equal(twin)
        assert everything(optimizer) == everything(plain)


def in_inference_mode(t: Tensor) -> Tensor:
    """The same numbers, in a tensor that torch lets nobody write outside of inference mode."""
    with torch.inference_mode():
        return t.clone()


@each_backend
@pytest.mark.parametrize("name", ["step", "exp_avg", "second_moment", "basis"])
def test_a_state_tensor_made_in_inference_mode_counts_by_its_numbers(name: str, backend: str) -> None:
    (param, optimizer), (_, plain) = (trained(refresh_every=20, backend=backend) for _ in range(2))
    optimizer.state[param][name] = in_inference_mode(optimizer.state[param][name])
    for _ in range(2):
        optimizer.step()
        plain.step()
        assert everything(optimizer) == everything(plain)


@each_backend
@pytest.mark.parametrize("grouping", ["auto", "joint"])
def test_steps_in_and_out_of_inference_mode_are_the_same(grouping: str, backend: str) -> None:
    options = {"grouping": grouping, "refresh_every": 20, "backend": backend}
    optimizer, plain = BlockAdam([parameter(4, 4)], **options), BlockAdam([parameter(4, 4)], **options)
    for step in range(1, 6):
        with torch.inference_mode(step % 2 == 1):
            run(optimizer, [step])
        run(plain, [step])
        assert everything(optimizer) == everything(plain)


COUNTERS = {
    "uint8": torch.tensor(254, dtype=torch.uint8),
    "float32": torch.tensor(254.0),
    "float64, a view": torch.tensor([1.0, 254.0], dtype=torch.float64)[1],
    "with a gradient": torch.tensor(254.0, requires_grad=True),
}


@each_backend
@pytest.mark.parametrize("grouping", ["chunk", "joint"])
@pytest.mark.parametrize("counter", COUNTERS.values(), ids=COUNTERS.keys())
def test_a_counter_of_another_type_put_under_the_same_tensor_goes_on_counting(
    counter: Tensor, grouping: str, backend: str
) -> None:
    (param, optimizer), (twin, plain) = (trained(grouping=grouping, backend=backend) for _ in range(2))
    optimizer.state[param]["step"].data = counter.detach().clone()
    optimizer.state[param]["step"].requires_grad_(counter.requires_grad)
    plain.state[twin]["step"].fill_(254)
    for _ in range(3):
        optimizer.step()
        plain.step()
        assert everything(optimizer) == everything(plain)
        assert optimizer.state[param]["step"].dtype == torch.int64


@each_backend
@pytest.mark.parametrize("grouping", ["chunk", "joint"])
def test_a_step_after_the_last_that_int64_counts_is_refused(grouping: str, backend: str) -> None:
    param, optimizer = trained(grouping=grouping, backend=backend)
    optimizer.state[param]["step"].fill_(2**63 - 2)
    optimizer.step()
    refuses(optimizer, r"`step` must be a count of steps, below 2\*\*63 - 1 .*, got tensor\(9223372036854775807\)")


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


def test_a_state_with_other_strides_can_be_saved_before_the_next_step() -> None:
    weight = parameter(7)
    optimizer = BlockAdam([weight], block_size=2, refresh_every=2)
    run(optimizer, [1])
    before = everything(optimizer)
    basis = optimizer.state[weight]["basis"]
    optimizer.state[weight]["basis"] = basis.repeat_interleave(2)[::2]
    assert everything(optimizer) == before


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


# What is refused -----------------------------------------------------------------------------------------------------


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
    "a step beyond int64, without a sign": lambda state: state.update(step=torch.tensor(2**63, dtype=torch.uint64)),
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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("exp_avg", torch.zeros(7, 12), r"`exp_avg` must be a plain tensor of shape \(12, 7\)"),
        ("exp_avg", None, r"`exp_avg` must be a plain tensor of shape \(12, 7\) .*, got NoneType"),
        ("second_moment", torch.zeros(20, 15), r"`second_moment` must be a plain tensor of shape \(21, 15\)"),
        ("second_moment", torch.zeros(21, 15, dtype=torch.complex64), "`second_moment` must be of real numbers"),
        ("second_moment", torch.zeros(21, 15).to_sparse(), "`second_moment` must be"),
        ("cut", torch.zeros(3), r"`cut` must be a plain tensor of shape \(5,\)"),
        ("step", torch.tensor(-3), "`step` must be a count of steps"),
        ("step", "three", "`step` must be a count of steps"),
        ("mine", torch.zeros(3), "`state` must be a state with nothing but .*, got 'mine'"),
    ],
)
def test_state_that_does_not_fit_is_refused(name: str, value: Any, message: str) -> None:
    param, optimizer = trained()
    optimizer.state[param][name] = value
    refuses(optimizer, message)


@pytest.mark.parametrize("name", ["step", "exp_avg"])
def test_state_without_what_every_step_needs_is_refused(name: str) -> None:
    param, optimizer = trained()
    del optimizer.state[param][name]
    refuses(optimizer, f"`state` must be whole, .*, got one without '{name}'")


@each_backend
@pytest.mark.parametrize("name", ["step", "exp_avg", "second_moment", "largest", "basis", "eigenvalues"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_tensor_that_two_parameters_share_is_refused(dtype: torch.dtype, name: str, backend: str) -> None:
    """As if each had its own, both would be written: which of the two, or the sum, nobody could say."""
    params = [parameter(6, 6, dtype=dtype), parameter(6, 6, dtype=dtype)]
    optimizer = BlockAdam(params, amsgrad=True, refresh_every=20, backend=backend)
    run(optimizer, range(1, 9))
    first, second = (optimizer.state[param] for param in params)
    own, second[name] = second[name], first[name]
    give_gradients_(params, 9)
    rule = "`state` must be apart in memory from all else that a step writes"
    refuses(optimizer, rf"{rule}, got {name} of parameter 0 .* and {name} of parameter 1 .* in one place")
    second[name] = own
    optimizer.step()


@each_backend
def test_a_first_moment_that_is_the_parameter_is_refused(backend: str) -> None:
    param, optimizer = trained(backend=backend)
    optimizer.state[param]["exp_avg"] = param.data
    refuses(optimizer, "`state` must be apart in memory .*, got parameter 0 .* and exp_avg of parameter 0 .*")


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


def test_a_state_on_another_kind_of_device_is_told() -> None:
    weight = parameter(4, 4)
    optimizer = BlockAdam([weight])
    run(optimizer, [1])
    optimizer.state[weight]["exp_avg"] = torch.zeros(4, 4, device="meta")
    give_gradients_([weight], 2)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"^BlockAdam: "):
        optimizer.step()


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
