"""Lanes: short vectors for Numba, one block a lane, so that each scalar step of an algorithm is one SIMD instruction.

Numba's own vectoriser has to prove that arrays do not overlap; for inner loops of 32 it guards each with a run-time
check and a scalar copy, which costs more than the loop and takes 15 s to compile. Here every value *is* a vector: LLVM
gets `<32 x float>` and `<32 x double>`, keeps them in registers and has nothing to prove.

Each function has two bodies: the Python one works on NumPy arrays, so a kernel's `.py_func` runs uncompiled; the
lowered one emits LLVM. A row is as many lanes as a tile has blocks.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, overload, type_callable

from blockadapt.kernels.layout import TILE

LANES = TILE

_BOOL, _INT32, _INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_ELEMENTS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_SUFFIXES = {"float": "f32", "double": "f64"}


class Lanes(types.Type):
    """One float per lane."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


class Mask(types.Type):
    """One truth value per lane."""

    def __init__(self) -> None:
        super().__init__(name="Mask")


def _vector(dtype: Any) -> ir.VectorType:
    return ir.VectorType(_ELEMENTS[dtype], LANES)


@register_default(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Lanes) -> None:
        super().__init__(dmm, fe_type, _vector(fe_type.dtype))


@register_default(Mask)
class _MaskModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Mask) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(_BOOL, LANES))


# Emitting LLVM ----------------------------------------------------------------------------------------------------


def _splat(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
    zeros = ir.Constant(ir.VectorType(_INT32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


def _call(builder: Any, name: str, args: list[Any], flags: tuple[str, ...] = ()) -> Any:
    """Call the LLVM intrinsic `name` for vectors of one type."""
    vector = args[0].type
    full = f"llvm.{name}.v{vector.count}{_SUFFIXES[str(vector.element)]}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * len(args)), full)
    return builder.call(function, args, fastmath=flags)


def _defines(
    function: Callable[..., Any], *kinds: Any, returns: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Type `function` for arguments of these kinds and lower it with the decorated emitter."""

    @type_callable(function)
    def _typed(context: Any) -> Callable[..., Any]:
        def typer(*args: Any) -> Any:
            fits = len(args) == len(kinds) and all(isinstance(a, k) for a, k in zip(args, kinds, strict=True))
            return returns(*args) if fits else None

        # Numba reads the arity from the signature.
        return _with_arity(typer, len(kinds))

    def register(emit: Callable[..., Any]) -> Callable[..., Any]:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            result = emit(context, builder, sig, args)
            return context.get_dummy_value() if result is None else result

        lower_builtin(function, *kinds)(lower)
        return emit

    return register


def _with_arity(typer: Callable[..., Any], count: int) -> Callable[..., Any]:
    names = ", ".join(f"a{i}" for i in range(count))
    made: Callable[..., Any] = eval(f"lambda {names}: typer({names})", {"typer": typer})
    return made


# Operators --------------------------------------------------------------------------------------------------------


def _same_lanes(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and isinstance(args[0], Lanes) and args[0] == args[1]


def _arithmetic(op: Any, name: str) -> None:
    @infer_global(op)
    class Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            return signature(args[0], *args) if _same_lanes(args) else None

    @lower_builtin(op, Lanes, Lanes)
    def _(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, name)(*args)


def _comparison(op: Any, symbol: str) -> None:
    @infer_global(op)
    class Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            return signature(Mask(), *args) if _same_lanes(args) else None

    @lower_builtin(op, Lanes, Lanes)
    def _(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fcmp_ordered(symbol, *args)


def _logic(op: Any, name: str) -> None:
    @infer_global(op)
    class Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            return signature(args[0], *args) if all(isinstance(arg, Mask) for arg in args) else None

    @lower_builtin(op, *[Mask] * (1 if op is operator.invert else 2))
    def _(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, name)(*args)


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")
_arithmetic(operator.truediv, "fdiv")
_comparison(operator.lt, "<")
_comparison(operator.le, "<=")
_comparison(operator.eq, "==")
_logic(operator.and_, "and_")
_logic(operator.or_, "or_")
_logic(operator.invert, "not_")


@infer_global(operator.neg)
class _NegTyping(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, kws: Any) -> Any:
        return signature(args[0], args[0]) if isinstance(args[0], Lanes) else None


@lower_builtin(operator.neg, Lanes)
def _neg(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.fneg(args[0])


# Functions --------------------------------------------------------------------------------------------------------


def broadcast(value: Any) -> Any:
    """The same number in every lane."""
    return np.full(LANES, value)


def load(array: Any, start: int) -> Any:
    """A row of lanes out of a 1-D array."""
    return array[start : start + LANES].copy()


def store(array: Any, start: int, lanes: Any) -> None:
    """A row of lanes into a 1-D array."""
    array[start : start + lanes.size] = lanes


def select(mask: Any, lanes: Any, other: Any) -> Any:
    """`lanes` where the mask is true, `other` elsewhere."""
    return np.where(mask, lanes, other)


def every(mask: Any) -> bool:
    """Whether the mask is true in all lanes."""
    return bool(np.all(mask))


def fma(a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once where compiled."""
    return a * b + c


def sqrt(lanes: Any) -> Any:
    """√x, correctly rounded."""
    return np.sqrt(lanes)


def reciprocal_sqrt(lanes: Any) -> Any:
    """1/√x to within two units in the last place: float32 uses the estimate instruction and a Newton step."""
    return (1 / np.sqrt(lanes)).astype(lanes.dtype)


def absolute(lanes: Any) -> Any:
    """|x|."""
    return np.abs(lanes)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two; the second where one is NaN."""
    return np.where(a > b, a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two; the second where one is NaN."""
    return np.where(a < b, a, b)


def power_of_two(lanes: Any) -> Any:
    """The largest power of two that is at most x, for normal x > 0."""
    return np.ldexp(np.ones_like(lanes), np.frexp(lanes)[1] - 1)


def widen(lanes: Any) -> Any:
    """float32 lanes as float64 lanes."""
    return lanes.astype(np.float64)


def narrow(lanes: Any) -> Any:
    """float64 lanes as float32 lanes."""
    return lanes.astype(np.float32)


@_defines(widen, Lanes, returns=lambda lanes: Lanes(types.float64))
def _widen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.fpext(args[0], _vector(types.float64))


@_defines(narrow, Lanes, returns=lambda lanes: Lanes(types.float32))
def _narrow(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.fptrunc(args[0], _vector(types.float32))


@_defines(broadcast, types.Float, returns=Lanes)
def _broadcast(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return _splat(builder, args[0], _vector(sig.args[0]))


def _row_pointer(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), _vector(array_type.dtype).as_pointer())


@_defines(load, types.Array, types.Integer, returns=lambda array, start: Lanes(array.dtype))
def _load(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    row = builder.load(_row_pointer(context, builder, sig.args[0], *args))
    row.align = sig.args[0].dtype.bitwidth // 8
    return row


@_defines(store, types.Array, types.Integer, Lanes, returns=lambda array, start, lanes: types.void)
def _store(context: Any, builder: Any, sig: Any, args: Any) -> None:
    done = builder.store(args[2], _row_pointer(context, builder, sig.args[0], *args[:2]))
    done.align = sig.args[0].dtype.bitwidth // 8


@_defines(select, Mask, Lanes, Lanes, returns=lambda mask, lanes, other: lanes)
def _select(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.select(*args)


@_defines(every, Mask, returns=lambda mask: types.boolean)
def _every(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    bits = ir.IntType(LANES)
    return builder.icmp_unsigned("==", builder.bitcast(args[0], bits), ir.Constant(bits, -1))


@_defines(fma, Lanes, Lanes, Lanes, returns=lambda a, b, c: a)
def _fma(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return _call(builder, "fma", list(args))


@_defines(sqrt, Lanes, returns=lambda lanes: lanes)
def _sqrt(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return _call(builder, "sqrt", list(args))


@_defines(reciprocal_sqrt, Lanes, returns=lambda lanes: lanes)
def _reciprocal_sqrt(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    vector = args[0].type
    one = _splat(builder, ir.Constant(vector.element, 1.0), vector)
    return builder.fdiv(one, _call(builder, "sqrt", list(args), ("fast",)), flags=("fast",))


@_defines(absolute, Lanes, returns=lambda lanes: lanes)
def _absolute(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return _call(builder, "fabs", list(args))


@_defines(maximum, Lanes, Lanes, returns=lambda a, b: a)
def _maximum(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", *args), *args)


@_defines(minimum, Lanes, Lanes, returns=lambda a, b: a)
def _minimum(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", *args), *args)


@_defines(power_of_two, Lanes, returns=lambda lanes: lanes)
def _power_of_two(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    single = sig.args[0].dtype == types.float32
    bits = ir.IntType(32 if single else 64)
    integers = ir.VectorType(bits, LANES)
    exponent = ir.Constant(bits, 0x7F800000 if single else 0x7FF0000000000000)
    masked = builder.and_(builder.bitcast(args[0], integers), _splat(builder, exponent, integers))
    return builder.bitcast(masked, args[0].type)


# Blocks in memory -------------------------------------------------------------------------------------------------
# Addresses are bytes, one per lane, in an int64 array. `like` is any array of the element type.


def _c_type(like: Any) -> Any:
    return ctypes.c_float if like.itemsize == 4 else ctypes.c_double


def _at(address: int, like: Any) -> Any:
    return _c_type(like).from_address(int(address))


def gather(addresses: Any, offset: int, like: Any) -> Any:
    """One number per lane, from its address plus `offset` bytes."""
    return np.array([_at(addresses[lane] + offset, like).value for lane in range(LANES)], dtype=like.dtype)


def scatter(addresses: Any, offset: int, lanes: Any) -> None:
    """One number per lane, to its address plus `offset` bytes."""
    for lane in range(lanes.size):
        _at(addresses[lane] + offset, lanes).value = lanes[lane]


def load_row(address: int, like: Any) -> Any:
    """A row of lanes that lies side by side in memory."""
    return gather([address + lane * like.itemsize for lane in range(LANES)], 0, like)


def store_row(address: int, lanes: Any) -> None:
    """A row of lanes side by side into memory."""
    scatter([address + lane * lanes.itemsize for lane in range(lanes.size)], 0, lanes)


def load_part(address: int, first: int, last: int, others: Any) -> Any:
    """Lanes [first, last) of a row at an address, the other lanes from `others`; nothing else of the row is read."""
    row = others.copy()
    for lane in range(first, last):
        row[lane] = _at(address + lane * others.itemsize, others).value
    return row


def store_part(address: int, first: int, last: int, lanes: Any) -> None:
    """Lanes [first, last) of a row into memory at an address; nothing else there is written."""
    for lane in range(first, last):
        _at(address + lane * lanes.itemsize, lanes).value = lanes[lane]


TURN = 16
"""Entries that `turn_in` and `turn_out` move at once."""


def turn_in(addresses: Any, offset: int, array: Any, start: int) -> None:
    """Entries 0..15 at each lane's address + `offset`, turned into 16 rows of lanes at array[start:]."""
    for entry in range(TURN):
        store(array, start + entry * LANES, gather(addresses, offset + entry * array.itemsize, array))


def turn_out(addresses: Any, offset: int, array: Any, start: int) -> None:
    """The inverse of `turn_in`."""
    for entry in range(TURN):
        scatter(addresses, offset + entry * array.itemsize, load(array, start + entry * LANES))


def turn_few_in(addresses: Any, count: int, array: Any) -> None:
    """`turn_in` for `count` < 16 entries, into the array's first rows. Nothing past them is read or written."""
    for entry in range(count):
        store(array, entry * LANES, gather(addresses, entry * array.itemsize, array))


def turn_few_out(addresses: Any, count: int, array: Any) -> None:
    """The inverse of `turn_few_in`."""
    for entry in range(count):
        scatter(addresses, entry * array.itemsize, load(array, entry * LANES))


def turn_onto(addresses: Any, offset: int, count: int, array: Any, scales: Any) -> None:
    """`count` <= 16 rows from the array's first on, turned and added: memory ← scale · memory + row, a scale a lane."""
    for entry in range(count):
        at = offset + entry * array.itemsize
        old = gather(addresses, at, array)
        scatter(addresses, at, scales[:LANES] * old + load(array, entry * LANES))


def rows_at(address: int, rows: int, like: Any) -> Any:
    """So many rows of lanes at an address, as an array."""
    return np.ctypeslib.as_array((_c_type(like) * (rows * LANES)).from_address(int(address)))


@overload(rows_at)
def _rows_at(address: Any, rows: Any, like: Any) -> Any:
    real = np.float32 if like.dtype == types.float32 else np.float64

    def at(address: Any, rows: Any, like: Any) -> Any:
        return carray(pointer(address), (rows * LANES,), real)

    return at


def _pointers(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, vector: ir.VectorType) -> Any:
    """<count x pointer> from the int64 array of addresses, shifted by `offset` bytes."""
    data = context.make_array(array_type)(context, builder, array).data
    integers = ir.VectorType(_INT64, vector.count)
    loaded = builder.load(builder.bitcast(data, integers.as_pointer()))
    loaded.align = 8
    shifted = builder.add(loaded, _splat(builder, offset, integers))
    return builder.inttoptr(shifted, ir.VectorType(vector.element.as_pointer(), vector.count))


def _masked(builder: Any, verb: str, vector: ir.VectorType, args: list[Any], pointers: Any, returns: Any) -> Any:
    true = ir.Constant(ir.VectorType(_BOOL, vector.count), [1] * vector.count)
    full = [
        *args,
        pointers,
        _alignment(vector),
        true,
        *([ir.Constant(vector, ir.Undefined)] if verb == "gather" else []),
    ]
    name = f"llvm.masked.{verb}.v{vector.count}{_SUFFIXES[str(vector.element)]}.v{vector.count}p0"
    kind = ir.FunctionType(returns, [arg.type for arg in full])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), full)


@_defines(gather, types.Array, types.Integer, types.Array, returns=lambda addresses, offset, like: Lanes(like.dtype))
def _gather(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    vector = _vector(sig.args[2].dtype)
    pointers = _pointers(context, builder, sig.args[0], args[0], args[1], vector)
    return _masked(builder, "gather", vector, [], pointers, vector)


@_defines(scatter, types.Array, types.Integer, Lanes, returns=lambda addresses, offset, lanes: types.void)
def _scatter(context: Any, builder: Any, sig: Any, args: Any) -> None:
    vector = args[2].type
    pointers = _pointers(context, builder, sig.args[0], args[0], args[1], vector)
    _masked(builder, "scatter", vector, [args[2]], pointers, ir.VoidType())


@_defines(load_row, types.Integer, types.Array, returns=lambda address, like: Lanes(like.dtype))
def _load_row(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    row = builder.load(builder.inttoptr(args[0], _vector(sig.args[1].dtype).as_pointer()))
    row.align = sig.args[1].dtype.bitwidth // 8
    return row


@_defines(store_row, types.Integer, Lanes, returns=lambda address, lanes: types.void)
def _store_row(context: Any, builder: Any, sig: Any, args: Any) -> None:
    done = builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()))
    done.align = sig.args[1].dtype.bitwidth // 8


def _between(builder: Any, first: Any, last: Any) -> Any:
    """The mask of lanes [first, last)."""
    kind = ir.VectorType(_INT32, LANES)
    numbers = ir.Constant(kind, list(range(LANES)))
    low, high = (_splat(builder, builder.trunc(bound, _INT32), kind) for bound in (first, last))
    return builder.and_(builder.icmp_signed(">=", numbers, low), builder.icmp_signed("<", numbers, high))


_PART = (types.Integer, types.Integer, types.Integer, Lanes)


@_defines(load_part, *_PART, returns=lambda address, first, last, others: others)
def _load_part(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    address, first, last, others = args
    place = builder.inttoptr(address, others.type.as_pointer())
    return _masked_load(builder, others.type, place, _between(builder, first, last), others)


@_defines(store_part, *_PART, returns=lambda address, first, last, lanes: types.void)
def _store_part(context: Any, builder: Any, sig: Any, args: Any) -> None:
    address, first, last, row = args
    _masked_store(builder, row, builder.inttoptr(address, row.type.as_pointer()), _between(builder, first, last))


def prefetch(address: int) -> None:
    """Ask for the cache line at an address, any address, without waiting for it."""


@_defines(prefetch, types.Integer, returns=lambda address: types.void)
def _prefetch(context: Any, builder: Any, sig: Any, args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    options = [ir.Constant(_INT32, value) for value in (0, 3, 1)]  # to read, into all levels, data
    builder.call(function, [builder.inttoptr(args[0], ir.IntType(8).as_pointer()), *options])


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """The transpose of a 16 × 16 square held in 16 vectors: four rounds that swap ever larger off-diagonal squares."""
    kind = ir.VectorType(_INT32, TURN)
    for step in (1, 2, 4, 8):
        low = ir.Constant(kind, [i if not i & step else TURN + i - step for i in range(TURN)])
        high = ir.Constant(kind, [i + step if not i & step else TURN + i for i in range(TURN)])
        turned = list(rows)
        for i in range(TURN):
            if not i & step:
                turned[i] = builder.shuffle_vector(rows[i], rows[i + step], low)
                turned[i + step] = builder.shuffle_vector(rows[i], rows[i + step], high)
        rows = turned
    return rows


def _square(context: Any, builder: Any, sig: Any, args: Any, inward: bool) -> None:
    """Move 16 entries of each lane between the lanes' addresses and rows of an array, 16 lanes at a time."""
    dtype = sig.args[2].dtype
    size = dtype.bitwidth // 8
    square = ir.VectorType(_ELEMENTS[dtype], TURN)
    addresses = context.make_array(sig.args[0])(context, builder, args[0]).data
    data = context.make_array(sig.args[2])(context, builder, args[2]).data
    for group in range(0, LANES, TURN):
        outside, inside = [], []
        for i in range(TURN):
            lane = builder.load(builder.gep(addresses, [ir.Constant(_INT64, group + i)]))
            outside.append(builder.inttoptr(builder.add(lane, args[1]), square.as_pointer()))
            row = builder.gep(data, [builder.add(args[3], ir.Constant(_INT64, i * LANES + group))])
            inside.append(builder.bitcast(row, square.as_pointer()))
        source, target = (outside, inside) if inward else (inside, outside)
        rows = [builder.load(pointer) for pointer in source]
        for row in rows:
            row.align = size
        for row, pointer in zip(_turned(builder, rows), target, strict=True):
            builder.store(row, pointer).align = size


def _first(builder: Any, count: Any) -> Any:
    """The mask of the first `count` of 16."""
    numbers = ir.VectorType(_INT64, TURN)
    return builder.icmp_signed("<", ir.Constant(numbers, list(range(TURN))), _splat(builder, count, numbers))


def _few(context: Any, builder: Any, sig: Any, args: Any, inward: bool) -> None:
    """`_square` for the first `count` entries: all memory past them is masked out."""
    dtype = sig.args[2].dtype
    square = ir.VectorType(_ELEMENTS[dtype], TURN)
    addresses = context.make_array(sig.args[0])(context, builder, args[0]).data
    data = context.make_array(sig.args[2])(context, builder, args[2]).data
    few = _first(builder, args[1])
    for group in range(0, LANES, TURN):
        outside, inside = [], []
        for i in range(TURN):
            lane = builder.load(builder.gep(addresses, [ir.Constant(_INT64, group + i)]))
            outside.append((builder.inttoptr(lane, square.as_pointer()), few))
            row = builder.gep(data, [ir.Constant(_INT64, i * LANES + group)])
            whole = _splat(builder, builder.extract_element(few, ir.Constant(_INT32, i)), few.type)
            inside.append((builder.bitcast(row, square.as_pointer()), whole))
        source, target = (outside, inside) if inward else (inside, outside)
        rows = [_masked_load(builder, square, place, mask) for place, mask in source]
        for row, (place, mask) in zip(_turned(builder, rows), target, strict=True):
            _masked_store(builder, row, place, mask)


@_defines(
    turn_onto, types.Array, types.Integer, types.Integer, types.Array, types.Array, returns=lambda *args: types.void
)
def _turn_onto(context: Any, builder: Any, sig: Any, args: Any) -> None:
    _, offset, count, _, _ = args
    square = ir.VectorType(_ELEMENTS[sig.args[3].dtype], TURN)
    addresses, rows, scales = (context.make_array(sig.args[i])(context, builder, args[i]).data for i in (0, 3, 4))

    def add(few: Any) -> None:
        for group in range(0, LANES, TURN):
            loaded = []
            for i in range(TURN):
                row = builder.gep(rows, [ir.Constant(_INT64, i * LANES + group)])
                loaded.append(builder.load(builder.bitcast(row, square.as_pointer())))
                loaded[-1].align = _bytes(square)
            for i, row in enumerate(_turned(builder, loaded)):
                lane = ir.Constant(_INT64, group + i)
                address = builder.add(builder.load(builder.gep(addresses, [lane])), offset)
                place = builder.inttoptr(address, square.as_pointer())
                scale = _splat(builder, builder.load(builder.gep(scales, [lane])), square)
                if few is None:
                    old = builder.load(place)
                    old.align = _bytes(square)
                    builder.store(_call(builder, "fma", [scale, old, row]), place).align = _bytes(square)
                else:
                    old = _masked_load(builder, square, place, few)
                    _masked_store(builder, _call(builder, "fma", [scale, old, row]), place, few)

    # Memory is masked only where it must be: without AVX-512 that is one branch for each number.
    with builder.if_else(builder.icmp_signed("==", count, ir.Constant(count.type, TURN))) as (whole, part):
        with whole:
            add(None)
        with part:
            add(_first(builder, count))


def _masked_load(builder: Any, vector: ir.VectorType, place: Any, mask: Any, others: Any = None) -> Any:
    blank = ir.Constant(vector, [0.0] * vector.count) if others is None else others
    return _masked_access(builder, "load", vector, vector, [place, _alignment(vector), mask, blank])


def _masked_store(builder: Any, row: Any, place: Any, mask: Any) -> None:
    _masked_access(builder, "store", ir.VoidType(), row.type, [row, place, _alignment(row.type), mask])


def _masked_access(builder: Any, verb: str, returns: Any, vector: ir.VectorType, values: list[Any]) -> Any:
    name = f"llvm.masked.{verb}.v{vector.count}{_SUFFIXES[str(vector.element)]}.p0"
    kind = ir.FunctionType(returns, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _bytes(vector: ir.VectorType) -> int:
    return 4 if _SUFFIXES[str(vector.element)] == "f32" else 8


def _alignment(vector: ir.VectorType) -> Any:
    return ir.Constant(_INT32, _bytes(vector))


_FEW = (types.Array, types.Integer, types.Array)


@_defines(turn_few_in, *_FEW, returns=lambda *args: types.void)
def _turn_few_in(context: Any, builder: Any, sig: Any, args: Any) -> None:
    _few(context, builder, sig, args, inward=True)


@_defines(turn_few_out, *_FEW, returns=lambda *args: types.void)
def _turn_few_out(context: Any, builder: Any, sig: Any, args: Any) -> None:
    _few(context, builder, sig, args, inward=False)


_SQUARE = (types.Array, types.Integer, types.Array, types.Integer)


@_defines(turn_in, *_SQUARE, returns=lambda *args: types.void)
def _turn_in(context: Any, builder: Any, sig: Any, args: Any) -> None:
    _square(context, builder, sig, args, inward=True)


@_defines(turn_out, *_SQUARE, returns=lambda *args: types.void)
def _turn_out(context: Any, builder: Any, sig: Any, args: Any) -> None:
    _square(context, builder, sig, args, inward=False)


# Threads ----------------------------------------------------------------------------------------------------------


def pointer(address: int) -> Any:
    """An address as a pointer, for `numba.carray`."""
    return ctypes.c_void_p(address)


def take_ticket(array: Any, index: int) -> int:
    """array[index], and add one to it, in one step that no other thread can divide."""
    ticket = int(array[index])
    array[index] += 1
    return ticket


@_defines(pointer, types.Integer, returns=lambda address: types.voidptr)
def _pointer(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], ir.IntType(8).as_pointer())


@_defines(take_ticket, types.Array, types.Integer, returns=lambda array, index: types.int64)
def _take_ticket(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    data = context.make_array(sig.args[0])(context, builder, args[0]).data
    one = ir.Constant(_INT64, 1)
    return builder.atomic_rmw("add", builder.gep(data, [args[1]]), one, ordering="monotonic")
