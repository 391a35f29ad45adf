"""Lays a kept basis out in tiles, as kernels read it.

    by block   [num_blocks, width]      a block's numbers side by side: V, Σ̂
    by tile    [num_blocks · width]     tiles [width, TILE] one after another, the same number of TILE blocks side by
                                        side, and a last tile [width, rest] for the blocks that are left: U, Λ

A kernel that moves TILE blocks at once reads a tile as it lies, where what lies by block has to be transposed. Nothing
is padded, so that many small tensors keep no more than one large one.
"""

from __future__ import annotations

from torch import Tensor

TILE = 32
"""The blocks of a tile. In float32 a number then fills two AVX-512 registers, and one hides the other's latency;
16 and 64 were slower."""

MAX_TILED = 64
"""Blocks up to this size are moved in tiles. Larger ones go through `eigh`, which LAPACK then does well."""


def by_block(tiles: Tensor, n: int, num_blocks: int) -> Tensor:
    """Copy tiles of blocks of n out into rows [num_blocks, width]."""
    rows = tiles.new_empty(num_blocks, tiles.numel() // max(1, num_blocks))
    for here, tile in _pairs(rows, tiles, n):
        here.copy_(tile)
    return rows


def write_by_block_(tiles: Tensor, n: int, rows: Tensor) -> None:
    """Copy rows [num_blocks, width] into tiles. It makes no new tensor, for memory may run out."""
    for here, tile in _pairs(rows, tiles, n):
        tile.copy_(here)


def _pairs(rows: Tensor, tiles: Tensor, n: int) -> list[tuple[Tensor, Tensor]]:
    """View rows and tiles where they hold the same numbers: in all full tiles, and in the last one."""
    num_blocks, width = rows.shape
    if n > MAX_TILED:  # blocks that `eigh` moves lie by block
        return [(rows, tiles.view(rows.shape))]
    full, rest = divmod(num_blocks, TILE)
    whole, last = rows.split([full * TILE, rest])
    head, tail = tiles.split([full * TILE * width, rest * width])
    return [(whole.unflatten(0, (full, TILE)), head.view(full, width, TILE).mT), (last, tail.view(width, rest).mT)]
