"""Tiles: how a kept basis lies in memory.

    by block   [num_blocks, width]      a block's numbers side by side: V, Σ̂
    by tile    [tiles, width, TILE]     the same number of TILE blocks side by side: U, Λ

A kernel that moves TILE blocks at once reads a tile as it lies, where what lies by block has to be transposed. Lanes
past the last block are memory that nobody reads.
"""

from __future__ import annotations

from torch import Tensor

TILE = 32
"""Blocks in a tile. For float32 that is two AVX-512 registers a number, enough to hide the latency of one by the other;
16 and 64 were slower."""

MAX_TILED = 64
"""Blocks up to this size are moved in tiles. Larger ones go through `eigh`, which LAPACK then does well."""


def tiled_shape(n: int, num_blocks: int, width: int) -> tuple[int, int, int]:
    """Of a tensor with so many numbers for each block of n. Large blocks have tiles of one: padding would be dear."""
    size = TILE if n <= MAX_TILED else 1
    return -(-num_blocks // size), width, size


def by_block(tiles: Tensor, num_blocks: int) -> Tensor:
    """Rows [num_blocks, width] out of tiles."""
    return tiles.mT.reshape(-1, tiles.shape[1])[:num_blocks]


def write_by_block_(tiles: Tensor, rows: Tensor) -> None:
    """Rows [num_blocks, width] into tiles. Makes no new tensor, for memory may run out."""
    full, rest = divmod(rows.shape[0], tiles.shape[2])
    whole, last = rows.split([full * tiles.shape[2], rest])
    tiles[:full].copy_(whole.unflatten(0, (full, tiles.shape[2])).mT)
    if rest:
        tiles[full, :, :rest].copy_(last.mT)
