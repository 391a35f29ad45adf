"""Stage 1 cuts coordinates into blocks.

A `Partition` describes how one parameter is cut; `IndexGroups` lists blocks over a whole param group. Neither
holds any of the parameter's numbers. A named grouping never copies: its blocks are strided views, so that a kernel
reads and writes the parameter where it lies.

    named grouping   W as a matrix [rows, columns]; runs of n along one axis
    view             [major, minor, k], k <= n: all runs of length k, each element of the last axis one coordinate

A last run that is shorter than n gives a second view with k < n. Its blocks are stored as blocks of n whose missing
rows and columns stay zero, so one parameter has one block size.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from blockadapt.moments import packed_length, statistics_dtype
from blockadapt.validation import Described, refusal, require, require_choice, require_integer

MAX_BLOCK = 4096
"""No block is larger: its V alone takes 32 MiB in float32, and LAPACK some ten seconds."""

MAX_FILTER = 64
"""A convolution's filter with more coordinates than this is cut into runs of `block_size`."""

NAMED_GROUPINGS = ("auto", "input", "output", "filter", "chunk", "tensor", "joint", "diagonal")


class IndexGroups:
    """Gives blocks as explicit lists of coordinates.

    The coordinates count through the param group: all its parameters flattened and laid end to end. Blocks may have
    different sizes and may span parameters. Together they must name every coordinate exactly once.

    Example:
        >>> IndexGroups([[0, 1], [2, 5, 3], [4]]).sizes
        {1: 1, 2: 1, 3: 1}
    """

    def __init__(self, groups: Iterable[Sequence[int]]) -> None:
        self.groups: list[list[int]] = []
        for position, group in enumerate(groups):
            members = _integers(group)
            rule = "a non-empty list of integers in [0, 2**63)"
            ok = members is not None and len(members) > 0 and 0 <= min(members) <= max(members) < 2**63
            require(ok, "IndexGroups", f"groups[{position}]", rule, group)
            self.groups.append(members or [])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexGroups) and self.groups == other.groups

    __hash__ = None  # type: ignore[assignment]  # equal by value, and lists change

    def __repr__(self) -> str:
        coordinates = sum(map(len, self.groups))
        return f"IndexGroups({len(self.groups)} blocks over {coordinates} coordinates)"

    @cached_property
    def tables(self) -> dict[int, Tensor]:
        """Give the coordinates [num_blocks, n] for each block size n, sizes ascending, blocks in the order given."""
        by_size: dict[int, list[list[int]]] = {}
        for group in self.groups:
            by_size.setdefault(len(group), []).append(group)
        with unset_fake_temporarily():  # they are kept, and so have numbers even where parameters have none
            return {n: torch.tensor(by_size[n], dtype=torch.int64, device="cpu") for n in sorted(by_size)}

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Count the blocks of each size."""
        return {n: len(table) for n, table in self.tables.items()}

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Give size and number of the blocks that go to a kernel together: all of one size."""
        return list(self.sizes.items())

    @cached_property
    def fingerprint(self) -> tuple[int, ...]:
        """Tell this cut from any other in five numbers: blocks, coordinates, and a hash of who is where."""
        with unset_fake_temporarily():
            tables = b"".join(table.numpy().tobytes() for table in self.tables.values())
        digest = hashlib.sha256(tables).digest()
        hashes = (int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8, 16))
        return len(self.groups), sum(map(len, self.groups)), *hashes

    def __str__(self) -> str:
        return f"{len(self.groups)} explicit blocks"

    @unset_fake_temporarily()
    def require_cover(self, owner: str, total: int) -> None:
        """Check that the blocks name each of `total` coordinates exactly once.

        Raises:
            ValueError: They do not.
        """
        seen = torch.zeros(total, dtype=torch.int64, device="cpu")
        for table in self.tables.values():
            outside = table[table >= total]
            if outside.numel():
                rule = f"blocks within the group's {total} coordinates"
                raise ValueError(refusal(owner, "grouping", rule, Described(f"coordinate {int(outside[0])}")))
            seen += torch.bincount(table.flatten(), minlength=total)
        rule = f"blocks that hold each of the group's {total} coordinates once"
        for wrong, how in ((seen > 1, "more than once"), (seen == 0, "in none")):
            if wrong.any():
                value = Described(f"coordinate {int(wrong.nonzero()[0])} {how}")
                raise ValueError(refusal(owner, "grouping", rule, value))


def _integers(group: Any) -> list[int] | None:
    """Return the members of a group as ints, from NumPy and torch too; None if they are not integers."""
    try:
        members = list(group)
        return None if any(isinstance(member, bool) for member in members) else list(map(operator.index, members))
    except TypeError:
        return None


Grouping = str | IndexGroups
"""A rule, by name, or the blocks themselves."""


@dataclass(frozen=True)
class Partition:
    """Says how one parameter is cut into blocks of n coordinates. It holds no tensors.

    The parameter is read as a matrix [rows, columns]. `down` says whether runs go down a column (`"input"`) or along
    a row (all others). Blocks are ordered so that a slice of the parameter's first axis is a slice of its blocks.
    `length` is the length of that first axis.

    A slice of rows has a partition too: `whole` is that of the whole parameter, and `shards` the number of slices that
    cut through its blocks, 0 if every slice begins where a block begins.
    """

    grouping: str
    rows: tuple[int, ...]
    columns: int
    n: int
    down: bool
    length: int
    whole: Partition | None = None
    shards: int = 0

    def __str__(self) -> str:
        extent = (self.whole or self).extent
        shards = f" in {self.shards} shards" if self.shards else ""
        return f"runs of {self.n} {'down a column' if self.down else 'along a row'} of {extent}{shards}"

    @cached_property
    def fingerprint(self) -> tuple[int, ...]:
        """Tell this cut from any other in five numbers. All slices of a parameter have those of the whole."""
        whole = self.whole or self
        return self.n, int(self.down) + 2 * self.shards, whole.extent, whole.lines, whole.length

    @cached_property
    def grain(self) -> int:
        """Give the fewest rows of the first axis that hold whole blocks: at each multiple of it a block begins."""
        if self.down:
            return self.n
        row = self.lines * self.columns // max(1, self.length)
        return 1 if row % max(1, self.columns) == 0 else self.n // math.gcd(self.n, row)

    def between(self, first: int, last: int, shards: int = 0) -> Partition:
        """Return the partition of rows [first, last) alone, whose runs begin at row `first`."""
        rows, columns = (last - first, *self.rows[1:]), self.columns
        if self.rows[0] != self.length:  # all coordinates are one line
            rows, columns = self.rows, (last - first) * (self.columns // max(1, self.length))
        return replace(self, rows=rows, columns=columns, length=last - first, whole=self, shards=shards)

    def border(self, row: int) -> int | None:
        """Count the blocks before this row of the parameter's first axis; None where the row begins within a block.

        So the blocks of rows [first, last) are those from border(first) to border(last), and who holds only these rows
        can hold only these blocks.
        """
        if row == self.length:
            return self.num_blocks
        if self.down:
            run, within = divmod(row * self.extent // self.length, self.n)
            return None if within else run * self.lines
        line, coordinate = divmod(row * (self.lines * self.columns // self.length), self.columns)
        run, within = divmod(coordinate, self.n)
        return None if within else line * self.runs + run

    @cached_property
    def extent(self) -> int:
        """Give the length of the axis that runs are cut from."""
        return math.prod(self.rows) if self.down else self.columns

    @cached_property
    def runs(self) -> int:
        """Count the runs on each line, the short last one included."""
        return -(-self.extent // self.n)

    @cached_property
    def lines(self) -> int:
        """Count the lines that are cut into runs."""
        return self.columns if self.down else math.prod(self.rows)

    @property
    def num_blocks(self) -> int:
        """Count the blocks in all."""
        return self.runs * self.lines

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Count the blocks of each size: here always one size."""
        return {self.n: self.num_blocks}

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """Give size and number of the blocks in each of the `views`."""
        full, short = divmod(self.extent, self.n)
        return [(self.n, self.lines * runs) for runs in ((full, 1) if short else (full,))]

    def views(self, tensor: Tensor) -> list[Tensor] | None:
        """Return views [major, minor, k] of a tensor of the parameter's shape; None if its strides allow none."""
        if tensor.is_contiguous():  # one operation a view: what is staged is cut anew at each step
            start = tensor.storage_offset()
            return [tensor.as_strided(shape, strides, start + offset) for shape, strides, offset in self._places]
        return self._cut(tensor)

    @cached_property
    def _places(self) -> list[tuple[torch.Size, tuple[int, ...], int]]:
        """Give shape, strides and offset of each view of a contiguous tensor."""
        parts = self._cut(torch.empty(*self.rows, self.columns, device="meta"))
        assert parts is not None
        return [(part.shape, part.stride(), int(part.storage_offset())) for part in parts]

    def _cut(self, tensor: Tensor) -> list[Tensor] | None:
        n, runs, lines = self.n, self.runs, self.lines
        full, short = divmod(self.extent, n)
        try:
            if self.down:
                matrix = tensor.view(self.extent, lines)
                parts = [matrix[: full * n].view(full, n, lines).transpose(1, 2)]
                if short:
                    parts.append(matrix[full * n :].view(1, short, lines).transpose(1, 2))
            elif runs == 1 and len(self.rows) == 2:
                parts = [tensor.view(*self.rows, n)]  # kept apart: channels_last cannot merge them
            else:
                matrix = tensor.view(lines, self.extent)
                parts = [matrix[:, : full * n].view(lines, full, n)]
                if short:
                    parts.append(matrix[:, full * n :].view(lines, 1, short))
        except RuntimeError:
            return None
        return parts

    def state_views(self, state: Tensor) -> list[Tensor]:
        """Return views [major, minor, width] of a state tensor [num_blocks, width], in step with `views`."""
        full, short = divmod(self.extent, self.n)
        width = state.shape[1]
        if self.down:
            grid = state.view(self.runs, self.lines, width)
            return [grid[:full], grid[full:]] if short else [grid]
        if self.runs == 1 and len(self.rows) == 2:
            return [state.view(*self.rows, width)]
        grid = state.view(self.lines, self.runs, width)
        return [grid[:, :full], grid[:, full:]] if short else [grid]


Cut = Partition | IndexGroups
"""What a grouping comes to: the blocks of one parameter, or of a whole param group."""


def resolve(grouping: str, shape: Sequence[int]) -> str:
    """Return the grouping that a parameter of this shape gets: `"auto"` decided, vectors chunked, scalars diagonal."""
    if grouping in ("tensor", "diagonal", "chunk"):
        return grouping
    if len(shape) == 0:
        return "diagonal"
    if len(shape) == 1:
        return "chunk"  # a bias or a norm's scale has no rows, columns or filters to follow
    if grouping == "auto":
        return "filter" if math.prod(shape[2:]) > 1 else "input"
    return grouping


@lru_cache(maxsize=4096)
def partition(shape: tuple[int, ...], grouping: str, block_size: int) -> Partition:
    """Cut a parameter of this shape by a named grouping (any but `"joint"`)."""
    name = resolve(grouping, shape)
    numel = math.prod(shape)

    def cut(rows: tuple[int, ...], columns: int, n: int, down: bool = False) -> Partition:
        return Partition(name, rows, columns, max(1, n), down, shape[0] if shape else 1)

    if name == "input":
        return cut((shape[0],), math.prod(shape[1:]), min(block_size, shape[0]), down=True)
    if name == "output":
        columns = math.prod(shape[1:])
        return cut((shape[0],), columns, min(block_size, columns))
    if name == "filter":
        columns = math.prod(shape[2:])
        return cut(tuple(shape[:2]), columns, columns if columns <= MAX_FILTER else min(block_size, columns))
    n = {"chunk": min(block_size, numel), "tensor": numel, "diagonal": 1}[name]
    return cut((1,), numel, n)


@lru_cache(maxsize=64)
def joint(total: int) -> IndexGroups:
    """Make one block over `total` coordinates."""
    return IndexGroups([range(total)] if total else [])


def spans(grouping: Any) -> bool:
    """Say whether blocks of this grouping may hold coordinates of several parameters."""
    return isinstance(grouping, IndexGroups) or grouping == "joint"


def index_groups(grouping: Grouping, params: Sequence[Tensor]) -> IndexGroups:
    """Return the explicit blocks of a param group whose grouping `spans` its parameters."""
    return grouping if isinstance(grouping, IndexGroups) else joint(sum(param.numel() for param in params))


def require_grouping(owner: str, grouping: Any, block_size: Any, params: Sequence[Tensor]) -> None:
    """Raise ValueError unless these parameters can be cut this way."""
    require_integer(owner, "block_size", block_size, least=1, most=MAX_BLOCK)
    total = sum(param.numel() for param in params)
    if isinstance(grouping, IndexGroups):
        grouping.require_cover(owner, total)
        _require_affordable(owner, "IndexGroups", max(grouping.sizes, default=0), params)
        return
    require_choice(owner, "grouping", grouping, NAMED_GROUPINGS)
    if grouping == "joint":
        _require_affordable(owner, "'joint'", total, params)
        return
    for param in params:
        if grouping == "filter":
            rule = "a grouping that fits its parameters ('filter' needs a convolution weight of 3 or more dimensions)"
            ok = param.ndim != 2
            require(ok, owner, "grouping", rule, Described(f"'filter' for a parameter of shape {tuple(param.shape)}"))
        if grouping == "tensor":
            _require_affordable(owner, "'tensor'", param.numel(), [param])


def _require_affordable(owner: str, what: str, n: int, params: Sequence[Tensor]) -> None:
    if n > MAX_BLOCK:
        gigabytes = statistics_dtype(params[0]).itemsize * packed_length(n) / 1e9
        rule = f"a grouping into blocks of at most {MAX_BLOCK} coordinates"
        value = f"{what} with a block of {n}, whose second moment alone needs {gigabytes:.3g} GB"
        raise ValueError(refusal(owner, "grouping", rule, Described(value)))
