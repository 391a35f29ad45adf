"""Asks for what the next tile needs of memory while this tile is computed; it is noted first.

It lies after this tile's in memory, or in the next tensor. It is asked for bit by bit, between stretches of
arithmetic that touch no new memory themselves, such as the rotations of a QR sweep: all at once would fill the
processor's few slots for lines on their way, and stall.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blockadapt.kernels.cpu.jit import inlined, jit
from blockadapt.kernels.cpu.scratch import PAIR
from blockadapt.kernels.cpu.simd import prefetch
from blockadapt.kernels.cpu.tables import ADDRESS, BASIS, COORDINATES, EIGENVALUES, ELEMENT, V
from blockadapt.kernels.cpu.tile_io import address_of, find


@inlined
def note_(n: int, tables: Any, tile: int, s: Any, within: bool, L: int) -> int:
    """Write the addresses of the pairs of lines that the next tile needs into `s.ahead`; returns how many there are.

    `within` says that each block's own coordinates are contiguous in memory; else neighbouring blocks' are.
    """
    row, following = L * s.x.itemsize, (tile + 1) * L
    if following >= tables.starts[tables.starts.size - 1]:
        return 0
    piece, major, minor = find(tables, following)
    noted: int = 0
    for role in range(COORDINATES):
        if tables.tensors[0, role, ADDRESS] == 0:
            continue
        at = address_of(tables, role, piece, major, minor)
        if within:
            noted = note_rows_(s.ahead, noted, at, n, row)
        else:
            for part in range(0, row, PAIR):
                noted = note_series_(s.ahead, noted, at + part, tables.tensors[piece, role, ELEMENT], n)
    noted = note_rows_(s.ahead, noted, address_of(tables, V, piece, major, minor), n * (n + 1) // 2, row)
    if tables.tensors[0, BASIS, ADDRESS] != 0:
        tiles = (following - tables.starts[piece]) // L
        for role, rows in ((EIGENVALUES, n), (BASIS, n * (n - 1) // 2)):
            noted = note_rows_(s.ahead, noted, tables.tensors[piece, role, ADDRESS] + tiles * rows * row, rows, row)
    return noted


@jit
def note_rows_(ahead: Any, noted: int, address: int, rows: int, row: int) -> int:
    """Note `rows` rows of `row` bytes at an address; returns how many pairs are noted then."""
    noted_then: int = note_series_(ahead, noted, address, PAIR, rows * (row // PAIR))
    return noted_then


@jit
def note_series_(ahead: Any, noted: int, address: int, stride: int, count: int) -> int:
    """Note `count` pairs from an address on, by a stride; returns how many are noted then."""
    for i in range(count):
        ahead[np.uint64(noted + i)] = address + i * stride  # unsigned: an index from the end would cost a test each
    return noted + count


@jit
def ask(ahead: Any, noted: int, index: int) -> None:
    """Ask for the pair of this number, if one is noted."""
    if index < noted:
        prefetch(ahead[index])
        prefetch(ahead[index] + PAIR // 2)


@jit
def ask_rest(ahead: Any, noted: int, first: int) -> None:
    """Ask for all that are noted, from this number on."""
    for index in range(first, noted):
        ask(ahead, noted, index)
