"""Makes a row of lanes and a mask types that Numba knows, and defines functions on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin

from blockadapt.kernels.layout import TILE

LANES = TILE

BOOL, INT32, INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
ELEMENTS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_SUFFIXES = {"float": "f32", "double": "f64"}


class Lanes(types.Type):
    """Holds one float per lane."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


class Mask(types.Type):
    """Holds one truth value per lane."""

    def __init__(self) -> None:
        super().__init__(name="Mask")


@register_default(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Lanes) -> None:
        super().__init__(dmm, fe_type, vector_of(fe_type.dtype))


@register_default(Mask)
class _MaskModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Mask) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(BOOL, LANES))


def defines(
    function: Callable[..., Any], *kinds: Any, returns: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Type `function` for arguments of these kinds and lower it with the decorated emitter.

    `returns` gives the type of the result from those of the arguments, or None where they do not go together. An
    emitter of a function without a result returns None.
    """

    @infer_global(function)
    class _Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            fits = not kws and len(args) == len(kinds) and all(map(isinstance, args, kinds))
            result = returns(*args) if fits else None
            return None if result is None else signature(result, *args)

    def register(emit: Callable[..., Any]) -> Callable[..., Any]:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            result = emit(context, builder, sig, args)
            return context.get_dummy_value() if result is None else result

        lower_builtin(function, *kinds)(lower)
        return emit

    return register


# Emitting LLVM ----------------------------------------------------------------------------------------------------


def vector_of(dtype: Any) -> ir.VectorType:
    """Make LLVM's type of a row of lanes."""
    return ir.VectorType(ELEMENTS[dtype], LANES)


def suffix(vector: ir.VectorType) -> str:
    """Name a vector type as LLVM does in the names of its intrinsics, such as v32f32."""
    return f"v{vector.count}{_SUFFIXES[str(vector.element)]}"


def item_bytes(vector: ir.VectorType) -> int:
    """Count the bytes of an element, which is all the alignment that memory has."""
    return 4 if isinstance(vector.element, ir.FloatType) else 8


def splat(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    """Put the same value into every element."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


def call(builder: Any, name: str, args: list[Any], flags: tuple[str, ...] = ()) -> Any:
    """Call the LLVM intrinsic `name` for vectors of one type."""
    vector = args[0].type
    kind = ir.FunctionType(vector, [vector] * len(args))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.{suffix(vector)}")
    return builder.call(function, args, fastmath=flags)


def data_of(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Get the pointer to an array's first element."""
    return context.make_array(array_type)(context, builder, array).data
