"""Gives Numba short vectors, one block a lane, so that each scalar step of an algorithm is one SIMD instruction.

    types        a row of lanes and a mask as Numba types, and how a function on them is defined
    arithmetic   operators and functions from rows to rows
    memory       rows in and out of arrays and addresses
    transpose    numbers that lie side by side in each block, to and from rows

Numba's own vectoriser has to prove that arrays do not overlap. For inner loops of 32 it guards each with a run-time
check and a scalar copy, which costs more than the loop and takes 15 s to compile. Here every value *is* a vector: LLVM
gets `<32 x float>` and `<32 x double>`, keeps them in registers and has nothing to prove.

Each function has two bodies. The Python one works on NumPy arrays, so a kernel's `.py_func` runs uncompiled; the
lowered one emits LLVM. A row is as many lanes as a tile has blocks.

The formula of a spectral function is written in the vocabulary of `arithmetic`: + − · / between rows or a row
and a number, comparisons, and `absolute`, `fma`, `maximum`, `minimum`, `reciprocal_sqrt`, `select`, `sqrt`.
"""

from blockadapt.kernels.cpu.simd.arithmetic import (
    absolute,
    all_lanes,
    broadcast,
    fma,
    maximum,
    minimum,
    narrow,
    power_of_two,
    reciprocal,
    reciprocal_sqrt,
    select,
    sqrt,
    total,
    widen,
)
from blockadapt.kernels.cpu.simd.memory import (
    array_at,
    gather,
    load,
    load_lanes,
    load_row,
    pointer,
    prefetch,
    rows_at,
    scatter,
    store,
    store_lanes,
    store_row,
    take_ticket,
)
from blockadapt.kernels.cpu.simd.transpose import (
    SQUARE,
    transpose_few_in,
    transpose_few_out,
    transpose_in,
    transpose_onto,
    transpose_out,
)
from blockadapt.kernels.cpu.simd.types import LANES

__all__ = [
    "LANES",
    "SQUARE",
    "absolute",
    "all_lanes",
    "array_at",
    "broadcast",
    "fma",
    "gather",
    "load",
    "load_lanes",
    "load_row",
    "maximum",
    "minimum",
    "narrow",
    "pointer",
    "power_of_two",
    "prefetch",
    "reciprocal",
    "reciprocal_sqrt",
    "rows_at",
    "scatter",
    "select",
    "sqrt",
    "store",
    "store_lanes",
    "store_row",
    "take_ticket",
    "total",
    "transpose_few_in",
    "transpose_few_out",
    "transpose_in",
    "transpose_onto",
    "transpose_out",
    "widen",
]
