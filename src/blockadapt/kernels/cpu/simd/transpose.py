"""Transposes numbers that lie side by side in each lane's block to rows of lanes and back, 16 × 16 at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from blockadapt.kernels.cpu.simd.memory import gather, load, load_vector, scatter, store, store_vector
from blockadapt.kernels.cpu.simd.types import ELEMENTS, INT32, INT64, LANES, call, data_of, defines, splat

SQUARE = 16
"""The entries of each lane, and the lanes, that are transposed at once."""


def transpose_in(addresses: Any, offset: int, array: Any, start: int) -> None:
    """Read entries 0..15 at each lane's address + `offset` into 16 rows of lanes at array[start:]."""
    for entry in range(SQUARE):
        store(array, start + entry * LANES, gather(addresses, offset + entry * array.itemsize, array))


def transpose_out(addresses: Any, offset: int, array: Any, start: int) -> None:
    """Undo `transpose_in`."""
    for entry in range(SQUARE):
        scatter(addresses, offset + entry * array.itemsize, load(array, start + entry * LANES))


def transpose_few_in(addresses: Any, count: int, array: Any) -> None:
    """Read `count` < 16 entries of each lane into the array's first rows. Nothing past them is read or written."""
    for entry in range(count):
        store(array, entry * LANES, gather(addresses, entry * array.itemsize, array))


def transpose_few_out(addresses: Any, count: int, array: Any) -> None:
    """Undo `transpose_few_in`."""
    for entry in range(count):
        scatter(addresses, entry * array.itemsize, load(array, entry * LANES))


def transpose_onto(addresses: Any, offset: int, count: int, array: Any, scales: Any) -> None:
    """Add the array's first `count` <= 16 rows onto memory: memory ← scale · memory + row, a scale a lane."""
    for entry in range(count):
        at = offset + entry * array.itemsize
        old = gather(addresses, at, array)
        scatter(addresses, at, scales[:LANES] * old + load(array, entry * LANES))


# Their compiled bodies --------------------------------------------------------------------------------------------

_SQUARE = (types.Array, types.Integer, types.Array, types.Integer)
_FEW = (types.Array, types.Integer, types.Array)
_ONTO = (types.Array, types.Integer, types.Integer, types.Array, types.Array)


def _nothing(*args: Any) -> Any:
    return types.void


@defines(transpose_in, *_SQUARE, returns=_nothing)
def _transpose_in(context: Any, builder: Any, sig: Any, args: Any) -> None:
    lanes, rows = _places(context, builder, sig, args, 0, 2)
    for group in _GROUPS:
        _move(builder, rows(group, args[3]), lanes(group, args[1]), inward=True)


@defines(transpose_out, *_SQUARE, returns=_nothing)
def _transpose_out(context: Any, builder: Any, sig: Any, args: Any) -> None:
    lanes, rows = _places(context, builder, sig, args, 0, 2)
    for group in _GROUPS:
        _move(builder, rows(group, args[3]), lanes(group, args[1]), inward=False)


@defines(transpose_few_in, *_FEW, returns=_nothing)
def _transpose_few_in(context: Any, builder: Any, sig: Any, args: Any) -> None:
    lanes, rows = _places(context, builder, sig, args, 0, 2)
    for group in _GROUPS:
        _move(builder, rows(group, _ZERO), lanes(group, _ZERO), inward=True, count=args[1])


@defines(transpose_few_out, *_FEW, returns=_nothing)
def _transpose_few_out(context: Any, builder: Any, sig: Any, args: Any) -> None:
    lanes, rows = _places(context, builder, sig, args, 0, 2)
    for group in _GROUPS:
        _move(builder, rows(group, _ZERO), lanes(group, _ZERO), inward=False, count=args[1])


@defines(transpose_onto, *_ONTO, returns=_nothing)
def _transpose_onto(context: Any, builder: Any, sig: Any, args: Any) -> None:
    _, offset, count, _, _ = args
    lanes, rows = _places(context, builder, sig, args, 0, 3)
    scales = data_of(context, builder, sig.args[4], args[4])

    def scaled(group: int, i: int, old: Any, row: Any) -> Any:
        scale = builder.load(builder.gep(scales, [ir.Constant(INT64, group + i)]))
        return call(builder, "fma", [splat(builder, scale, row.type), old, row])

    def add(few: Any) -> None:
        for group in _GROUPS:
            loaded = [load_vector(builder, place) for place in rows(group, _ZERO)]
            targets = lanes(group, offset)
            for i, (row, place) in enumerate(zip(_transposed(builder, loaded), targets, strict=True)):
                store_vector(builder, scaled(group, i, load_vector(builder, place, few), row), place, few)

    # Memory is masked only where it must be: without AVX-512 that is one branch for each number.
    with builder.if_else(builder.icmp_signed("==", count, ir.Constant(count.type, SQUARE))) as (whole, part):
        with whole:
            add(None)
        with part:
            add(_first(builder, count))


# Emitting LLVM ----------------------------------------------------------------------------------------------------

_GROUPS = range(0, LANES, SQUARE)
_ZERO = ir.Constant(INT64, 0)

Places = Callable[[int, Any], list[Any]]


def _places(context: Any, builder: Any, sig: Any, args: Any, lanes: int, rows: int) -> tuple[Places, Places]:
    """Say where 16 entries of 16 lanes lie, from lane `group` on: one pointer a lane, one a row.

    The first function gives those to the lanes' own memory, past an offset in bytes; the second those to rows of an
    array, past a number of elements. `lanes` and `rows` say which arguments are the addresses and the array.
    """
    square = ir.VectorType(ELEMENTS[sig.args[rows].dtype], SQUARE).as_pointer()
    addresses = data_of(context, builder, sig.args[lanes], args[lanes])
    data = data_of(context, builder, sig.args[rows], args[rows])

    def lane_by_lane(group: int, offset: Any) -> list[Any]:
        starts = [builder.load(builder.gep(addresses, [ir.Constant(INT64, group + i)])) for i in range(SQUARE)]
        return [builder.inttoptr(builder.add(start, offset), square) for start in starts]

    def row_by_row(group: int, start: Any) -> list[Any]:
        rows = [builder.add(start, ir.Constant(INT64, i * LANES + group)) for i in range(SQUARE)]
        return [builder.bitcast(builder.gep(data, [row]), square) for row in rows]

    return lane_by_lane, row_by_row


def _move(builder: Any, rows: list[Any], lanes: list[Any], inward: bool, count: Any = None) -> None:
    """Transpose a square from lanes' memory to rows or back. With a count all memory past it is masked out."""
    row_masks: list[Any] = [None] * SQUARE
    lane_masks: list[Any] = [None] * SQUARE
    if count is not None:
        few = _first(builder, count)
        lane_masks = [few] * SQUARE
        row_masks = [
            splat(builder, builder.extract_element(few, ir.Constant(INT32, i)), few.type) for i in range(SQUARE)
        ]
    outside, inside = list(zip(lanes, lane_masks, strict=True)), list(zip(rows, row_masks, strict=True))
    source, target = (outside, inside) if inward else (inside, outside)
    loaded = [load_vector(builder, place, mask) for place, mask in source]
    for row, (place, mask) in zip(_transposed(builder, loaded), target, strict=True):
        store_vector(builder, row, place, mask)


def _first(builder: Any, count: Any) -> Any:
    """Make the mask of the first `count` of 16."""
    numbers = ir.VectorType(INT64, SQUARE)
    return builder.icmp_signed("<", ir.Constant(numbers, list(range(SQUARE))), splat(builder, count, numbers))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose a square held in 16 vectors: four rounds swap ever larger off-diagonal squares."""
    kind = ir.VectorType(INT32, SQUARE)
    for step in (1, 2, 4, 8):
        low = ir.Constant(kind, [i if not i & step else SQUARE + i - step for i in range(SQUARE)])
        high = ir.Constant(kind, [i + step if not i & step else SQUARE + i for i in range(SQUARE)])
        swapped = list(rows)
        for i in range(SQUARE):
            if not i & step:
                swapped[i] = builder.shuffle_vector(rows[i], rows[i + step], low)
                swapped[i + step] = builder.shuffle_vector(rows[i], rows[i + step], high)
        rows = swapped
    return rows
