"""Defines each table that the compiled step reads of a work list.

    tensors        [pieces, TENSORS, 4]     where each tensor lies: address, byte strides of [major, minor, element]
    extents        [pieces, 5]              which blocks and how many coordinates lie there
    coefficients   [pieces, TERMS]          the step's numbers, in the order of `contract.TERMS`
    starts         [pieces + 1]             the number of each piece's first block
    sums           [2, counted]             float64: Σ f(λ) y² and Σ y² of each tile, where someone measures
    entries        [ENTRIES]                all else, and the addresses of the others

`TERM.second.decay` is a column of the coefficients, `ENTRY.n` an entry: the NamedTuples that name them, filled with
their own positions. Compiled code takes such a tuple as a constant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from blockadapt.kernels.contract import TERMS as NAMES
from blockadapt.kernels.contract import Coefficients

TENSORS = ("x", "grad", "m", "second_moment", "largest", "basis", "eigenvalues")
"""`tensors` has these rows: fields of a `Place`, and the gradient. The last two lie in tiles, and only their address
is used, that of the piece's first tile. A tensor that a place does not have is at address 0."""
X, GRAD, M, V, LARGEST, BASIS, EIGENVALUES = range(len(TENSORS))
STRIDED = BASIS
"""Those before this one lie by block."""
COORDINATES = V
"""Those before this one have a number for each coordinate."""

ADDRESS, MAJOR, MINOR, ELEMENT = range(4)
"""`tensors` has these columns."""


class Extents(NamedTuple):
    """Says which blocks of a place a piece has: all of them, or, where a basis is kept, its full tiles or the rest."""

    minors: int
    """The number of blocks side by side on the minor axis."""
    length: int
    """The number of coordinates in each block."""
    first: int
    """Its first block has this number in the place."""
    blocks: int
    rest: int
    """It is `blocks` if they are in the place's last tile of a kept basis, which is not a full one; else 0."""


class Entries(NamedTuple):
    """Is the work list itself. All threads count up the first three; the rest they read."""

    ticket: int
    """Nobody has taken this portion yet, nor those after it."""
    workers: int
    """The number of threads that have begun: each takes its own number here, and the scratch of that number."""
    by_jacobi: int
    """The number of blocks for which QR sweeps did not suffice."""
    n: int
    pieces: int
    portions: int
    sweeps: int
    """The QR sweeps that each block is allowed."""
    kept: int
    """It says whether the kept basis is used instead of finding it anew."""
    scratch_bytes: int
    """The bytes of each thread's scratch."""
    tensors_at: int
    extents_at: int
    coefficients_at: int
    starts_at: int
    portions_at: int
    """The address of the numbers of the tiles at which portions begin, and past the last one end."""
    scratch_at: int
    counted: int
    """The number of tiles that say what they measure: all of them, or none where nobody asks."""
    sums_at: int


class Tables(NamedTuple):
    """Holds the arrays of a work list."""

    tensors: Any
    extents: Any
    coefficients: Any
    starts: Any
    sums: Any


EXTENT = Extents(*range(len(Extents._fields)))
ENTRIES = len(Entries._fields)
ENTRY = Entries(*range(ENTRIES))
TERMS = len(NAMES)
TERM: Any = Coefficients.of(range(TERMS))
