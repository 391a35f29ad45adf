"""What blocks keep between steps: shapes, the parts that kernels get, and tiles."""

from __future__ import annotations

import pytest
import torch

from blockadapt.kernels.layout import MAX_TILED, TILE, by_block, write_by_block_
from blockadapt.kernels.reflections import basis_of, reflections_of, turned
from blockadapt.optimizers.storage import WIDTHS, state_parts, state_rows, state_shape
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
def test_rows_have_each_block_once_and_follow_the_segments(cut: Partition | IndexGroups, name: str) -> None:
    state = torch.arange(float(torch.Size(state_shape(name, cut)).numel())).view(state_shape(name, cut))
    rows = state_rows(name, cut, state)
    assert [tuple(row.shape) for row in rows] == [(count, WIDTHS[name](n)) for n, count in cut.parts]
    numbers = torch.cat([row.flatten() for row in rows] or [state])
    assert len(numbers.unique()) == len(numbers)


@each_cut
def test_segments_count_the_blocks_of_each_view(cut: Partition | IndexGroups) -> None:
    totals: dict[int, int] = {}
    for n, count in cut.parts:
        totals[n] = totals.get(n, 0) + count
    assert totals == cut.sizes
    if isinstance(cut, Partition):
        views = cut.views(torch.empty(*cut.rows, cut.columns))
        assert [view.shape[0] * view.shape[1] for view in views or ()] == [count for _, count in cut.parts]
