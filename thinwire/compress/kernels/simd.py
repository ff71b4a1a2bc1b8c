"""Sixteen floats as one value inside a numba function, compiled to whatever SIMD the processor has.

numba's own vectoriser does not find the packing of signs into bits; LLVM does once it is written in vectors,
and it splits them by itself where registers are narrower than 512 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

__all__ = [
    "LANES",
    "Scalar",
    "Vector",
    "absolute",
    "add",
    "broadcast",
    "clamp",
    "divide",
    "drain_streams",
    "load",
    "load_bits",
    "load_int8",
    "load_scalar",
    "maximum",
    "multiply",
    "nearest",
    "nonnegative",
    "reduce_max",
    "reduce_sum",
    "select",
    "store",
    "store_bits",
    "store_int8",
    "store_scalar",
    "stream",
    "subtract",
]

LANES = 16

_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)
_VECTOR_BYTES = 4 * LANES


class _Float32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


@register_model(_Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _FLOATS)  # type: ignore[no-untyped-call]


_vector = _Float32x16()

# What a type checker sees of numba's values.
Vector = Any
Scalar = Any


def _intrinsic(define: Callable[..., Any]) -> Any:
    """Decorator of numba, typed by what compiled code may do with the result: call it."""
    return intrinsic(define)


def _unary(build: Callable[..., Any], argument: Any = _vector, result: Any = _vector) -> Any:
    """Intrinsic of one value, from `build(builder, value)`."""

    @_intrinsic
    def operation(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return build(builder, *values)

        return result(argument), generate

    return operation


def _binary(build: Callable[..., Any]) -> Any:
    """Intrinsic of two vectors, from `build(builder, left, right)`."""

    @_intrinsic
    def operation(typing_context: Any, left: Any, right: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return build(builder, *values)

        return _vector(_vector, _vector), generate

    return operation


def _call(builder: Any, name: str, value: Any) -> Any:
    """Call of the LLVM intrinsic `name`, which maps one vector to another."""
    function_type = ir.FunctionType(_FLOATS, [_FLOATS])
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, function_type, f"{name}.v{LANES}f32"
    )
    return builder.call(function, [value])


def _splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, single, ir.Constant(_INTS, None))


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes pairwise, in an order that no processor or compiler flag changes."""
    width = LANES
    while width > 1:
        width //= 2
        positions = ir.VectorType(ir.IntType(32), width)
        low = builder.shuffle_vector(vector, vector, ir.Constant(positions, list(range(width))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(positions, list(range(width, 2 * width))))
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _maximum(builder: Any, left: Any, right: Any) -> Any:
    bits = ir.VectorType(ir.IntType(32), left.type.count)
    left_bits, right_bits = builder.bitcast(left, bits), builder.bitcast(right, bits)
    return builder.select(builder.icmp_unsigned(">", left_bits, right_bits), left, right)


def _nonnegative(builder: Any, value: Any) -> Any:
    zero = ir.Constant(_FLOATS, [0.0] * LANES)
    return builder.bitcast(builder.fcmp_ordered(">=", value, zero), ir.IntType(16))


broadcast = _unary(_splat, argument=types.float32)
add = _binary(lambda builder, left, right: builder.fadd(left, right))
subtract = _binary(lambda builder, left, right: builder.fsub(left, right))
multiply = _binary(lambda builder, left, right: builder.fmul(left, right))
divide = _binary(lambda builder, left, right: builder.fdiv(left, right))
absolute = _unary(lambda builder, value: _call(builder, "llvm.fabs", value))
# To the nearest integer, ties to even.
nearest = _unary(lambda builder, value: _call(builder, "llvm.rint", value))
# The larger of two values >= 0; NaN if either is NaN. Bits of such floats order as integers, NaN on top, and
# that comparison is one instruction where the floating-point one with this treatment of NaN takes five.
maximum = _binary(_maximum)
# Bit k is set where lane k is >= 0: -0.0 counts, NaN does not.
nonnegative = _unary(_nonnegative, result=types.uint16)
reduce_sum = _unary(lambda builder, value: _fold(builder, value, builder.fadd), result=types.float32)
reduce_max = _unary(
    lambda builder, value: _fold(builder, value, functools.partial(_maximum, builder)), result=types.float32
)


@_intrinsic
def select(typing_context: Any, bits: Any, where_set: Any, where_clear: Any) -> Any:
    """Lane k of the first vector where bit k is set, of the second elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(builder.bitcast(values[0], _BITS), values[1], values[2])

    return _vector(types.uint16, _vector, _vector), generate


@_intrinsic
def clamp(typing_context: Any, value: Any, bottom: Any, top: Any) -> Any:
    """Bring `value`, not NaN, into [bottom, top]."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value, bottom, top = values
        value = builder.select(builder.fcmp_ordered("<", value, top), value, top)
        return builder.select(builder.fcmp_ordered(">", value, bottom), value, bottom)

    return _vector(_vector, _vector, _vector), generate


@_intrinsic
def drain_streams(typing_context: Any) -> Any:
    """Order streamed stores, which bypass the cache, before whatever tells other threads about them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, memory: Any) -> Any:
    """Address of array[index] as a pointer to the LLVM type `memory`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), memory.as_pointer())


def _unchanged(builder: Any, value: Any) -> Any:
    return value


def _loader(memory: Any, result: Any, convert: Callable[[Any, Any], Any] = _unchanged) -> Any:
    """Intrinsic (array, index) -> result: read `memory` at array[index], whatever its alignment."""

    @_intrinsic
    def operation(typing_context: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer = _pointer(context, builder, array, values[0], values[1], memory)
            return convert(builder, builder.load(pointer, align=1))

        return result(array, types.intp), generate

    return operation


def _storer(memory: Any, stored: Any, convert: Callable[[Any, Any], Any] = _unchanged, streamed: bool = False) -> Any:
    """Intrinsic (array, index, value): write `memory` at array[index]; `streamed` stores must be aligned."""

    @_intrinsic
    def operation(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer = _pointer(context, builder, array, values[0], values[1], memory)
            store = builder.store(convert(builder, values[2]), pointer, align=_VECTOR_BYTES if streamed else 1)
            if streamed:
                one = ir.Constant(ir.IntType(32), 1)
                store.set_metadata("nontemporal", builder.module.add_metadata([one]))
            return context.get_dummy_value()

        return types.void(array, types.intp, stored), generate

    return operation


load = _loader(_FLOATS, _vector)
load_scalar = _loader(_FLOAT, types.float32)
load_bits = _loader(ir.IntType(16), types.uint16)
load_int8 = _loader(_BYTES, _vector, lambda builder, value: builder.sitofp(value, _FLOATS))
store = _storer(_FLOATS, _vector)
stream = _storer(_FLOATS, _vector, streamed=True)
store_scalar = _storer(_FLOAT, types.float32)
store_bits = _storer(ir.IntType(16), types.uint16)
store_int8 = _storer(_BYTES, _vector, lambda builder, value: builder.trunc(builder.fptosi(value, _INTS), _BYTES))
