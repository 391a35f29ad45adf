"""Defines operators and functions from rows of lanes to rows of lanes."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from blockadapt.kernels.cpu.simd.types import LANES, Lanes, Mask, call, defines, splat, suffix, vector_of

# Operators --------------------------------------------------------------------------------------------------------


def _same(a: Any, b: Any) -> Any:
    return a if a == b else None


def _arithmetic(op: Any, name: str) -> None:
    """Define an operator between two rows, or a row and a number, which counts as a row of its own type."""

    @defines(op, Lanes, Lanes, returns=_same)
    def _(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, name)(*args)

    def with_number(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.return_type.dtype
        rows = [
            arg
            if isinstance(kind, Lanes)
            else splat(builder, context.cast(builder, arg, kind, dtype), vector_of(dtype))
            for arg, kind in zip(args, sig.args, strict=True)
        ]
        return getattr(builder, name)(*rows)

    defines(op, Lanes, types.Number, returns=lambda row, number: row)(with_number)
    defines(op, types.Number, Lanes, returns=lambda number, row: row)(with_number)


def _comparison(op: Any, symbol: str) -> None:
    @defines(op, Lanes, Lanes, returns=lambda a, b: Mask() if a == b else None)
    def _(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fcmp_ordered(symbol, *args)


def _logic(op: Any, name: str, arity: int) -> None:
    @defines(op, *[Mask] * arity, returns=lambda *masks: masks[0])
    def _(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, name)(*args)


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")
_arithmetic(operator.truediv, "fdiv")
_comparison(operator.lt, "<")
_comparison(operator.le, "<=")
_comparison(operator.eq, "==")
_logic(operator.and_, "and_", 2)
_logic(operator.or_, "or_", 2)
_logic(operator.invert, "not_", 1)


@defines(operator.neg, Lanes, returns=lambda lanes: lanes)
def _neg(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.fneg(args[0])


# Functions --------------------------------------------------------------------------------------------------------


def broadcast(value: Any) -> Any:
    """Put the same number into every lane."""
    return np.full(LANES, value)


def select(mask: Any, lanes: Any, other: Any) -> Any:
    """Take `lanes` where the mask is true, `other` elsewhere."""
    return np.where(mask, lanes, other)


def all_lanes(mask: Any) -> bool:
    """Say whether the mask is true in all lanes."""
    return bool(np.all(mask))


def fma(a: Any, b: Any, c: Any) -> Any:
    """Compute a · b + c, rounded once where compiled."""
    return a * b + c


def sqrt(lanes: Any) -> Any:
    """Compute √x, correctly rounded."""
    return np.sqrt(lanes)


def reciprocal_sqrt(lanes: Any) -> Any:
    """Compute 1/√x to within two units in the last place: float32 uses the estimate instruction and a Newton step."""
    return (1 / np.sqrt(lanes)).astype(lanes.dtype)


def reciprocal(lanes: Any) -> Any:
    """Compute 1/x to within two units in the last place: float32 uses the estimate instruction and a Newton step."""
    return (1 / lanes).astype(lanes.dtype)


def absolute(lanes: Any) -> Any:
    """Compute |x|."""
    return np.abs(lanes)


def maximum(a: Any, b: Any) -> Any:
    """Take the larger of two; the second where one is NaN."""
    return np.where(a > b, a, b)


def minimum(a: Any, b: Any) -> Any:
    """Take the smaller of two; the second where one is NaN."""
    return np.where(a < b, a, b)


def power_of_two(lanes: Any) -> Any:
    """Find the largest power of two that is at most x, for normal x > 0."""
    return np.ldexp(np.ones_like(lanes), np.frexp(lanes)[1] - 1)


def total(lanes: Any) -> float:
    """Add up all lanes, in one order that the processor likes."""
    return float(np.sum(lanes))


def widen(lanes: Any) -> Any:
    """Convert lanes to float64."""
    return lanes.astype(np.float64)


def narrow(lanes: Any, like: Any) -> Any:
    """Convert float64 lanes to this array's type."""
    return lanes.astype(like.dtype)


@defines(widen, Lanes, returns=lambda lanes: Lanes(types.float64))
def _widen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return args[0] if sig.args[0].dtype == types.float64 else builder.fpext(args[0], vector_of(types.float64))


@defines(narrow, Lanes, types.Array, returns=lambda lanes, like: Lanes(like.dtype))
def _narrow(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    dtype = sig.args[1].dtype
    return args[0] if dtype == types.float64 else builder.fptrunc(args[0], vector_of(dtype))


@defines(broadcast, types.Float, returns=Lanes)
def _broadcast(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return splat(builder, args[0], vector_of(sig.args[0]))


@defines(select, Mask, Lanes, Lanes, returns=lambda mask, lanes, other: _same(lanes, other))
def _select(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.select(*args)


@defines(all_lanes, Mask, returns=lambda mask: types.boolean)
def _all_lanes(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    bits = ir.IntType(LANES)
    return builder.icmp_unsigned("==", builder.bitcast(args[0], bits), ir.Constant(bits, -1))


@defines(total, Lanes, returns=lambda lanes: lanes.dtype)
def _total(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    vector = args[0].type
    kind = ir.FunctionType(vector.element, [vector.element, vector])
    name = f"llvm.vector.reduce.fadd.{suffix(vector)}"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [ir.Constant(vector.element, 0.0), args[0]], fastmath=("reassoc",))


@defines(fma, Lanes, Lanes, Lanes, returns=lambda a, b, c: a if a == b == c else None)
def _fma(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return call(builder, "fma", list(args))


@defines(sqrt, Lanes, returns=lambda lanes: lanes)
def _sqrt(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return call(builder, "sqrt", list(args))


@defines(reciprocal_sqrt, Lanes, returns=lambda lanes: lanes)
def _reciprocal_sqrt(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    vector = args[0].type
    one = splat(builder, ir.Constant(vector.element, 1.0), vector)
    return builder.fdiv(one, call(builder, "sqrt", list(args), ("fast",)), flags=("fast",))


@defines(reciprocal, Lanes, returns=lambda lanes: lanes)
def _reciprocal(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    vector = args[0].type
    return builder.fdiv(splat(builder, ir.Constant(vector.element, 1.0), vector), args[0], flags=("fast",))


@defines(absolute, Lanes, returns=lambda lanes: lanes)
def _absolute(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return call(builder, "fabs", list(args))


@defines(maximum, Lanes, Lanes, returns=_same)
def _maximum(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", *args), *args)


@defines(minimum, Lanes, Lanes, returns=_same)
def _minimum(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", *args), *args)


@defines(power_of_two, Lanes, returns=lambda lanes: lanes)
def _power_of_two(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    single = sig.args[0].dtype == types.float32
    bits = ir.IntType(32 if single else 64)
    integers = ir.VectorType(bits, LANES)
    exponent = ir.Constant(bits, 0x7F800000 if single else 0x7FF0000000000000)
    masked = builder.and_(builder.bitcast(args[0], integers), splat(builder, exponent, integers))
    return builder.bitcast(masked, args[0].type)
