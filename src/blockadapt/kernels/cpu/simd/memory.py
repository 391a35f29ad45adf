"""Moves rows of lanes in and out of arrays and addresses, and counts for all threads.

Addresses are bytes, one per lane, in an int64 array. `like` is any array of the element type.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import overload

from blockadapt.kernels.cpu.simd.types import (
    BOOL,
    INT32,
    INT64,
    LANES,
    Lanes,
    data_of,
    defines,
    item_bytes,
    splat,
    suffix,
    vector_of,
)


def _c_type(like: Any) -> Any:
    return ctypes.c_float if like.itemsize == 4 else ctypes.c_double


def _at(address: int, like: Any) -> Any:
    return _c_type(like).from_address(int(address))


def load(array: Any, start: int) -> Any:
    """Read a row of lanes out of a 1-D array."""
    return array[start : start + LANES].copy()


def store(array: Any, start: int, lanes: Any) -> None:
    """Write a row of lanes into a 1-D array."""
    array[start : start + lanes.size] = lanes


def gather(addresses: Any, offset: int, like: Any) -> Any:
    """Read one number per lane, from its address plus `offset` bytes."""
    return np.array([_at(addresses[lane] + offset, like).value for lane in range(LANES)], dtype=like.dtype)


def scatter(addresses: Any, offset: int, lanes: Any) -> None:
    """Write one number per lane, to its address plus `offset` bytes."""
    for lane in range(lanes.size):
        _at(addresses[lane] + offset, lanes).value = lanes[lane]


def load_row(address: int, like: Any) -> Any:
    """Read a row of lanes that lies side by side in memory."""
    return gather([address + lane * like.itemsize for lane in range(LANES)], 0, like)


def store_row(address: int, lanes: Any) -> None:
    """Write a row of lanes side by side into memory."""
    scatter([address + lane * lanes.itemsize for lane in range(lanes.size)], 0, lanes)


def load_lanes(address: int, first: int, last: int, others: Any) -> Any:
    """Read lanes [first, last) of a row at an address, the other lanes from `others`; nothing else there is read."""
    row = others.copy()
    for lane in range(first, last):
        row[lane] = _at(address + lane * others.itemsize, others).value
    return row


def store_lanes(address: int, first: int, last: int, lanes: Any) -> None:
    """Write lanes [first, last) of a row to an address; nothing else there is written."""
    for lane in range(first, last):
        _at(address + lane * lanes.itemsize, lanes).value = lanes[lane]


def array_at(address: int, count: int, like: Any) -> Any:
    """View `count` numbers at an address as an array."""
    return np.ctypeslib.as_array((_c_type(like) * count).from_address(int(address)))


def rows_at(address: int, rows: int, like: Any) -> Any:
    """View `rows` rows of lanes at an address as an array."""
    return array_at(address, rows * LANES, like)


def prefetch(address: int) -> None:
    """Ask for the cache line at an address, any address, without waiting for it."""


def pointer(address: int) -> Any:
    """Make an address a pointer, for `numba.carray`."""
    return ctypes.c_void_p(int(address))


def take_ticket(array: Any, index: int) -> int:
    """Return array[index] and add one to it, in one step that no other thread can divide."""
    ticket = int(array[index])
    array[index] += 1
    return ticket


# Their compiled bodies --------------------------------------------------------------------------------------------


def _row_pointer(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    data = data_of(context, builder, array_type, array)
    return builder.bitcast(builder.gep(data, [start]), vector_of(array_type.dtype).as_pointer())


@defines(load, types.Array, types.Integer, returns=lambda array, start: Lanes(array.dtype))
def _load(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return load_vector(builder, _row_pointer(context, builder, sig.args[0], *args))


@defines(store, types.Array, types.Integer, Lanes, returns=lambda array, start, lanes: types.void)
def _store(context: Any, builder: Any, sig: Any, args: Any) -> None:
    store_vector(builder, args[2], _row_pointer(context, builder, sig.args[0], *args[:2]))


@defines(gather, types.Array, types.Integer, types.Array, returns=lambda addresses, offset, like: Lanes(like.dtype))
def _gather(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    vector = vector_of(sig.args[2].dtype)
    pointers = _pointers(context, builder, sig.args[0], args[0], args[1], vector)
    blank = ir.Constant(vector, ir.Undefined)
    return _masked(builder, f"gather.{suffix(vector)}.v{LANES}p0", vector, [pointers, _alignment(vector), _ALL, blank])


@defines(scatter, types.Array, types.Integer, Lanes, returns=lambda addresses, offset, lanes: types.void)
def _scatter(context: Any, builder: Any, sig: Any, args: Any) -> None:
    vector = args[2].type
    pointers = _pointers(context, builder, sig.args[0], args[0], args[1], vector)
    values = [args[2], pointers, _alignment(vector), _ALL]
    _masked(builder, f"scatter.{suffix(vector)}.v{LANES}p0", ir.VoidType(), values)


@defines(load_row, types.Integer, types.Array, returns=lambda address, like: Lanes(like.dtype))
def _load_row(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return load_vector(builder, builder.inttoptr(args[0], vector_of(sig.args[1].dtype).as_pointer()))


@defines(store_row, types.Integer, Lanes, returns=lambda address, lanes: types.void)
def _store_row(context: Any, builder: Any, sig: Any, args: Any) -> None:
    store_vector(builder, args[1], builder.inttoptr(args[0], args[1].type.as_pointer()))


_SOME_LANES = (types.Integer, types.Integer, types.Integer, Lanes)


@defines(load_lanes, *_SOME_LANES, returns=lambda address, first, last, others: others)
def _load_lanes(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    address, first, last, others = args
    place = builder.inttoptr(address, others.type.as_pointer())
    return load_vector(builder, place, _between(builder, first, last), others)


@defines(store_lanes, *_SOME_LANES, returns=lambda address, first, last, lanes: types.void)
def _store_lanes(context: Any, builder: Any, sig: Any, args: Any) -> None:
    address, first, last, row = args
    store_vector(builder, row, builder.inttoptr(address, row.type.as_pointer()), _between(builder, first, last))


@overload(array_at)
def _array_at(address: Any, count: Any, like: Any) -> Any:
    real = np.float32 if like.dtype == types.float32 else np.float64

    def at(address: Any, count: Any, like: Any) -> Any:
        return carray(pointer(address), (count,), real)

    return at


@overload(rows_at)
def _rows_at(address: Any, rows: Any, like: Any) -> Any:
    def at(address: Any, rows: Any, like: Any) -> Any:
        return array_at(address, rows * LANES, like)

    return at


@defines(prefetch, types.Integer, returns=lambda address: types.void)
def _prefetch(context: Any, builder: Any, sig: Any, args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    options = [ir.Constant(INT32, value) for value in (0, 3, 1)]  # to read, into all levels, data
    builder.call(function, [builder.inttoptr(args[0], ir.IntType(8).as_pointer()), *options])


@defines(pointer, types.Integer, returns=lambda address: types.voidptr)
def _pointer(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], ir.IntType(8).as_pointer())


@defines(take_ticket, types.Array, types.Integer, returns=lambda array, index: types.int64)
def _take_ticket(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    place = builder.gep(data_of(context, builder, sig.args[0], args[0]), [args[1]])
    return builder.atomic_rmw("add", place, ir.Constant(INT64, 1), ordering="monotonic")


# Emitting LLVM ----------------------------------------------------------------------------------------------------

_ALL = ir.Constant(ir.VectorType(BOOL, LANES), [1] * LANES)


def load_vector(builder: Any, place: Any, mask: Any = None, others: Any = None) -> Any:
    """Emit a read of the vector at a pointer. What is masked out is not read: it is that of `others`, or zero."""
    vector = place.type.pointee
    if mask is None:
        loaded = builder.load(place)
        loaded.align = item_bytes(vector)
        return loaded
    blank = ir.Constant(vector, [0.0] * vector.count) if others is None else others
    return _masked(builder, f"load.{suffix(vector)}.p0", vector, [place, _alignment(vector), mask, blank])


def store_vector(builder: Any, row: Any, place: Any, mask: Any = None) -> None:
    """Emit a write of a vector to a pointer. What is masked out is not written."""
    if mask is None:
        builder.store(row, place).align = item_bytes(row.type)
    else:
        values = [row, place, _alignment(row.type), mask]
        _masked(builder, f"store.{suffix(row.type)}.p0", ir.VoidType(), values)


def _masked(builder: Any, name: str, returns: Any, values: list[Any]) -> Any:
    kind = ir.FunctionType(returns, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{name}"), values)


def _alignment(vector: ir.VectorType) -> Any:
    return ir.Constant(INT32, item_bytes(vector))


def _pointers(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, vector: ir.VectorType) -> Any:
    """Make <count x pointer> from the int64 array of addresses, shifted by `offset` bytes."""
    integers = ir.VectorType(INT64, vector.count)
    loaded = builder.load(builder.bitcast(data_of(context, builder, array_type, array), integers.as_pointer()))
    loaded.align = 8
    shifted = builder.add(loaded, splat(builder, offset, integers))
    return builder.inttoptr(shifted, ir.VectorType(vector.element.as_pointer(), vector.count))


def _between(builder: Any, first: Any, last: Any) -> Any:
    """Make the mask of lanes [first, last)."""
    kind = ir.VectorType(INT32, LANES)
    numbers = ir.Constant(kind, list(range(LANES)))
    low, high = (splat(builder, builder.trunc(bound, INT32), kind) for bound in (first, last))
    return builder.and_(builder.icmp_signed(">=", numbers, low), builder.icmp_signed("<", numbers, high))
