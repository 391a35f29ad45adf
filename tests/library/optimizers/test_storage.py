"""What blocks keep between steps: shapes, the parts that kernels get, and tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockadapt.kernels.layout import MAX_TILED, TILE, by_block, write_by_block_
from blockadapt.kernels.reflections import basis_of, reflections_of, turned
from blockadapt.optimizers.storage import WIDTHS, from_blocks, in_form, state_parts, state_rows, state_shape, to_blocks
from blockadapt.partition import IndexGroups, Partition, partition

CUTS: dict[str, Partition | IndexGroups] = {
    "input": partition((40, 17), "input", 10),
    "input, short run": partition((43, 17), "input", 10),
    "output, short run": partition((9, 43), "output", 10),
    "filter": partition((7, 6, 3, 3), "auto", 10),
    "chunk, short run": partition((325,), "auto", 10),
    "diagonal": partition((5, 9), "diagonal", 10),
    "large": partition((200, 3), "input", 100),
    "one size": IndexGroups([[0, 1, 2], [3, 5, 4]]),
    "sizes": IndexGroups([[0], *([i, i + 1] for i in range(1, 81, 2)), [81, 82, 83]]),
    "none": IndexGroups([]),
}
each_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
each_name = pytest.mark.parametrize("name", WIDTHS)


@pytest.mark.parametrize("num_blocks", [1, TILE - 1, TILE, TILE + 1, 100])
@pytest.mark.parametrize("n", [1, 3, MAX_TILED, MAX_TILED + 1])
def test_what_is_written_into_tiles_is_read_out_of_them(n: int, num_blocks: int) -> None:
    rows = torch.randn(num_blocks, 5)
    tiles = torch.full((num_blocks * 5,), torch.nan)
    write_by_block_(tiles, n, rows)
    assert by_block(tiles, n, num_blocks).equal(rows)
    for block in (0, num_blocks - 1):  # the same number of all blocks of a tile side by side, also of the last tile
        first = block // TILE * TILE
        blocks = min(TILE, num_blocks - first) if n <= MAX_TILED else 1
        at = first * 5 + block - first if n <= MAX_TILED else block * 5
        assert tiles[at::blocks][:5].equal(rows[block])


@each_name
def test_nothing_is_padded(name: str) -> None:
    """A tensor of one block keeps what a block keeps, in memory and in a file."""
    for shape, n in (((3,), 3), ((1,), 1), ((10, 33), 10)):
        cut = partition(shape, "auto", 10)
        for tiled in (True, False):
            assert torch.Size(state_shape(name, cut, tiled)).numel() == cut.num_blocks * WIDTHS[name](n)


@pytest.mark.parametrize("n", [2, 3, 10, 64, 100])
def test_reflections_are_the_basis_but_for_signs_and_orthogonal_however_rounded(n: int) -> None:
    U = torch.linalg.qr(torch.randn(20, n, n, dtype=torch.float64))[0]
    U[0] = torch.eye(n)
    U[1] = -torch.eye(n).flip(0)
    v = reflections_of(U)
    assert v.shape == (20, WIDTHS["basis"](n))
    product = U.mT @ basis_of(v, n)
    torch.testing.assert_close(product.abs(), torch.eye(n, dtype=torch.float64).expand(20, n, n), atol=1e-13, rtol=0)
    coarse = basis_of(v.to(torch.bfloat16).double(), n)
    torch.testing.assert_close(
        coarse @ coarse.mT, torch.eye(n, dtype=torch.float64).expand(20, n, n), atol=1e-13, rtol=0
    )
    m = torch.randn(20, n, 1, dtype=torch.float64)
    torch.testing.assert_close(turned(v, m), basis_of(v, n).mT @ m)
    torch.testing.assert_close(turned(v, m, back=True), basis_of(v, n) @ m)


@each_name
@each_cut
def test_parts_share_out_the_whole_tensor(cut: Partition | IndexGroups, name: str) -> None:
    state = torch.arange(float(torch.Size(state_shape(name, cut)).numel())).view(state_shape(name, cut))
    parts = state_parts(name, cut, state)
    assert torch.cat([part.flatten() for part in parts] or [state]).sort()[0].equal(state.flatten())
    for part in parts:
        part.fill_(-1)
    assert (state == -1).all()


@each_name
@each_cut
def test_rows_have_each_block_once_and_follow_the_parts(cut: Partition | IndexGroups, name: str) -> None:
    state = torch.arange(float(torch.Size(state_shape(name, cut)).numel())).view(state_shape(name, cut))
    rows = state_rows(name, cut, state)
    assert [tuple(row.shape) for row in rows] == [(count, WIDTHS[name](n)) for n, count in cut.parts]
    numbers = torch.cat([row.flatten() for row in rows] or [state])
    assert len(numbers.unique()) == len(numbers)


@each_cut
def test_parts_count_the_blocks_of_each_view(cut: Partition | IndexGroups) -> None:
    totals: dict[int, int] = {}
    for n, count in cut.parts:
        totals[n] = totals.get(n, 0) + count
    assert totals == cut.sizes
    if isinstance(cut, Partition):
        views = cut.views(torch.empty(*cut.rows, cut.columns))
        assert [view.shape[0] * view.shape[1] for view in views or ()] == [count for _, count in cut.parts]


# One form ----------------------------------------------------------------------------------------------------------

_BROUGHT_INTO_FORM = {
    "another precision": torch.arange(12.0).view(3, 4).double(),
    "halves": torch.arange(12.0).view(3, 4).bfloat16(),
    "whole numbers": torch.arange(12).view(3, 4),
    "column-major": torch.arange(12.0).view(4, 3).T,
    "every other number": torch.arange(24.0).view(3, 8)[:, ::2],
    "one number seen everywhere": torch.ones(()).expand(3, 4),
    "a sign that waits": torch._neg_view(torch.arange(12.0).view(3, 4)),
    "one that wants a gradient": torch.arange(12.0).view(3, 4).requires_grad_(),
}


@pytest.mark.parametrize("given", _BROUGHT_INTO_FORM.values(), ids=_BROUGHT_INTO_FORM)
def test_what_is_not_in_form_is_copied_into_it_with_its_numbers(given: Tensor) -> None:
    param = torch.zeros(3, 4)
    found = in_form("owner", "it", "exp_avg", given, (3, 4), param)
    assert (found.dtype, found.is_contiguous(), found.is_neg(), found.requires_grad) == (
        torch.float32,
        True,
        False,
        False,
    )
    assert found.equal(given.detach().float())
    assert found.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_what_is_in_form_is_taken_as_it_is_for_it_may_be_large() -> None:
    param = torch.zeros(3, 4)
    for name, given in {"exp_avg": torch.ones(3, 4), "step": torch.tensor(3), "cut": torch.arange(5)}.items():
        assert in_form("owner", "it", name, given, tuple(given.shape), param) is given


def test_a_count_of_steps_lies_on_the_host_and_is_taken_as_whole() -> None:
    param = torch.zeros(3, 4, device="meta")
    for given in (torch.tensor(3, dtype=torch.int32), torch.tensor(3.0), torch.tensor(3.0).double()):
        found = in_form("owner", "it", "step", given, (), param)
        assert (found.device.type, found.dtype, int(found)) == ("cpu", torch.int64, 3)
    for given in (2.5, float("nan"), float("inf"), 2.0**63, -(2.0**64)):
        with pytest.raises(ValueError, match=r"^owner: `step` must be of whole numbers \(in the state of it\), got"):
            in_form("owner", "it", "step", torch.tensor(given), (), param)


@pytest.mark.parametrize("given", [torch.ones(4, 3), torch.ones(12), [0.0], None], ids=str)
def test_what_has_another_shape_or_is_no_tensor_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"^owner: `exp_avg` must be a plain tensor of shape \(3, 4\)"):
        in_form("owner", "it", "exp_avg", given, (3, 4), torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool], ids=str)
def test_what_is_not_of_real_numbers_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"^owner: `exp_avg` must be of real numbers \(in the state of it\), got"):
        in_form("owner", "it", "exp_avg", torch.ones(3, 4, dtype=dtype), (3, 4), torch.zeros(3, 4))


def test_what_has_no_numbers_is_refused_for_a_parameter_that_has() -> None:
    given = torch.ones(3, 4, device="meta")
    with pytest.raises(ValueError, match=r"^owner: `exp_avg` must be one with numbers"):
        in_form("owner", "it", "exp_avg", given, (3, 4), torch.zeros(3, 4))
    assert in_form("owner", "it", "exp_avg", given, (3, 4), torch.zeros(3, 4, device="meta")) is given


@each_name
@each_cut
def test_what_goes_into_a_file_by_block_comes_out_as_it_was(cut: Partition | IndexGroups, name: str) -> None:
    state = torch.randn(state_shape(name, cut))
    saved = to_blocks(name, cut, state)
    assert tuple(saved.shape) == state_shape(name, cut, tiled=False)
    assert from_blocks(name, cut, saved).equal(state)
    if isinstance(cut, Partition):  # a slice of the first axis is a slice of the blocks, so they are numbered in order
        rows = torch.cat([row.flatten(0, -2) for row in cut.state_views(saved)])
        assert rows.equal(torch.cat(state_rows(name, cut, state)))
