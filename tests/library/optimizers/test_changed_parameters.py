"""What a script does to the data of parameters and to gradients: the step goes on rightly, or is refused untouched."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from blockadapt import BlockAdam, BlockAdamW, BlockRMSprop, NonFiniteGradientError, SpectrumClip
from blockadapt.optimizers import BlockOptimizer
from support.cases import each_backend
from support.changes import CLOSED, parameter, refuses, trained
from support.contract_cases import CLASSES, CLOSING, STEPS_TO_CLOSE, everything, give_gradients_, param_bits, run

# What goes on --------------------------------------------------------------------------------------------------------


def statistics(optimizer: BlockOptimizer) -> list[Tensor]:
    kept = [state.items() for state in optimizer.state.values()]
    return [value for items in kept for name, value in items if name not in ("step", "cut")]


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


@each_backend
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"refresh_every": 4}, {"grouping": "joint"}], ids=str)
@pytest.mark.parametrize(
    ("first", "then"), [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_state_follows_its_parameter_to_another_precision(
    first: torch.dtype, then: torch.dtype, options: dict[str, Any], backend: str
) -> None:
    """As if every number had been of that precision: the next step equals that of an optimizer which loaded them so."""
    param, optimizer = trained(backend=backend, **options)
    model = nn.ParameterList([param])
    model.to(first)
    optimizer.step()
    model.to(then)
    other = nn.Parameter(param.detach().clone())
    loaded = BlockAdam([other], backend=backend)
    loaded.load_state_dict(optimizer.state_dict())
    other.grad = param.grad.clone()
    optimizer.step()
    loaded.step()
    assert everything(optimizer) == everything(loaded)
    statistics = {entry.dtype for name, entry in optimizer.state[param].items() if name not in ("step", "cut")}
    assert statistics == {torch.float64 if then == torch.float64 else torch.float32}


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
@pytest.mark.parametrize("options", [{}, {"clip": CLOSED}, {"grouping": "joint"}], ids=["open", "closed", "spanning"])
def test_a_gradient_whose_sign_waits_is_read_as_it_is_meant(options: dict[str, Any], backend: str) -> None:
    weight, twin = parameter(4, 3), parameter(4, 3)
    optimizer, plain = (BlockAdam([param], backend=backend, **options) for param in (weight, twin))
    for step in (1, 2):
        give_gradients_([weight, twin], step)
        assert twin.grad is not None
        weight.grad = torch._neg_view(-twin.grad)
        optimizer.step()
        plain.step()
    assert param_bits([weight]) == param_bits([twin])


@each_backend
def test_a_gradient_of_zeros_that_nobody_wrote_is_zero(backend: str) -> None:
    (param, optimizer), (twin, plain) = (trained(backend=backend) for _ in range(2))
    param.grad, twin.grad = torch._efficientzerotensor(param.shape), torch.zeros_like(twin)
    optimizer.step()
    plain.step()
    assert param.equal(twin)


@each_backend
def test_a_parameter_that_rests_stays_after_closing_where_no_first_moment_is_kept(backend: str) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = BlockRMSprop(params, grouping="joint", clip=CLOSED, backend=backend)
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert params[1].equal(torch.ones(3))
    assert not params[0].equal(params[1])


@each_backend
def test_the_first_moment_of_a_parameter_that_rests_fades_after_closing_too(backend: str) -> None:
    """It shares its blocks with one that has a gradient, and counts as one whose gradient is zero."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = BlockAdam(params, grouping="joint", clip=CLOSED, backend=backend)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    params[1].grad = None
    optimizer.step()
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], torch.full((3,), 0.1) * 0.9)


# What is refused -----------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("clip", [None, CLOSED], ids=["open", "closed"])
@pytest.mark.parametrize("shape", [(5000, 4), (5,), (5, 3), (4, 5), ()])
def test_data_of_another_shape_are_refused_in_words_that_name_it(
    shape: tuple[int, ...], clip: SpectrumClip | None, backend: str
) -> None:
    """They come with the gradient of the old shape, and with one of their own where there is state of the old shape."""
    for steps in ([], [1, 2]):
        weight = parameter(5, 4)
        optimizer = BlockAdam([weight], clip=clip, backend=backend)
        run(optimizer, steps)
        give_gradients_([weight], 3)
        weight.data = torch.zeros(shape)
        refuses(optimizer, rf"`grad` must be a plain tensor of shape {re.escape(str(shape))}")
    weight.grad = torch.ones(shape)
    refuses(optimizer, "`(exp_avg` must be a plain tensor of shape|grouping` must be what cut)")


def test_data_of_another_shape_are_refused_without_a_first_moment_too() -> None:
    weight = parameter(4, 4)
    optimizer = BlockRMSprop([weight], grouping="diagonal")
    run(optimizer, [1])
    weight.grad = None
    weight.data = torch.ones(2, 8)
    give_gradients_([weight], 2)
    refuses(optimizer, r"`grouping` must be what cut the blocks of .* \(shape \(2, 8\)\)")


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


def test_a_subclass_that_slips_in_later_is_refused() -> None:
    param, optimizer = trained((4,))
    param.grad = TwoTensor(torch.ones(4), torch.ones(4))
    refuses(optimizer, "`grad` must be a plain tensor")
    param.grad = torch.ones(4)
    optimizer.state[param]["exp_avg"] = TwoTensor(torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match=r"^BlockAdam: `exp_avg` must be a plain tensor .*, got TwoTensor"):
        optimizer.step()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        (torch.zeros(1).expand(10), "share memory"),
        (torch.zeros(12).as_strided((5, 2), (2, 2)), "share memory"),
        (torch.zeros(13, dtype=torch.bfloat16).as_strided((5, 2), (2, 4)), "share memory"),
        (torch._neg_view(torch.zeros(10)), "wait for a sign"),
    ],
    ids=["expanded", "a window that slides", "staged", "negated"],
)
@pytest.mark.parametrize("options", [{}, {"clip": CLOSED}, {"grouping": "joint"}], ids=["open", "closed", "spanning"])
@each_backend
def test_memory_that_is_not_the_parameters_own_is_refused(
    param: Tensor, value: str, options: dict[str, Any], backend: str
) -> None:
    parameter = nn.Parameter(param)
    parameter.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=f"^BlockAdam: `params` must be .* that own their numbers .*{value}"):
        BlockAdam([parameter], backend=backend, **options).step()


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "all of it": lambda t: t,
    "transposed": lambda t: t.t(),
    "the end": lambda t: t.view(-1)[30:],
}


@each_backend
@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED.keys())
@pytest.mark.parametrize("options", [{}, {"clip": CLOSED}, {"grouping": "joint"}], ids=["open", "closed", "spanning"])
@pytest.mark.parametrize("groups", [1, 2])
def test_two_parameters_in_one_place_are_refused_at_first_and_later(
    groups: int, options: dict[str, Any], share: Callable[[Tensor], Tensor], backend: str
) -> None:
    """Both would be read before one is written: a step of one of them would be lost."""
    weight = parameter(6, 6)
    tied = nn.Parameter(share(weight.data))
    own = tied.detach().clone()
    params = [("weight", weight), ("tied", tied)]
    listed: Any = params if groups == 1 else [{"params": [pair]} for pair in params]
    optimizer = BlockAdam(listed, backend=backend, **options)
    give_gradients_([weight, tied], 1)
    message = "`params` must be apart in memory from all else that a step writes, got 'weight' and 'tied' in one place"
    refuses(optimizer, message)
    place, tied.data = tied.data, own
    run(optimizer, [1, 2])
    tied.data = place
    refuses(optimizer, message)
    tied.data = own
    run(optimizer, [3])


def test_parameters_in_one_place_may_take_turns() -> None:
    weight = parameter(6, 6)
    tied = nn.Parameter(weight.data)
    optimizer = BlockAdam([weight, tied])
    for step in (1, 2):
        for param, other in ((weight, tied), (tied, weight)):
            give_gradients_([param], step)
            other.grad = None
            optimizer.step()
    give_gradients_([weight, tied], 3)
    refuses(optimizer, "`params` must be apart in memory")


@each_backend
def test_parameters_between_each_other_in_one_storage_step_as_if_they_had_their_own(backend: str) -> None:
    matrix = parameter(6, 6).detach()
    views = [nn.Parameter(part) for part in matrix.split([2, 4], dim=1)]
    twins = [nn.Parameter(view.detach().clone()) for view in views]
    for params in (views, twins):
        run(BlockAdam(params, block_size=3, backend=backend), [1, 2, 3])
    assert param_bits(views) == param_bits(twins)


def test_an_inference_tensor_is_refused() -> None:
    with torch.inference_mode():
        param = nn.Parameter(torch.zeros(4), requires_grad=False)
    param.grad = torch.ones(4)
    with pytest.raises(ValueError, match="got an inference tensor"):
        BlockAdam([param]).step()


@pytest.mark.parametrize("cls", [BlockAdam, BlockRMSprop])
@pytest.mark.parametrize("grouping", ["auto", "joint"])
@pytest.mark.parametrize(
    ("dtype", "huge"), [(torch.float32, 1e25), (torch.float32, 1e38), (torch.float64, 1e300)], ids=str
)
@pytest.mark.parametrize("steps", [[], [1]], ids=["first step", "second step"])
def test_weight_decay_of_huge_weights_is_told_like_a_gradient_that_is_not_finite(
    cls: type[BlockOptimizer], grouping: str, dtype: torch.dtype, huge: float, steps: list[int]
) -> None:
    weight = parameter(4, 3, dtype=dtype)
    optimizer = cls([weight], weight_decay=0.1, grouping=grouping)
    run(optimizer, steps)
    weight.data.fill_(huge)
    weight.grad = torch.ones_like(weight)
    before = everything(optimizer)
    refuses(optimizer, "the gradient with its weight decay of .* has 12 of 12", NonFiniteGradientError)
    optimizer.param_groups[0]["on_nonfinite"] = "skip"
    optimizer.step()
    assert optimizer.skipped_steps == 1
    optimizer.param_groups[0].update(on_nonfinite="raise", skipped_steps=0)
    assert everything(optimizer) == before


def test_a_huge_weight_decay_is_told_like_a_gradient_that_is_not_finite() -> None:
    weight = parameter(4, 3)
    weight.grad = torch.ones_like(weight)
    refuses(
        BlockAdam([weight], weight_decay=1e300),
        "the gradient with its weight decay of .* has 12 of 12",
        NonFiniteGradientError,
    )


def test_decoupled_weight_decay_of_a_huge_parameter_is_no_gradient() -> None:
    param = nn.Parameter(torch.full((4,), 1e25))
    param.grad = torch.ones(4)
    BlockAdamW([param], lr=0.5, weight_decay=1.0).step()
    assert param.eq(0.5e25).all()


def test_sparse_gradients_raise_as_torchs_optimizers_do() -> None:
    param, optimizer = trained((4,))
    param.grad = torch.ones(4).to_sparse()
    refuses(optimizer, "`grad` must be dense", RuntimeError)
