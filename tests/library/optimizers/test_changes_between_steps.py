"""What users do to parameters, gradients, state and options between two steps: it works, or is refused untouched."""

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
from support.contract_cases import everything

BACKENDS = pytest.mark.parametrize("backend", ["numba", "eigh"])
CLOSED = SpectrumClip(gamma=1e6)


def trained(shape: tuple[int, ...] = (12, 7), steps: int = 3, **options: Any) -> tuple[nn.Parameter, BlockAdam]:
    """A parameter after some steps, with a gradient for the next one."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = BlockAdam([param], **{"block_size": 5, "lr": 0.01, **options})
    for _ in range(steps):
        param.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    param.grad = torch.randn(shape, generator=generator)
    return param, optimizer


def refused(optimizer: BlockOptimizer, message: str, error: type[Exception] = ValueError) -> None:
    """The next step raises this one sentence and changes nothing."""
    params = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    state = copy.deepcopy({id(param): entries for param, entries in optimizer.state.items()})
    with pytest.raises(error, match=message):
        optimizer.step()
    now = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(map(torch.equal, now, params))
    assert str({id(param): entries for param, entries in optimizer.state.items()}) == str(state)


# What works --------------------------------------------------------------------------------------------------------


@BACKENDS
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


@BACKENDS
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


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"clip": CLOSED}, {"grouping": "joint"}], ids=["open", "closed", "spanning"])
def test_a_gradient_whose_sign_waits_is_read_as_it_is_meant(options: dict[str, Any], backend: str) -> None:
    (param, optimizer), (twin, plain) = (trained(backend=backend, **options) for _ in range(2))
    param.grad = torch._neg_view(-param.grad)
    optimizer.step()
    plain.step()
    assert param.equal(twin)


@BACKENDS
def test_a_basis_that_was_not_kept_so_far_is_found_anew_at_once(backend: str) -> None:
    """Step 8 with `refresh_every=10` would use the basis of step 1, which nobody kept."""
    (kept, optimizer), (always, other) = (trained(steps=7, backend=backend) for _ in range(2))
    optimizer.param_groups[0]["refresh_every"] = 10
    for each in (optimizer, other):
        each.step()
    torch.testing.assert_close(kept, always, rtol=0, atol=1e-6)


@BACKENDS
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


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"refresh_every": 2}, {"amsgrad": True}], ids=str)
def test_closing_frees_all_that_blocks_keep(options: dict[str, Any], backend: str) -> None:
    param, optimizer = trained(backend=backend, **options)
    kept = [
        weakref.ref(optimizer.state[param][name]) for name in optimizer.state[param] if name not in ("step", "exp_avg")
    ]
    optimizer.param_groups[0]["clip"] = CLOSED
    optimizer.step()
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)
    assert sorted(optimizer.state[param]) == ["exp_avg", "step"]


# What is refused ---------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 6},
        {"block_size": 4},
        {"grouping": "output"},
        {"grouping": "diagonal"},
        {"grouping": "joint"},
        {"grouping": IndexGroups([range(i, i + 7) for i in range(0, 84, 7)])},
    ],
    ids=str,
)
def test_another_cut_is_refused(change: dict[str, Any], backend: str) -> None:
    _, optimizer = trained(backend=backend)
    optimizer.param_groups[0].update(change)
    refused(optimizer, "^BlockAdam: `grouping` must be what cut the blocks of .* when their state was made")


def test_explicit_blocks_in_another_order_are_another_cut() -> None:
    _, optimizer = trained((4,), grouping=IndexGroups([[0, 1], [2, 3]]))
    optimizer.param_groups[0]["grouping"] = IndexGroups([[2, 3], [0, 1]])
    refused(optimizer, "`grouping` must be what cut the blocks")


@BACKENDS
@pytest.mark.parametrize("clip", [None, CLOSED], ids=["open", "closed"])
def test_data_of_another_shape_is_refused(clip: SpectrumClip | None, backend: str) -> None:
    param, optimizer = trained(backend=backend, clip=clip)
    param.data = torch.randn(5000, 7)
    refused(optimizer, r"^BlockAdam: `grad` must be a plain tensor of shape \(5000, 7\)")
    param.grad = torch.randn(5000, 7)
    refused(
        optimizer, r"^BlockAdam: `(exp_avg` must be a plain tensor of shape \(5000, 7\)|grouping` must be what cut)"
    )


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
    refused(optimizer, f"^BlockAdam: {message}")


@pytest.mark.parametrize("name", ["step", "exp_avg"])
def test_state_without_what_every_step_needs_is_refused(name: str) -> None:
    param, optimizer = trained()
    del optimizer.state[param][name]
    refused(optimizer, f"^BlockAdam: `state` must be whole, .*, got one without '{name}'")


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
        ({"weight_decay": torch.zeros(2)}, "`weight_decay` must be a finite number >= 0"),
        ({"refresh_every": 0}, "`refresh_every` must be an integer >= 1, got 0"),
        ({"maximize": "yes"}, "`maximize` must be True or False, got 'yes'"),
        ({"clip": 0.1}, "`clip` must be a SpectrumClip or None, got 0.1"),
    ],
    ids=str,
)
def test_an_option_set_later_is_checked_as_one_given_at_first(change: dict[str, Any], message: str) -> None:
    _, optimizer = trained()
    optimizer.param_groups[0].update(change)
    refused(optimizer, f"^BlockAdam: {message}")


def test_a_pair_of_betas_changed_in_place_is_noticed() -> None:
    _, optimizer = trained(betas=[0.9, 0.99])
    optimizer.param_groups[0]["betas"][0] = 2.0
    refused(optimizer, r"`betas\[0\]` must be in \[0, 1\), got 2.0")


def test_a_clip_on_a_group_that_began_with_no_lr_is_refused() -> None:
    _, optimizer = trained(lr=0.0)
    optimizer.param_groups[0].update(lr=0.1, clip=SpectrumClip())
    refused(optimizer, "`lr` must be > 0 where `clip` has a `final_lr`")


def test_a_subclass_that_slips_in_later_is_refused() -> None:
    param, optimizer = trained((4,))
    param.grad = TwoTensor(torch.ones(4), torch.ones(4))
    refused(optimizer, "^BlockAdam: `grad` must be a plain tensor")
    param.grad = torch.ones(4)
    optimizer.state[param]["exp_avg"] = TwoTensor(torch.ones(4), torch.ones(4))
    with pytest.raises(ValueError, match=r"^BlockAdam: `exp_avg` must be a plain tensor .*, got TwoTensor"):
        optimizer.step()


@pytest.mark.parametrize(
    ("param", "value"),
    [(torch.zeros(1).expand(10), "share memory"), (torch._neg_view(torch.zeros(10)), "wait for a sign")],
    ids=["expanded", "negated"],
)
def test_memory_that_is_not_the_parameters_own_is_refused(param: Tensor, value: str) -> None:
    parameter = nn.Parameter(param)
    parameter.grad = torch.ones(10)
    with pytest.raises(ValueError, match=f"^BlockAdam: `params` must be .* that own their numbers .*{value}"):
        BlockAdam([parameter]).step()


def test_an_inference_tensor_is_refused() -> None:
    with torch.inference_mode():
        param = nn.Parameter(torch.zeros(4), requires_grad=False)
    param.grad = torch.ones(4)
    with pytest.raises(ValueError, match="got an inference tensor"):
        BlockAdam([param]).step()


@pytest.mark.parametrize("size", [1e25, 1e38])
def test_weight_decay_of_a_huge_parameter_is_a_gradient_that_is_not_finite(size: float) -> None:
    param = nn.Parameter(torch.full((4,), size))
    param.grad = torch.ones(4)
    optimizer = BlockRMSprop([param], weight_decay=0.1)
    refused(optimizer, "^BlockRMSprop: the gradient with its weight decay of .* has 4 of 4", NonFiniteGradientError)
    optimizer.param_groups[0]["on_nonfinite"] = "skip"
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert param.eq(size).all()
    assert not optimizer.state


def test_sparse_gradients_raise_as_torchs_optimizers_do() -> None:
    param, optimizer = trained((4,))
    param.grad = torch.ones(4).to_sparse()
    refused(optimizer, "^BlockAdam: `grad` must be dense", RuntimeError)
