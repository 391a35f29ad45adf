"""Finds where the blocks of a tile lie, and brings their numbers into rows of lanes and back.

Where a block lies is an address and byte strides, from the tables of the work list. x, the gradient and m have any
strides: they are read row by row where blocks lie side by side, transposed where a block's own numbers do, and else
gathered. V and Σ̂ have their numbers side by side in each block, and are transposed. What is kept between refreshes lies
in tiles already; only the last tiles of places, where there are fewer blocks, are put together from several.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.simd import (
    LANES,
    SQUARE,
    broadcast,
    gather,
    load,
    load_lanes,
    load_row,
    rows_at,
    scatter,
    store,
    store_lanes,
    store_row,
    transpose_few_in,
    transpose_few_out,
    transpose_in,
    transpose_out,
)
from blockadapt.kernels.cpu.tables import (
    ADDRESS,
    BASIS,
    COORDINATES,
    EIGENVALUES,
    ELEMENT,
    EXTENT,
    GRAD,
    MAJOR,
    MINOR,
    STRIDED,
    TERMS,
    M,
    X,
)

WITHIN = -1
"""`locate` says this of a tile: each block's own coordinates are contiguous in memory."""


@inlined
def find(tables: Any, block: int) -> tuple[int, int, int]:
    """Find the piece that a block belongs to, and the line and the place in it where the block lies."""
    piece = np.searchsorted(tables.starts, block, side="right") - 1
    within, minors = (
        block - tables.starts[piece] + tables.extents[piece, EXTENT.first],
        tables.extents[piece, EXTENT.minors],
    )
    major = within // minors
    return piece, major, within - major * minors


@inlined
def locate(n: int, tables: Any, block: int, lie: Any) -> tuple[int, int]:
    """Find the address of each lane's block, from `block` on; a lane past the last block gets one of zeros.

    Returns how many lanes are contiguous in memory, and then the rest are too: all of them, or those up to the end of
    a line; WITHIN; or 0 if they are scattered. And for how many tiles from here on `move_on_` finds the next
    addresses.
    """
    tensors, extents, starts = tables.tensors, tables.extents, tables.starts
    piece, major, minor = find(tables, block)
    minors = extents[piece, EXTENT.minors]
    if minor + LANES <= minors:  # a tile within one line of one piece: almost all are
        for role in range(STRIDED):
            stride, address = tensors[piece, role, MINOR], address_of(tables, role, piece, major, minor)
            for lane in range(LANES):
                lie.where[role, lane] = address
                address += stride
        for lane in range(LANES):
            lie.lengths[lane] = extents[piece, EXTENT.length]
            lie.owners[lane] = piece
            for role in range(COORDINATES):
                lie.steps[role, lane] = tensors[piece, role, ELEMENT]
        contiguous = LANES if is_dense(tensors, piece, lie.blank.itemsize) else 0
        if contiguous == 0 and is_within(n, tables, piece, lie.blank.itemsize):
            contiguous = WITHIN
        return contiguous, (minors - minor) // LANES
    contiguous, stretches, all_within = 0, 1, True
    for lane in range(LANES):
        inside = block + lane < starts[piece] + extents[piece, EXTENT.blocks]
        if lane > 0 and ((inside and minor == 0) or inside != (lie.lengths[lane - 1] > 0)):
            contiguous, stretches = lane, stretches + 1
        if not is_dense(tensors, piece, lie.blank.itemsize):
            stretches = LANES
        all_within = all_within and inside and is_within(n, tables, piece, lie.blank.itemsize)
        locate_lane_(tables, lane, piece, major, minor, inside, lie)
        minor += 1
        if minor == extents[piece, EXTENT.minors]:
            minor = 0
            major += 1
        if block + lane + 1 == starts[piece + 1] and piece + 2 < starts.size:
            piece += 1
            major = extents[piece, EXTENT.first] // extents[piece, EXTENT.minors]
            minor = extents[piece, EXTENT.first] - major * extents[piece, EXTENT.minors]
    if stretches == 2:
        return contiguous, 1
    return WITHIN if all_within else 0, 1


@inlined
def address_of(tables: Any, role: int, piece: int, major: int, minor: int) -> int:
    """Compute the address of a block's part of one of its tensors."""
    lies = tables.tensors[piece, role]
    address: int = lies[ADDRESS] + major * lies[MAJOR] + minor * lies[MINOR]
    return address


@jit
def locate_lane_(tables: Any, lane: int, piece: int, major: int, minor: int, inside: bool, lie: Any) -> None:
    """Say where the block of a lane lies; a lane that has none gets one of zeros."""
    for role in range(STRIDED):
        address = address_of(tables, role, piece, major, minor)
        lie.where[role, lane] = address if inside else lie.blank.ctypes.data
    for role in range(COORDINATES):
        lie.steps[role, lane] = tables.tensors[piece, role, ELEMENT]
    lie.lengths[lane] = tables.extents[piece, EXTENT.length] if inside else 0
    lie.owners[lane] = piece


@jit
def locate_each_(tables: Any, blocks: Any, first: int, count: int, lie: Any) -> None:
    """Find the addresses of `count` blocks with any numbers, from `blocks[first]` on; other lanes get one of zeros."""
    for lane in range(LANES):
        inside = lane < count
        piece, major, minor = find(tables, blocks[first + lane] if inside else 0)
        locate_lane_(tables, lane, piece, major, minor, inside, lie)


@jit
def is_dense(tensors: Any, piece: int, size: int) -> bool:
    """Say whether neighbours on the minor axis are neighbours in memory, in x, grad and m."""
    dense = tensors[piece, X, MINOR] == size and tensors[piece, GRAD, MINOR] == size
    return bool(dense and (tensors[piece, M, ADDRESS] == 0 or tensors[piece, M, MINOR] == size))


@jit
def is_within(n: int, tables: Any, piece: int, size: int) -> bool:
    """Say whether all n coordinates of each block are neighbours in memory, in x, grad and m."""
    tensors, whole = tables.tensors, tables.extents[piece, EXTENT.length] == n
    side_by_side = whole and tensors[piece, X, ELEMENT] == size
    return bool(side_by_side and (tensors[piece, M, ADDRESS] == 0 or tensors[piece, M, ELEMENT] == size))


@inlined
def move_on_(tables: Any, lie: Any) -> None:
    """Move the addresses on to the next tile on the same line."""
    for role in range(STRIDED):
        stride = LANES * tables.tensors[lie.owners[0], role, MINOR]
        for lane in range(LANES):
            lie.where[role, lane] += stride


@jit
def fill_(terms: Any, coefficients: Any, owners: Any) -> None:
    """Give each lane the coefficients of the piece that owns it."""
    for lane in range(LANES):
        for term in range(TERMS):
            terms[term * LANES + lane] = coefficients[owners[lane], term]


@jit
def is_full(tables: Any, lie: Any) -> bool:
    """Say whether what is kept for this tile's blocks lies as a full tile."""
    return bool(tables.extents[lie.owners[0], EXTENT.rest] == 0)


@jit
def full_tile(tables: Any, role: int, count: int, tile: int, lie: Any, like: Any) -> Any:
    """View `count` rows of what is kept for a full tile, as they lie. Where nothing is kept, nobody may touch them."""
    piece = lie.owners[0]
    within = tile - tables.starts[piece] // LANES
    return rows_at(tables.tensors[piece, role, ADDRESS] + within * count * LANES * like.itemsize, count, like)


@jit
def locate_kept_(tables: Any, block: int, lie: Any, size: int) -> int:
    """Find what is kept for each lane's block, in last tiles of their places; returns as `locate` does."""
    contiguous, stretches = 0, 1
    for lane in range(LANES):
        piece, inside = lie.owners[lane], lie.lengths[lane] > 0
        if lane > 0 and (piece != lie.owners[lane - 1] or inside != (lie.lengths[lane - 1] > 0)):
            contiguous, stretches = lane, stretches + 1
        offset = (block + lane - tables.starts[piece]) * size
        for role in range(BASIS, EIGENVALUES + 1):
            lie.where[role, lane] = tables.tensors[piece, role, ADDRESS] + offset
            lie.steps[role, lane] = tables.extents[piece, EXTENT.rest] * size
        lie.kept[lane] = LANES * LANES * LANES if inside else 0  # rows that are there: all
    if stretches == 1:
        return LANES
    return contiguous if stretches == 2 else 0


@jit
def fetch_(n: int, rows: Any, where: Any, steps: Any, lengths: Any, contiguous: int, spare: Any) -> None:
    """Read each lane's block into n rows; missing coordinates are zero. `contiguous` is what `locate` said."""
    L = LANES
    if contiguous == WITHIN:
        to_lanes_(where, n, rows, L)
        return
    zero = broadcast(rows.dtype.type(0))
    for i in range(n):
        if contiguous == L:
            store(rows, i * L, load_row(where[0] + i * steps[0], rows) if i < lengths[0] else zero)
        elif contiguous > 0:
            row = zero
            if i < lengths[0]:
                row = load_lanes(where[0] + i * steps[0], 0, contiguous, row)
            if i < lengths[contiguous]:
                start = where[contiguous] + i * steps[contiguous] - contiguous * rows.itemsize
                row = load_lanes(start, contiguous, L, row)
            store(rows, i * L, row)
        else:
            for lane in range(L):
                inside = i < lengths[lane]
                nowhere = rows.ctypes.data + i * L * rows.itemsize  # the row itself, zero until it is filled
                spare[lane] = where[lane] + i * steps[lane] if inside else nowhere
            store(rows, i * L, zero)
            store(rows, i * L, gather(spare, 0, rows))


@jit
def put_(n: int, rows: Any, where: Any, steps: Any, lengths: Any, contiguous: int, spare: Any) -> None:
    """Undo `fetch_`; missing coordinates are dropped."""
    L = LANES
    if contiguous == WITHIN:
        from_lanes_(where, n, rows, L)
        return
    for i in range(n):
        if contiguous == L:
            if i < lengths[0]:
                store_row(where[0] + i * steps[0], load(rows, i * L))
        elif contiguous > 0:
            row = load(rows, i * L)
            if i < lengths[0]:
                store_lanes(where[0] + i * steps[0], 0, contiguous, row)
            if i < lengths[contiguous]:
                start = where[contiguous] + i * steps[contiguous] - contiguous * rows.itemsize
                store_lanes(start, contiguous, L, row)
        else:
            for lane in range(L):
                inside = i < lengths[lane]
                spare[lane] = where[lane] + i * steps[lane] if inside else spare[L:].ctypes.data
            scatter(spare, 0, load(rows, i * L))


@jit
def to_lanes_(addresses: Any, count: int, rows: Any, L: int) -> None:
    """Read `count` numbers of each lane into as many rows. The last square of 16 overlaps the one before."""
    if count < SQUARE:
        transpose_few_in(addresses, count, rows)
        return
    for i in range(0, count, SQUARE):
        i = min(i, count - SQUARE)
        transpose_in(addresses, i * rows.itemsize, rows, i * L)


@jit
def from_lanes_(addresses: Any, count: int, rows: Any, L: int) -> None:
    """Undo `to_lanes_`."""
    if count < SQUARE:
        transpose_few_out(addresses, count, rows)
        return
    for i in range(0, count, SQUARE):
        i = min(i, count - SQUARE)
        transpose_out(addresses, i * rows.itemsize, rows, i * L)
