"""Every coordinate lies in exactly one block, and blocks lie where the grouping says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from blockadapt import BlockAdam, IndexGroups, plan
from blockadapt.partition import MAX_FILTER, NAMED_GROUPINGS, Partition, index_groups, joint, partition, resolve

PER_PARAMETER = [name for name in NAMED_GROUPINGS if name != "joint"]

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=5).map(tuple)
matrices = st.tuples(st.integers(1, 25), st.integers(1, 9))
kernels = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 11), st.integers(1, 11))
block_sizes = st.integers(1, 130)
groupings = st.sampled_from(PER_PARAMETER)
quietly = settings(derandomize=True, deadline=None, max_examples=80)


def cut(shape: tuple[int, ...], grouping: str, block_size: int) -> Partition:
    return partition(shape, grouping if grouping != "filter" or len(shape) != 2 else "output", block_size)


def coordinates(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def blocks_in_order(part: Partition, shape: tuple[int, ...]) -> list[list[int]]:
    """The coordinates of each block, by the position of its state."""
    views = part.views(coordinates(shape))
    assert views is not None
    places = part.state_views(torch.arange(part.num_blocks).reshape(-1, 1))
    found: dict[int, list[int]] = {}
    for view, place in zip(views, places, strict=True):
        assert view.shape[:2] == place.shape[:2]
        for block, position in zip(view.reshape(-1, view.shape[-1]).tolist(), place.flatten().tolist(), strict=True):
            assert position not in found
            found[position] = block
    assert sorted(found) == list(range(part.num_blocks))
    return [found[position] for position in range(part.num_blocks)]


# Any grouping ------------------------------------------------------------------------------------------------------


@quietly
@given(shape=shapes | matrices | kernels, grouping=groupings, block_size=block_sizes)
@example(shape=(2, 3, 9, 9), grouping="filter", block_size=100)
def test_every_coordinate_lies_in_exactly_one_block(shape: tuple[int, ...], grouping: str, block_size: int) -> None:
    blocks = blocks_in_order(cut(shape, grouping, block_size), shape)
    assert sorted(coordinate for block in blocks for coordinate in block) == list(range(math.prod(shape)))
    assert all(blocks)


@quietly
@given(shape=shapes | matrices | kernels, grouping=groupings, block_size=block_sizes)
@example(shape=(2, 3, 9, 9), grouping="filter", block_size=100)
def test_no_block_is_stored_larger_than_it_can_be(shape: tuple[int, ...], grouping: str, block_size: int) -> None:
    part = cut(shape, grouping, block_size)
    blocks = blocks_in_order(part, shape)
    assert max(map(len, blocks)) == part.n
    assert part.sizes == {part.n: len(blocks)}
    if grouping not in ("tensor", "filter", "auto"):
        assert part.n <= block_size


@quietly
@given(shape=shapes | matrices | kernels, grouping=groupings, block_size=block_sizes)
@example(shape=(2, 3, 9, 9), grouping="filter", block_size=100)
def test_views_write_through_to_the_parameter(shape: tuple[int, ...], grouping: str, block_size: int) -> None:
    tensor = torch.zeros(shape)
    views = cut(shape, grouping, block_size).views(tensor)
    assert views is not None
    for view in views:
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        view += 1
    assert torch.equal(tensor, torch.ones(shape))


@quietly
@given(shape=shapes | matrices | kernels, grouping=groupings, block_size=block_sizes)
@example(shape=(2, 3, 9, 9), grouping="filter", block_size=100)
def test_only_the_last_run_of_a_line_is_short(shape: tuple[int, ...], grouping: str, block_size: int) -> None:
    part = cut(shape, grouping, block_size)
    views = part.views(torch.zeros(shape))
    assert views is not None
    lengths = [view.shape[-1] for view in views if view.numel()]
    full, short = divmod(part.extent, part.n)
    assert lengths == [part.n] * (full > 0) + [short] * (short > 0)


# What each grouping means ------------------------------------------------------------------------------------------


def runs(length: int, block_size: int) -> list[range]:
    return [range(start, min(start + block_size, length)) for start in range(0, length, block_size)]


@quietly
@given(shape=matrices, block_size=block_sizes)
def test_an_input_block_is_a_run_of_outputs_of_one_input_neuron(shape: tuple[int, int], block_size: int) -> None:
    outputs, inputs = shape
    expected = [[o * inputs + i for o in run] for run in runs(outputs, block_size) for i in range(inputs)]
    assert blocks_in_order(partition(shape, "input", block_size), shape) == expected


@quietly
@given(shape=matrices, block_size=block_sizes)
def test_an_output_block_is_a_run_of_inputs_of_one_output_neuron(shape: tuple[int, int], block_size: int) -> None:
    outputs, inputs = shape
    expected = [[o * inputs + i for i in run] for o in range(outputs) for run in runs(inputs, block_size)]
    assert blocks_in_order(partition(shape, "output", block_size), shape) == expected


@quietly
@given(shape=kernels, block_size=block_sizes)
@example(shape=(2, 3, 9, 9), block_size=100)
def test_a_filter_block_is_one_spatial_kernel_or_a_run_of_a_large_one(
    shape: tuple[int, int, int, int], block_size: int
) -> None:
    kernel = shape[2] * shape[3]
    cuts = runs(kernel, block_size) if kernel > MAX_FILTER else [range(kernel)]
    expected = [[line * kernel + c for c in run] for line in range(shape[0] * shape[1]) for run in cuts]
    assert blocks_in_order(partition(shape, "filter", block_size), shape) == expected


@quietly
@given(shape=shapes, block_size=block_sizes)
def test_a_chunk_is_a_run_of_consecutive_coordinates(shape: tuple[int, ...], block_size: int) -> None:
    expected = [list(run) for run in runs(math.prod(shape), block_size)]
    assert blocks_in_order(partition(shape, "chunk", block_size), shape) == expected


@quietly
@given(shape=shapes, block_size=block_sizes)
def test_tensor_is_one_block_and_diagonal_one_a_coordinate(shape: tuple[int, ...], block_size: int) -> None:
    every = list(range(math.prod(shape)))
    assert blocks_in_order(partition(shape, "tensor", block_size), shape) == [every]
    assert blocks_in_order(partition(shape, "diagonal", block_size), shape) == [[c] for c in every]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), "diagonal"),
        ((5,), "chunk"),
        ((4, 3), "input"),
        ((4, 3, 1, 1), "input"),
        ((4, 3, 1), "input"),
        ((4, 3, 5), "filter"),
        ((4, 3, 5, 5), "filter"),
        ((4, 3, 1, 5), "filter"),
        ((4, 3, 2, 2, 2), "filter"),
    ],
)
def test_auto_follows_the_shape(shape: tuple[int, ...], expected: str) -> None:
    assert resolve("auto", shape) == expected


@pytest.mark.parametrize("grouping", ["input", "output", "filter"])
def test_vectors_are_chunked_and_scalars_diagonal_whatever_is_asked(grouping: str) -> None:
    assert resolve(grouping, (7,)) == "chunk"
    assert resolve(grouping, ()) == "diagonal"


def test_a_spatial_kernel_is_cut_beyond_64_coordinates() -> None:
    assert partition((3, 2, 8, 8), "filter", 10).sizes == {64: 6}
    assert partition((3, 2, 5, 13), "filter", 10).sizes == {10: 42}


def test_joint_is_one_block_over_the_group() -> None:
    assert joint(12).groups == [list(range(12))]
    assert index_groups("joint", [torch.zeros(2, 4), torch.zeros(4)]) == joint(12)


# Sharding ----------------------------------------------------------------------------------------------------------


def slices(shape: tuple[int, ...], part: Partition) -> tuple[int, ...]:
    """Positions along dim 0 at which no block is cut."""
    row = math.prod(shape[1:])
    if part.grouping == "input":
        return (*range(0, shape[0], part.n), shape[0])
    if part.grouping in ("chunk", "tensor"):
        return (*(r for r in range(shape[0]) if r * row % part.n == 0), shape[0])
    return tuple(range(shape[0] + 1))


@quietly
@given(
    shape=matrices | kernels | st.tuples(st.integers(1, 40)),
    grouping=groupings,
    block_size=st.integers(1, 12),
    pick=st.data(),
)
def test_a_slice_of_the_first_axis_is_a_slice_of_the_blocks(
    shape: tuple[int, ...], grouping: str, block_size: int, pick: Any
) -> None:
    """What FSDP2 cuts is the first axis: a shard's blocks are then the whole model's, in the same order."""
    part = cut(shape, grouping, block_size)
    ends = slices(shape, part)
    start, stop = sorted(pick.draw(st.lists(st.sampled_from(ends), min_size=2, max_size=2, unique=True)))
    row = math.prod(shape[1:])
    shard = (stop - start, *shape[1:])
    own = blocks_in_order(cut(shard, grouping, block_size), shard)
    inside = range(start * row, stop * row)
    positions = [p for p, block in enumerate(blocks_in_order(part, shape)) if block[0] in inside]
    assert positions == list(range(positions[0], positions[0] + len(own)))
    whole = blocks_in_order(part, shape)
    assert [[c + start * row for c in block] for block in own] == [whole[p] for p in positions]


# Memory layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (2, 5, 5, 5), (3, 1, 8, 8)], ids=str)
@pytest.mark.parametrize("grouping", ["filter", "auto"])
def test_channels_last_kernels_are_viewed_without_a_copy(shape: tuple[int, ...], grouping: str) -> None:
    tensor = torch.zeros(shape).to(memory_format=torch.channels_last)
    part = partition(shape, grouping, 10)
    views = part.views(tensor)
    assert views is not None
    assert [tuple(view.shape) for view in views] == [(shape[0], shape[1], shape[2] * shape[3])]
    views[0][1, 0] = 1.0
    assert torch.equal(tensor[1, 0], torch.ones(shape[2:]))
    assert float(tensor.sum()) == shape[2] * shape[3]


def test_strides_that_allow_no_view_are_told() -> None:
    turned = torch.zeros(4, 6).t()
    assert partition((6, 4), "chunk", 5).views(turned) is None


# The paper's networks ----------------------------------------------------------------------------------------------


def rows_by_name(model: nn.Module) -> dict[str, dict[int, int]]:
    return {row.name: row.sizes for row in plan(model, block_size=10).rows}


def test_block_counts_of_lenet_300_100() -> None:
    model = nn.Sequential(nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, 10))
    rows = rows_by_name(model)
    assert [rows[f"{i}.weight"] for i in range(3)] == [{10: 23_520}, {10: 3_000}, {10: 100}]
    assert [rows[f"{i}.bias"] for i in range(3)] == [{10: 30}, {10: 10}, {10: 1}]
    assert plan(model, block_size=10).num_blocks == 26_661


def test_block_counts_of_lenet_5_caffe() -> None:
    model = nn.Sequential(nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5), nn.Linear(800, 500), nn.Linear(500, 10))
    rows = rows_by_name(model)
    assert [rows[f"{i}.weight"] for i in range(4)] == [{25: 20}, {25: 1_000}, {10: 40_000}, {10: 500}]


# Explicit blocks ---------------------------------------------------------------------------------------------------


@quietly
@given(pick=st.data(), total=st.integers(1, 30))
def test_explicit_blocks_step_the_coordinates_they_name(pick: Any, total: int) -> None:
    """The blocks of a shuffled partition are those of the chunks of the shuffled parameter."""
    order = pick.draw(st.permutations(range(total)))
    block_size = pick.draw(st.integers(1, 6))
    groups = IndexGroups([[order[i] for i in run] for run in runs(total, block_size)])
    generator = torch.Generator().manual_seed(total)
    start, grad = (torch.randn(total, generator=generator, dtype=torch.float64) for _ in range(2))
    explicit, chunked = nn.Parameter(start.clone()), nn.Parameter(start[order].clone())
    explicit.grad, chunked.grad = grad, grad[order]
    BlockAdam([explicit], grouping=groups, lr=0.1).step()
    BlockAdam([chunked], grouping="chunk", block_size=block_size, lr=0.1).step()
    torch.testing.assert_close(explicit[order], chunked, rtol=1e-9, atol=1e-12)


@quietly
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), pick=st.data())
def test_a_partition_into_any_sizes_covers_and_any_slip_is_named(sizes: list[int], pick: Any) -> None:
    total = sum(sizes)
    order = iter(pick.draw(st.permutations(range(total))))
    lists = [[next(order) for _ in range(size)] for size in sizes]
    groups = IndexGroups(lists)
    groups.require_cover("Test", total)
    assert groups.sizes == {n: sizes.count(n) for n in sorted(set(sizes))}
    victim = pick.draw(st.integers(0, total - 1))
    once = f"Test: `grouping` must be blocks that hold each of the group's {total} coordinates once"
    for slip, message in (
        ([*lists, [victim]], f"{once}, got coordinate {victim} more than once."),
        (
            [kept for block in lists if (kept := [c for c in block if c != victim])],
            f"{once}, got coordinate {victim} in none.",
        ),
        (
            [*lists, [total + victim]],
            f"Test: `grouping` must be blocks within the group's {total} coordinates, got coordinate {total + victim}.",
        ),
    ):
        with pytest.raises(ValueError, match=r"^Test: `grouping`") as refusal:
            IndexGroups(slip).require_cover("Test", total)
        assert str(refusal.value) == message


@pytest.mark.parametrize("grouping", ["auto", "input", "output", "chunk", "tensor", "diagonal"])
@pytest.mark.parametrize("shape", [(7,), (12, 5), (13, 7), (1, 4), (6, 2, 3, 3), (5, 3, 2), (4, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 4, 5, 50])
def test_a_border_is_where_blocks_end_and_counts_those_before_it(
    shape: tuple[int, ...], grouping: str, block_size: int
) -> None:
    cut = partition(shape, grouping, block_size)
    blocks = blocks_in_order(cut, shape)
    for row in range(shape[0] + 1):
        first = row * math.prod(shape[1:])
        before = [max(block) < first for block in blocks]
        straddled = any(min(block) < first <= max(block) for block in blocks)
        assert cut.border(row) == (None if straddled else sum(before))
        if not straddled:
            assert before == sorted(before, reverse=True)


@pytest.mark.parametrize("grouping", ["auto", "input", "output", "chunk", "tensor", "diagonal"])
@pytest.mark.parametrize("shape", [(23, 7), (8, 6), (40,), (12, 5, 3, 3), (9, 10), (1, 4), (6, 1)], ids=str)
def test_the_blocks_of_a_slice_of_grains_are_a_slice_of_the_blocks(shape: tuple[int, ...], grouping: str) -> None:
    cut = partition(shape, grouping, 4)
    blocks, tensor = blocks_in_order(cut, shape), coordinates(shape)
    borders = [*range(0, cut.length, cut.grain), cut.length]
    assert all(cut.border(row) is not None for row in borders)
    assert all(cut.border(row) is None for row in range(cut.length) if row % cut.grain)
    for first in borders:
        for last in [row for row in borders if row >= first]:
            piece, start, end = cut.between(first, last), cut.border(first), cut.border(last)
            assert start is not None
            assert end is not None
            assert (piece.num_blocks, piece.fingerprint) == (end - start, cut.fingerprint)
            numbers = piece.state_views(torch.arange(start, end).unsqueeze(1))
            for view, places in zip(piece.views(tensor[first:last]) or (), numbers, strict=True):
                for number, block in zip(places.flatten().tolist(), view.flatten(0, 1).tolist(), strict=True):
                    assert blocks[number] == block
