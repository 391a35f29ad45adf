"""What is refused, and the exact sentence that says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blockadapt import (
    BlockAdaFom,
    BlockAdagrad,
    BlockAdam,
    BlockAdamW,
    BlockRMSprop,
    IndexGroups,
    SpectrumClip,
    param_groups,
    plan,
)
from blockadapt.kernels import BACKENDS
from blockadapt.optimizers import BlockOptimizer
from support.contract_cases import CLASSES, OPEN, everything, run

FORM = re.compile(r"^[A-Za-z_.]+: `[^`]+` must be .+, got .+\.$")

NAN, INF = float("nan"), float("inf")
GROUPINGS = "one of 'auto', 'input', 'output', 'filter', 'chunk', 'tensor', 'joint', 'diagonal'"
POLICIES = "one of 'raise', 'skip', 'propagate'"
BACKEND_NAMES = "one of " + ", ".join(map(repr, BACKENDS)) + ", or a Kernel"
AT_LEAST_0, ABOVE_0 = "a finite number >= 0", "a finite number > 0"
BETA = "in [0, 1)"


ONCE = "blocks that hold each of the group's {} coordinates once"


@dataclass(frozen=True)
class Bad:
    """A value that an argument must not have, and what the message says after the owner."""

    argument: str
    value: Any
    rule: str
    got: str
    named: str = ""
    """The argument as the message names it, where that is more precise."""

    def message(self, owner: str) -> str:
        return f"{owner}: `{self.named or self.argument}` must be {self.rule}, got {self.got}."


OPTIONS: list[Bad] = [
    Bad("lr", -0.1, AT_LEAST_0, "-0.1"),
    Bad("lr", NAN, AT_LEAST_0, "nan"),
    Bad("lr", INF, AT_LEAST_0, "inf"),
    Bad("lr", 10**309, AT_LEAST_0, str(10**309)),
    Bad("lr", "1e-3", AT_LEAST_0, "'1e-3'"),
    Bad("lr", None, AT_LEAST_0, "None"),
    Bad("lr", True, AT_LEAST_0, "True"),
    Bad("lr", torch.tensor(-1.0), AT_LEAST_0, "-1.0"),
    Bad("lr", torch.tensor([0.1, 0.2]), "a number or a one-element tensor", "(2,)"),
    Bad("lr", torch.tensor(0.1, device="meta"), "on the host or with its group's parameters", "one on meta"),
    Bad("eps", 0.0, ABOVE_0, "0.0"),
    Bad("eps", -1e-8, ABOVE_0, "-1e-08"),
    Bad("eps", INF, ABOVE_0, "inf"),
    Bad("eps", NAN, ABOVE_0, "nan"),
    Bad("eps", "small", ABOVE_0, "'small'"),
    Bad("weight_decay", -1.0, AT_LEAST_0, "-1.0"),
    Bad("weight_decay", NAN, AT_LEAST_0, "nan"),
    Bad("weight_decay", INF, AT_LEAST_0, "inf"),
    Bad("weight_decay", None, AT_LEAST_0, "None"),
    Bad("grouping", "rows", GROUPINGS, "'rows'"),
    Bad("grouping", "Input", GROUPINGS, "'Input'"),
    Bad("grouping", None, GROUPINGS, "None"),
    Bad("grouping", [[0, 1, 2]], GROUPINGS, "[[0, 1, 2]]"),
    Bad("block_size", 0, "an integer in [1, 4096]", "0"),
    Bad("block_size", -3, "an integer in [1, 4096]", "-3"),
    Bad("block_size", 4097, "an integer in [1, 4096]", "4097"),
    Bad("block_size", 10.0, "an integer in [1, 4096]", "10.0"),
    Bad("block_size", True, "an integer in [1, 4096]", "True"),
    Bad("block_size", None, "an integer in [1, 4096]", "None"),
    Bad("clip", 0.1, "a SpectrumClip or None", "0.1"),
    Bad("clip", True, "a SpectrumClip or None", "True"),
    Bad("clip", (0.1, 1e-3), "a SpectrumClip or None", "(0.1, 0.001)"),
    Bad("clip", {"final_lr": 0.1}, "a SpectrumClip or None", "{'final_lr': 0.1}"),
    Bad("clip", SpectrumClip, "a SpectrumClip or None", "<class 'blockadapt.spectrum.SpectrumClip'>"),
    Bad("refresh_every", 0, "an integer >= 1", "0"),
    Bad("refresh_every", 1.5, "an integer >= 1", "1.5"),
    Bad("refresh_every", None, "an integer >= 1", "None"),
    Bad("refresh_every", True, "an integer >= 1", "True"),
    Bad("bias_correction", 1, "True or False", "1"),
    Bad("bias_correction", None, "True or False", "None"),
    Bad("maximize", "no", "True or False", "'no'"),
    Bad("maximize", 0, "True or False", "0"),
    Bad("on_nonfinite", "ignore", POLICIES, "'ignore'"),
    Bad("on_nonfinite", None, POLICIES, "None"),
    Bad("on_nonfinite", True, POLICIES, "True"),
]

BETAS: list[Bad] = [
    Bad("betas", 0.9, "a pair of numbers", "0.9"),
    Bad("betas", (0.9,), "a pair of numbers", "(0.9,)"),
    Bad("betas", (0.9, 0.99, 0.999), "a pair of numbers", "(0.9, 0.99, 0.999)"),
    Bad("betas", "09", "a pair of numbers", "'09'"),
    Bad("betas", (1.0, 0.999), BETA, "1.0", named="betas[0]"),
    Bad("betas", (-0.1, 0.999), BETA, "-0.1", named="betas[0]"),
    Bad("betas", (None, 0.999), BETA, "None", named="betas[0]"),
    Bad("betas", (0.9, 1.5), BETA, "1.5", named="betas[1]"),
    Bad("betas", (0.9, 1.0), BETA, "1.0", named="betas[1]"),
    Bad("betas", (0.9, NAN), BETA, "nan", named="betas[1]"),
    Bad("amsgrad", 1, "True or False", "1"),
    Bad("amsgrad", None, "True or False", "None"),
]
DECAY: list[Bad] = [
    Bad("beta1_decay", 0.0, "in (0, 1]", "0.0"),
    Bad("beta1_decay", 1.01, "in (0, 1]", "1.01"),
    Bad("beta1_decay", NAN, "in (0, 1]", "nan"),
    Bad("beta1_decay", None, "in (0, 1]", "None"),
]
RATE: list[Bad] = [
    Bad("rate", 1.0, BETA, "1.0"),
    Bad("rate", -0.5, BETA, "-0.5"),
    Bad("rate", NAN, BETA, "nan"),
    Bad("rate", (0.9, 0.99), BETA, "(0.9, 0.99)"),
]


def _renamed(name: str) -> list[Bad]:
    return [Bad(name, bad.value, bad.rule, bad.got) for bad in RATE]


OWN_OPTIONS: dict[type[BlockOptimizer], list[Bad]] = {
    BlockAdam: BETAS + DECAY,
    BlockAdamW: BETAS + DECAY,
    BlockRMSprop: _renamed("alpha"),
    BlockAdagrad: [],
    BlockAdaFom: _renamed("beta1") + DECAY,
}

CONSTRUCTOR_ONLY: list[Bad] = [
    Bad("backend", "cuda", BACKEND_NAMES, "'cuda'"),
    Bad("backend", None, BACKEND_NAMES, "None"),
    Bad("process_group", "world", "a process group that this process is in, or None", "'world'"),
]


def _for_all_classes(extra: list[Bad]) -> list[Any]:
    return [
        pytest.param(cls, bad, id=f"{cls.__name__}-{bad.argument}={bad.got}")
        for cls in CLASSES
        for bad in [*OPTIONS, *OWN_OPTIONS[cls], *extra]
    ]


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


@pytest.mark.parametrize(("cls", "bad"), _for_all_classes(CONSTRUCTOR_ONLY))
def test_a_constructor_refuses_a_bad_argument(cls: type[BlockOptimizer], bad: Bad) -> None:
    with pytest.raises(ValueError, match=exactly(bad.message(cls.__name__))):
        cls([parameter(3)], **{bad.argument: bad.value})
    assert FORM.match(bad.message(cls.__name__))


@pytest.mark.parametrize(("cls", "bad"), _for_all_classes([]))
def test_a_late_group_with_a_bad_option_is_refused_and_the_optimizer_is_as_before(
    cls: type[BlockOptimizer], bad: Bad
) -> None:
    optimizer = cls([parameter(3)], lr=0.1, clip=OPEN)
    run(optimizer, [1])
    before, defaults = everything(optimizer), dict(optimizer.defaults)
    with pytest.raises(ValueError, match=exactly(bad.message(cls.__name__))):
        optimizer.add_param_group({"params": [parameter(3)], bad.argument: bad.value})
    assert everything(optimizer) == before
    assert optimizer.defaults == defaults
    run(optimizer, [2])


@pytest.mark.parametrize("cls", CLASSES)
def test_a_refused_group_can_be_mended_and_added(cls: type[BlockOptimizer]) -> None:
    optimizer, late = cls([parameter(3)]), parameter(3)
    with pytest.raises(ValueError, match="`eps` must be"):
        optimizer.add_param_group({"params": [late], "eps": -1.0})
    optimizer.add_param_group({"params": [late], "eps": 1.0})
    assert [group["eps"] for group in optimizer.param_groups] == [1e-4, 1.0]


# Parameters and groupings that do not fit together -----------------------------------------------------------------

NEEDS_KERNEL = "a grouping that fits its parameters ('filter' needs a convolution weight of 3 or more dimensions)"
SMALLER = "a grouping into blocks of at most 4096 coordinates"
ONE_KIND = "on one device and of one precision where blocks span them"


@dataclass(frozen=True)
class Misfit:
    """A call that is refused, with the whole message."""

    call: Callable[[], object]
    message: str
    id: str
    error: type[Exception] = ValueError


def _misfit(id: str, message: str, *params: Any, **options: Any) -> Misfit:
    return Misfit(lambda: BlockAdam(list(params), **options), message, id)


MISFITS: list[Misfit] = [
    _misfit(
        "filter on a matrix",
        f"BlockAdam: `grouping` must be {NEEDS_KERNEL}, got 'filter' for a parameter of shape (4, 3).",
        parameter(2, 2, 3, 3),
        parameter(4, 3),
        grouping="filter",
    ),
    _misfit(
        "tensor too large",
        f"BlockAdam: `grouping` must be {SMALLER}, got 'tensor' with a block of 5000, "
        "whose second moment alone needs 0.05 GB.",
        parameter(3),
        parameter(50, 100),
        grouping="tensor",
    ),
    _misfit(
        "joint too large",
        f"BlockAdam: `grouping` must be {SMALLER}, got 'joint' with a block of 100000, "
        "whose second moment alone needs 20 GB.",
        parameter(300, 300),
        parameter(10000),
        grouping="joint",
    ),
    _misfit(
        "explicit block too large",
        f"BlockAdam: `grouping` must be {SMALLER}, got IndexGroups with a block of 4097, "
        "whose second moment alone needs 0.0336 GB.",
        parameter(4100),
        grouping=IndexGroups([range(4097), range(4097, 4100)]),
    ),
    _misfit(
        "float64 counts double",
        f"BlockAdam: `grouping` must be {SMALLER}, got 'tensor' with a block of 5000, "
        "whose second moment alone needs 0.1 GB.",
        parameter(5000, dtype=torch.float64),
        grouping="tensor",
    ),
    _misfit(
        "overlap",
        f"BlockAdam: `grouping` must be {ONCE.format(6)}, got coordinate 4 more than once.",
        parameter(3),
        parameter(3),
        grouping=IndexGroups([[0, 1, 4], [2, 3, 5], [4]]),
    ),
    _misfit(
        "overlap within a block",
        f"BlockAdam: `grouping` must be {ONCE.format(3)}, got coordinate 1 more than once.",
        parameter(3),
        grouping=IndexGroups([[0, 1, 1, 2]]),
    ),
    _misfit(
        "missing coordinate",
        f"BlockAdam: `grouping` must be {ONCE.format(4)}, got coordinate 2 in none.",
        parameter(4),
        grouping=IndexGroups([[0, 1], [3]]),
    ),
    _misfit(
        "no blocks",
        f"BlockAdam: `grouping` must be {ONCE.format(4)}, got coordinate 0 in none.",
        parameter(4),
        grouping=IndexGroups([]),
    ),
    _misfit(
        "out of range",
        "BlockAdam: `grouping` must be blocks within the group's 4 coordinates, got coordinate 7.",
        parameter(4),
        grouping=IndexGroups([[0, 1], [2, 3], [7]]),
    ),
    _misfit(
        "joint over two precisions",
        f"BlockAdam: `params` must be {ONE_KIND}, got torch.float32 on cpu and torch.float64 on cpu.",
        parameter(3),
        parameter(3, dtype=torch.float64),
        grouping="joint",
    ),
    _misfit(
        "complex parameter",
        "BlockAdam: `params` must be real floating-point tensors of 16 bits or more, got torch.complex64.",
        parameter(3),
        parameter(3, dtype=torch.complex64),
    ),
    _misfit(
        "clip from lr 0",
        "BlockAdam: `lr` must be > 0 where `clip` has a `final_lr`, because its bounds follow lr / peak_lr, got 0.0.",
        parameter(3),
        lr=0.0,
        clip=OPEN,
    ),
    *(
        Misfit(
            lambda argument=argument, value=value: SpectrumClip(**{argument: value}),  # type: ignore[misc]
            f"SpectrumClip: `{argument}` must be a finite number > 0{or_auto}, got {value!r}.",
            f"{argument} {value!r}",
        )
        for argument, or_auto in {"final_lr": " or 'auto'", "gamma": ""}.items()
        for value in (0.0, -1, INF, 10**309, NAN, None, "a", True)
    ),
    Misfit(
        lambda: BlockAdam(nn.LazyLinear(3).parameters()),
        "BlockAdam: `params` must be initialized, because blocks are cut from their shapes: let a lazy module see a "
        "batch first, got UninitializedParameter.",
        "lazy module",
    ),
    Misfit(
        lambda: IndexGroups([[0], [1, -2]]),
        "IndexGroups: `groups[1]` must be a non-empty list of integers in [0, 2**63), got [1, -2].",
        "negative coordinate",
    ),
    Misfit(
        lambda: IndexGroups([[0], [2**63]]),
        "IndexGroups: `groups[1]` must be a non-empty list of integers in [0, 2**63), got [9223372036854775808].",
        "coordinate beyond int64",
    ),
    Misfit(
        lambda: IndexGroups([[0.0, 1.0]]),  # type: ignore[list-item]
        "IndexGroups: `groups[0]` must be a non-empty list of integers in [0, 2**63), got [0.0, 1.0].",
        "coordinate of float",
    ),
    Misfit(
        lambda: IndexGroups([[True, False]]),
        "IndexGroups: `groups[0]` must be a non-empty list of integers in [0, 2**63), got [True, False].",
        "coordinate of bool",
    ),
    Misfit(
        lambda: IndexGroups(["01"]),  # type: ignore[list-item]
        "IndexGroups: `groups[0]` must be a non-empty list of integers in [0, 2**63), got '01'.",
        "coordinates as text",
    ),
    Misfit(
        lambda: IndexGroups([[0, 1], []]),
        "IndexGroups: `groups[1]` must be a non-empty list of integers in [0, 2**63), got [].",
        "empty block",
    ),
    Misfit(
        lambda: IndexGroups([0, 1]),  # type: ignore[list-item]
        "IndexGroups: `groups[0]` must be a non-empty list of integers in [0, 2**63), got 0.",
        "coordinates without blocks",
    ),
    Misfit(
        lambda: param_groups([parameter(3)]),  # type: ignore[arg-type]
        "param_groups: `model` must be a torch.nn.Module, got 'list'.",
        "param_groups of a list",
    ),
    Misfit(
        lambda: param_groups(nn.Linear(2, 2), decay_norms_and_biases=0),  # type: ignore[arg-type]
        "param_groups: `decay_norms_and_biases` must be True or False, got 0.",
        "param_groups flag",
    ),
    Misfit(
        lambda: param_groups(nn.Linear(2, 2), grouping="input"),
        "param_groups: `grouping` must be left out, because each kind of layer has its own, got 'input'.",
        "param_groups with a grouping",
    ),
    Misfit(
        lambda: plan(nn.Linear(2, 2), block_size=0),
        "BlockAdam: `block_size` must be an integer in [1, 4096], got 0.",
        "plan with a bad option",
    ),
    Misfit(
        lambda: plan(nn.Linear(100, 100), grouping="tensor"),
        f"BlockAdam: `grouping` must be {SMALLER}, got 'tensor' with a block of 10000, "
        "whose second moment alone needs 0.2 GB.",
        "plan that does not fit",
    ),
]


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit.id)
def test_what_does_not_fit_is_refused_with_the_reason(misfit: Misfit) -> None:
    with pytest.raises(misfit.error, match=exactly(misfit.message)):
        misfit.call()
    assert FORM.match(misfit.message)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    param = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with pytest.raises(ValueError, match=exactly("BlockAdam: `params` must be dense tensors, got a nested tensor.")):
        BlockAdam([param])


@pytest.mark.parametrize("cls", CLASSES)
def test_a_sparse_gradient_is_named_once(cls: type[BlockOptimizer]) -> None:
    words = nn.Embedding(4, 3, sparse=True)
    optimizer = cls([parameter(2), *words.parameters()])
    words(torch.tensor([1])).sum().backward()
    message = f"{cls.__name__}: `grad` must be dense (for parameter 1 of group 0 (shape (4, 3))), got torch.sparse_coo."
    with pytest.raises(RuntimeError, match=exactly(message)):
        optimizer.step()


# Unknown names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_python_itself_refuses_an_unknown_keyword(cls: type[BlockOptimizer]) -> None:
    with pytest.raises(TypeError, match=r"__init__\(\) got an unexpected keyword argument 'wieght_decay'"):
        cls([parameter(3)], wieght_decay=0.1)
    with pytest.raises(TypeError, match=r"takes from 2 to \d positional arguments"):
        cls([parameter(3)], *[0.1] * 12)


@pytest.mark.parametrize(
    ("cls", "option"),
    [
        (BlockAdagrad, "betas"),
        (BlockAdagrad, "beta1"),
        (BlockAdagrad, "alpha"),
        (BlockAdagrad, "amsgrad"),
        (BlockAdagrad, "beta1_decay"),
        (BlockRMSprop, "betas"),
        (BlockRMSprop, "amsgrad"),
        (BlockRMSprop, "beta1_decay"),
        (BlockAdam, "alpha"),
        (BlockAdamW, "alpha"),
        (BlockAdaFom, "alpha"),
        (BlockAdaFom, "amsgrad"),
        *((cls, option) for cls in CLASSES for option in ("backend", "process_group")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_option_of_a_sibling_is_refused_in_a_group(cls: type[BlockOptimizer], option: str) -> None:
    message = f"{cls.__name__}: `{option}` is not an option of a param group."
    optimizer = cls([parameter(3)])
    before = everything(optimizer)
    with pytest.raises(TypeError, match=exactly(message)):
        optimizer.add_param_group({"params": [parameter(3)], option: None})
    assert everything(optimizer) == before


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("wieght_decay", "weight_decay"),
        ("weight_decy", "weight_decay"),
        ("blocksize", "block_size"),
        ("block_sizes", "block_size"),
        ("groupings", "grouping"),
        ("clips", "clip"),
        ("maximise", "maximize"),
        ("refresh_evry", "refresh_every"),
        ("on_non_finite", "on_nonfinite"),
        ("lrs", "lr"),
        ("epsi", "eps"),
        ("bias_corection", "bias_correction"),
    ],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_slip_in_an_options_name_is_refused_with_the_right_one(
    cls: type[BlockOptimizer], typo: str, meant: str
) -> None:
    message = f"{cls.__name__}: `{typo}` is not an option of a param group, did you mean `{meant}`?"
    with pytest.raises(TypeError, match=exactly(message)):
        cls([{"params": [parameter(3)], typo: None}])


@pytest.mark.parametrize("first", range(4))
def test_of_several_slips_the_first_is_named(first: int) -> None:
    slips = ["blocksize", "wieght_decay", "maximise", "clips"]
    slips = slips[first:] + slips[:first]
    with pytest.raises(TypeError, match=f"BlockAdam: `{slips[0]}` is not an option"):
        BlockAdam([{"params": [parameter(3)], **dict.fromkeys(slips)}])


def test_plan_takes_no_options_beside_an_optimizer_and_no_unknown_ones() -> None:
    with pytest.raises(TypeError, match=exactly("plan: an optimizer has its own options; leave out eps, lr.")):
        plan(BlockAdam([parameter(3)]), lr=0.1, eps=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocksize'"):
        plan(nn.Linear(2, 2), blocksize=3)


# What is not refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lr", [0, 1, 1e-3, np.float64(0.1), np.float32(0.1), np.int64(1), torch.tensor(0.1), torch.tensor([1])], ids=repr
)
def test_every_kind_of_number_is_a_number(lr: Any) -> None:
    assert BlockAdam([parameter(3)], lr=lr).param_groups[0]["lr"] == lr


def test_an_lr_with_a_gradient_of_its_own_is_a_number() -> None:
    lr = torch.tensor(0.125, requires_grad=True)
    params = [parameter(3), parameter(3)]
    for param, rate in zip(params, (lr, 0.125), strict=True):
        run(BlockAdam([param], lr=rate), [1, 2])
    assert params[0].equal(params[1])


@pytest.mark.parametrize(
    "groups",
    [
        np.array_split(np.arange(7), 3),
        torch.arange(7).split(3),
        [range(3), range(3, 7)],
        [(0, 1, 2), (3, 4, 5, 6)],
        (group for group in [[0, 1, 2], [3, 4, 5, 6]]),
    ],
    ids=["NumPy", "torch", "ranges", "tuples", "generator"],
)
def test_index_groups_take_any_sequences_of_integers(groups: Any) -> None:
    made = IndexGroups(groups)
    assert sorted(coordinate for group in made.groups for coordinate in group) == list(range(7))
    assert all(type(coordinate) is int for group in made.groups for coordinate in group)
    run(BlockAdam([parameter(7)], grouping=made), [1])


def test_index_groups_are_equal_by_value_and_say_how_large_they_are() -> None:
    assert IndexGroups([[0, 1], [2]]) == IndexGroups([(0, 1), range(2, 3)])
    assert IndexGroups([[0, 1], [2]]) != IndexGroups([[0], [1, 2]])
    assert repr(IndexGroups([[0, 1], [2]])) == "IndexGroups(2 blocks over 3 coordinates)"
    assert IndexGroups([[2], [0, 1], [3]]).sizes == {1: 2, 2: 1}
