"""A plan says before training what the first step makes true."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from blockadapt import BlockAdam, BlockRMSprop, IndexGroups, Plan, param_groups, plan
from blockadapt.optimizers import BlockOptimizer
from blockadapt.planning import block_flops
from support.contract_cases import CASES, CLASSES, Net, OptimizerCase, everything, run, scattered_groups, twins
from support.processes import together
from support.ranks_errands import shared_state_bytes


def state_bytes(optimizer: BlockOptimizer) -> int:
    return sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())


def block_count(optimizer: BlockOptimizer) -> int:
    """Blocks by their second moments, where all blocks of a parameter have one size."""
    return sum(len(state["second_moment"]) for state in optimizer.state.values() if "second_moment" in state)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "blocks of 3": {"block_size": 3},
    "amsgrad": {"amsgrad": True},
    "refresh": {"refresh_every": 4},
    "amsgrad and refresh": {"amsgrad": True, "refresh_every": 2, "block_size": 4},
    "input": {"grouping": "input"},
    "output": {"grouping": "output", "block_size": 3},
    "chunk": {"grouping": "chunk"},
    "tensor": {"grouping": "tensor"},
    "joint": {"grouping": "joint"},
    "joint with all": {"grouping": "joint", "amsgrad": True, "refresh_every": 2},
    "diagonal": {"grouping": "diagonal"},
    "explicit": {"grouping": scattered_groups(Net.COORDINATES)},
    "explicit with all": {"grouping": scattered_groups(Net.COORDINATES), "amsgrad": True, "refresh_every": 2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_planned_state_is_the_state_after_a_step(options: dict[str, Any], dtype: torch.dtype) -> None:
    (model,) = twins(count=1, dtype=dtype)
    planned = plan(model, **options)
    optimizer = BlockAdam(model.parameters(), **options)
    run(optimizer, [1])
    assert planned.state_bytes == state_bytes(optimizer)
    assert planned.num_parameters == Net.COORDINATES
    if "explicit" not in str(planned):
        assert planned.num_blocks == block_count(optimizer)


@pytest.mark.parametrize("case", [c for c in CASES if "closing" not in c.id], ids=lambda case: case.id)
def test_the_plan_of_an_optimizer_is_its_own(case: OptimizerCase) -> None:
    (model,) = twins(count=1)
    optimizer = case.build(model.parameters())
    planned = plan(optimizer)
    run(optimizer, [1])
    assert planned.state_bytes == state_bytes(optimizer)
    assert plan(optimizer) == planned


def test_the_rows_of_a_plan_add_up() -> None:
    planned = plan(twins(count=1)[0], block_size=4)
    assert planned.num_blocks == sum(row.num_blocks for row in planned.rows) == sum(planned.sizes.values())
    assert planned.state_bytes == sum(row.state_bytes for row in planned.rows)
    assert planned.flops == sum(row.flops for row in planned.rows)
    assert planned.flops == sum(count * block_flops(n) for n, count in planned.sizes.items())


def test_a_row_tells_name_shape_grouping_and_blocks() -> None:
    rows = {row.name: row for row in plan(twins(count=1)[0], block_size=4).rows}
    told = {name: (row.shape, row.grouping, row.sizes) for name, row in rows.items()}
    assert told == {
        "scale": ((), "diagonal", {1: 1}),
        "conv.weight": ((2, 1, 3, 3), "filter", {9: 2}),
        "conv.bias": ((2,), "chunk", {2: 1}),
        "linear.weight": ((5, 8), "input", {4: 16}),
        "linear.bias": ((5,), "chunk", {4: 2}),
        "norm.weight": ((5,), "chunk", {4: 2}),
        "norm.bias": ((5,), "chunk", {4: 2}),
    }


def test_blocks_that_span_parameters_are_one_row() -> None:
    (model,) = twins(count=1)
    (row,) = plan(model, grouping="joint").rows
    assert (row.name, row.shape, row.grouping, row.sizes) == ("scale … norm.bias", (76,), "joint", {76: 1})
    (row,) = plan(model.linear, grouping=IndexGroups([range(10), range(10, 43), [44, 43]])).rows
    assert (row.name, row.grouping, row.sizes) == ("weight … bias", "explicit", {2: 1, 10: 1, 33: 1})


GOLDEN = """\
parameter  shape    grouping  blocks                  state    flops a step
───────────────────────────────────────────────────────────────────────────
0.weight   6×1×5×5  filter    6 × 25                  8.4 kB   190.7 k
0.bias     6        chunk     1 × 6                   156 B    1.9 k
2.weight   10×96    input     96 × 10                 25.0 kB  418.8 k
2.bias     10       chunk     1 × 10                  308 B    4.4 k
───────────────────────────────────────────────────────────────────────────
total      1,126              1 × 6, 97 × 10, 6 × 25  33.9 kB  615.8 k"""


def test_the_table_of_a_small_network() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 5), nn.Flatten(), nn.Linear(96, 10))
    assert str(plan(model)) == GOLDEN


def test_a_plan_takes_what_an_optimizer_takes() -> None:
    model = nn.Linear(4, 3)
    rows = [(row.shape, row.sizes) for row in plan(model).rows]
    for params in (model.parameters(), list(model.parameters()), model.named_parameters(), param_groups(model)):
        assert [(row.shape, row.sizes) for row in plan(params).rows] == rows
    assert [row.name for row in plan(model).rows] == ["weight", "bias"]
    assert [row.name for row in plan(model.parameters()).rows] == ["0.0", "0.1"]


def test_a_plan_respects_the_options_of_each_group() -> None:
    a, b = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    groups = [{"params": a.parameters(), "grouping": "tensor"}, {"params": b.parameters(), "amsgrad": True}]
    assert [row.sizes for row in plan(groups, block_size=2).rows] == [{12: 1}, {2: 8}]


def test_a_plan_leaves_model_groups_and_optimizer_as_they_were() -> None:
    model = nn.Linear(4, 3)
    groups = param_groups(model, lr=0.5)
    before = copy.deepcopy([{**group, "params": len(group["params"])} for group in groups])
    plan(groups, block_size=2)
    assert [{**group, "params": len(group["params"])} for group in groups] == before
    optimizer = BlockRMSprop(groups, block_size=3)
    assert {group["block_size"] for group in optimizer.param_groups} == {3}
    state = everything(optimizer)
    plan(optimizer)
    assert everything(optimizer) == state
    assert all(param.grad is None for param in model.parameters())


def test_a_frozen_parameter_needs_no_state() -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))
    model[0].requires_grad_(False)
    planned = plan(model)
    optimizer = BlockAdam(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    assert planned.state_bytes == state_bytes(optimizer)


@pytest.mark.parametrize("cls", CLASSES)
def test_only_classes_with_a_first_moment_plan_for_one(cls: type[BlockOptimizer]) -> None:
    """A matrix [4, 3] in blocks of 4: three triangles of 10, a step counter, the
    five numbers of its cut, and 12 numbers of m where there is one.
    """
    planned = plan(cls([nn.Parameter(torch.ones(4, 3))]))
    assert planned.state_bytes == 4 * 30 + 8 * (1 + 5) + (4 * 12 if cls.averages_gradient else 0)


def test_flops_of_blocks_for_lapack_grow_as_the_cube_and_hold_the_eigenvectors() -> None:
    """Householder's reduction takes 4n³/3, the tridiagonal eigenvectors and their way back about three times that."""
    assert block_flops(200) / block_flops(100) == pytest.approx(8, rel=0.03)
    assert block_flops(1000) == pytest.approx(4 * 4e9 / 3, rel=0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_dominates_is_told_with_the_way_out(tied: bool) -> None:
    body = nn.Sequential(nn.Embedding(2000, 16), nn.Linear(16, 16), nn.Linear(16, 2000))
    if tied:
        body[2].weight = body[0].weight
    planned = plan(param_groups(body))
    (note,) = planned.notes
    assert note.startswith("0.weight: " if tied else "0.weight and 2.weight: ")
    assert note.endswith('For a vocabulary, param_groups(model, embeddings="diagonal") makes both small.')
    assert str(planned).endswith(note)
    cheap = plan(param_groups(body, embeddings="diagonal"))
    assert cheap.notes == []
    assert cheap.state_bytes < planned.state_bytes / 2


def test_weights_whose_blocks_mix_inputs_are_told_with_the_way_out() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(nn.Linear(12, 12), conv1d(36, 12), conv1d(12, 36), nn.ConvTranspose2d(12, 12, 1))
    planned = plan(model)
    assert planned.notes == [
        "1.weight and 2 more: blocks mix input neurons or words. param_groups(model) keeps each block within one."
    ]
    assert str(planned).endswith(planned.notes[0])
    assert plan(model[1]).notes[0].startswith("weight: blocks mix")
    assert plan(param_groups(model)).notes == plan(BlockAdam(param_groups(model))).notes == []
    assert plan(model, grouping="output").notes == plan(model, grouping="chunk").notes == []
    assert plan(nn.Sequential(nn.Linear(12, 12), nn.ConvTranspose2d(12, 12, 3))).notes == []


class Experts(nn.Module):
    """Two weights stacked by expert, and one vector for each place, which is no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 6, 4))
        self.down = nn.Parameter(torch.zeros(2, 4, 6))
        self.places = nn.Parameter(torch.zeros(1, 5, 4))


def test_stacked_experts_are_told_to_be_cut_along_their_last_axis() -> None:
    planned = plan(nn.Sequential(Experts(), nn.Conv1d(4, 4, 3), weight_norm(nn.Conv1d(4, 4, 3))))
    assert planned.notes == [
        "0.up and 1 more: blocks run along the last axis. In experts stored as [experts, in, out] each lies within one "
        "input neuron, as in a Linear; in [experts, out, in] within one output neuron."
    ]
    assert [row.name for row in planned.rows if row.is_stack] == ["0.up", "0.down"]
    assert plan(Experts(), grouping="diagonal").notes == []


def test_an_embedding_and_its_head_whose_blocks_mix_words_are_told() -> None:
    model = nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 12), nn.Linear(12, 30))
    assert [row.name for row in plan(model).rows if row.mixes] == ["0.weight", "2.weight"]
    assert plan(model).notes[0].startswith("0.weight and 1 more: blocks mix input neurons or words.")
    assert plan(param_groups(model)).notes == plan(model, grouping="diagonal").notes == []


def test_blocks_of_one_weight_mix_nothing() -> None:
    assert plan(nn.Embedding(30, 12), block_size=2).notes != []
    assert plan(nn.Embedding(30, 12), block_size=1).notes == plan(nn.Embedding(1, 12)).notes == []


def test_a_model_is_asked_for_its_heads_only_where_a_note_depends_on_it() -> None:
    class Head(nn.Linear):
        def get_output_embeddings(self) -> None:
            raise RuntimeError("asked")

    for options in ({"grouping": "output"}, {"block_size": 1}):
        assert plan(Head(4, 3), **options).notes == []
    with pytest.raises(RuntimeError, match="asked"):
        plan(Head(4, 3))


def test_wide_layers_are_no_vocabulary() -> None:
    assert plan(nn.Linear(784, 300)).notes == []


def test_a_plan_of_nothing_is_empty() -> None:
    empty = Plan([], 0)
    assert (empty.num_blocks, empty.state_bytes, empty.flops, empty.sizes) == (0, 0, 0, {})
    assert "total" in str(empty)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [OPTIONS["default"], OPTIONS["amsgrad and refresh"], OPTIONS["joint"]])
def test_the_planned_state_of_each_rank_is_what_it_holds_after_a_step(options: dict[str, Any], ranks: int) -> None:
    (model,) = twins(count=1)
    planned = plan(model, ranks=ranks, **options)
    assert [*planned.rank_bytes] == together(ranks, shared_state_bytes, options)
    assert plan(model, **options).rank_bytes == (planned.state_bytes,)
    assert "largest rank" in str(planned)


def test_ranks_of_many_small_groups_differ_by_less_than_one_grain() -> None:
    """Of 30 rows in blocks of 10 one rank of two has twice the other's: 24 times it must not be the same one."""
    params = [nn.Parameter(torch.empty(shape)) for shape in [(30, 40), (30,)] * 12]
    first, second = plan([{"params": [param]} for param in params], ranks=2).rank_bytes
    assert abs(first - second) <= 4 * 40 * (55 + 10)


def test_groups_of_one_parameter_are_shared_out_together_and_planned_so() -> None:
    (model,) = twins(count=1)
    groups = [{"params": [param]} for param in model.parameters()]
    held = together(2, shared_state_bytes, OPTIONS["default"], True)
    assert [*plan(groups, ranks=2, **OPTIONS["default"]).rank_bytes] == held
    assert [*plan(model, ranks=2, **OPTIONS["default"]).rank_bytes] == held


def test_a_plan_of_what_is_no_model_is_refused_in_one_sentence() -> None:
    rule = "a model, parameters, param groups or an optimizer of blockadapt"
    for wrong in (None, BlockAdam, "model", torch.optim.SGD(nn.Linear(2, 2).parameters())):
        kind = type(wrong).__name__
        with pytest.raises(ValueError, match=rf"^plan: `model_or_params` must be {rule}, got {kind}\.$"):
            plan(wrong)  # type: ignore[arg-type]


def test_a_plan_for_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^plan: `ranks` must be an integer >= 1, got 0\.$"):
        plan(nn.Linear(2, 2), ranks=0)
