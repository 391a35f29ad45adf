"""What the compiled step reads of a work list, each table defined once.

    tensors        [segments, TENSORS, 4]   where each tensor lies: address, byte strides of [major, minor, element]
    extents        [segments, 5]            which blocks and how many coordinates lie there
    coefficients   [segments, TERMS]        the step's numbers, in the order of `contract.TERMS`
    starts         [segments + 1]           the number of each segment's first block
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
"""The rows of `tensors`: fields of a `Place`, and the gradient. Of the last two, which lie in tiles, only the address
is used: that of the segment's first tile. A tensor that a place does not have is at address 0."""
X, GRAD, M, V, LARGEST, BASIS, EIGENVALUES = range(len(TENSORS))
STRIDED = BASIS
"""Those before this one lie by block."""
COORDINATES = V
"""Those before this one have a number for each coordinate."""

ADDRESS, MAJOR, MINOR, ELEMENT = range(4)
"""The columns of `tensors`."""


class Extents(NamedTuple):
    """Which blocks of a place a segment is: all of it, or, where a basis is kept, its full tiles or the rest."""

    minors: int
    """Blocks that lie side by side on the minor axis."""
    length: int
    """Coordinates in each block."""
    first: int
    """The number of its first block in the place."""
    blocks: int
    rest: int
    """As many if they are in the place's last tile of a kept basis, which is not a full one; else 0."""


class Entries(NamedTuple):
    """The work list itself. All threads count up the first three; the rest they read."""

    ticket: int
    """The next chunk that nobody has taken."""
    workers: int
    """Threads that have begun: each takes its number here, and the scratch of that number."""
    by_jacobi: int
    """Blocks for which QR sweeps did not suffice."""
    n: int
    segments: int
    chunks: int
    sweeps: int
    """QR sweeps allowed for each block."""
    kept: int
    """Whether the kept basis is used instead of finding it anew."""
    scratch_bytes: int
    """Of each thread."""
    tensors_at: int
    extents_at: int
    coefficients_at: int
    starts_at: int
    chunks_at: int
    """Where the tile numbers lie at which chunks begin, and past the last one end."""
    scratch_at: int
    counted: int
    """Tiles that say what they measure: all of them, or none where nobody asks."""
    sums_at: int


class Tables(NamedTuple):
    """The arrays of a work list."""

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
