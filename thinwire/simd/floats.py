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

from thinwire.simd.building import (
    LANES,
    add_intrinsic,
    call,
    fused_multiply_add,
    loader,
    operation,
    select_by_bits,
    splat,
    storer,
    vector_type,
)

_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_PAIRS = ir.VectorType(ir.IntType(16), LANES // 2)
_HALF_BYTES = ir.VectorType(ir.IntType(8), LANES // 2)
_WORD = ir.IntType(64)
_VECTOR_BYTES = 4 * LANES

vector = vector_type("float32x16", _FLOATS)

# What a type checker sees of numba's values.
Vector = Any
Scalar = Any


def _binary(build: Callable[..., Any]) -> Any:
    return operation(build, vector, vector, vector)


def fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
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


def _compare(relation: str) -> Any:
    return operation(
        lambda builder, left, right: builder.bitcast(builder.fcmp_ordered(relation, left, right), ir.IntType(16)),
        types.uint16,
        vector,
        vector,
    )


def _from_nibbles(builder: Any, packed: Any) -> Any:
    """Sixteen numbers of 4 bits in two's complement, the first of two in the lower half of their byte."""
    pairs = builder.zext(packed, _PAIRS)
    low = builder.and_(pairs, ir.Constant(_PAIRS, [0x0F] * 8))
    high = builder.shl(builder.and_(pairs, ir.Constant(_PAIRS, [0xF0] * 8)), ir.Constant(_PAIRS, [4] * 8))
    nibbles = builder.bitcast(builder.or_(low, high), _BYTES)
    eights = ir.Constant(_BYTES, [8] * LANES)
    return builder.sitofp(builder.sub(builder.xor(nibbles, eights), eights), _FLOATS)


def _to_nibbles(builder: Any, value: Any) -> Any:
    pairs = builder.bitcast(builder.trunc(builder.fptosi(value, _INTS), _BYTES), _PAIRS)
    low = builder.and_(pairs, ir.Constant(_PAIRS, [0x0F] * 8))
    high = builder.and_(builder.lshr(pairs, ir.Constant(_PAIRS, [4] * 8)), ir.Constant(_PAIRS, [0xF0] * 8))
    return builder.trunc(builder.or_(low, high), _HALF_BYTES)


def _clamp(builder: Any, value: Any, bottom: Any, top: Any) -> Any:
    value = builder.select(builder.fcmp_ordered("<", value, top), value, top)
    return builder.select(builder.fcmp_ordered(">", value, bottom), value, bottom)


broadcast = operation(splat, vector, types.float32)
add = _binary(lambda builder, left, right: builder.fadd(left, right))
subtract = _binary(lambda builder, left, right: builder.fsub(left, right))
multiply = _binary(lambda builder, left, right: builder.fmul(left, right))
divide = _binary(lambda builder, left, right: builder.fdiv(left, right))
absolute = operation(lambda builder, value: call(builder, "llvm.fabs", value), vector, vector)
# To the nearest integer, ties to even.
nearest = operation(lambda builder, value: call(builder, "llvm.rint", value), vector, vector)
# The larger of two values >= 0; NaN if either is NaN. Bits of such floats order as integers, NaN on top, and
# that comparison is one instruction where the floating-point one with this treatment of NaN takes five.
maximum = _binary(_maximum)
# Bit k is set where lane k is >= 0: -0.0 counts, NaN does not.
nonnegative = operation(_nonnegative, types.uint16, vector)
# Bit k is set where lane k is NaN.
not_a_number = operation(
    lambda builder, value: builder.bitcast(builder.fcmp_unordered("uno", value, value), ir.IntType(16)),
    types.uint16,
    vector,
)
# Rounded to the nearest, as IEEE 754 says.
square_root = operation(lambda builder, value: call(builder, "llvm.sqrt", value), vector, vector)
reduce_sum = operation(lambda builder, value: fold(builder, value, builder.fadd), types.float32, vector)
reduce_max = operation(
    lambda builder, value: fold(builder, value, functools.partial(_maximum, builder)), types.float32, vector
)
# left * right + added, rounded once.
multiply_add = operation(fused_multiply_add, vector, vector, vector, vector)
# The larger of two values; the second where the first is NaN.
larger = _binary(lambda builder, left, right: builder.select(builder.fcmp_ordered(">", left, right), left, right))
# Bit k is set where lane k of the first is equal to, below, or at least that of the second; NaN is none of these.
equal = _compare("==")
below = _compare("<")
at_least = _compare(">=")
count_bits = operation(lambda builder, bits: builder.zext(builder.ctpop(bits), _WORD), types.int64, types.uint16)
# Lane k of the first vector where bit k is set, of the second elsewhere.
select = operation(select_by_bits, vector, types.uint16, vector, vector)
# A value that is not NaN, brought into [bottom, top].
clamp = operation(_clamp, vector, vector, vector, vector)


@add_intrinsic
def drain_streams(typing_context: Any) -> Any:
    """Order streamed stores, which bypass the cache, before whatever tells other threads about them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


load = loader(_FLOATS, vector)
load_scalar = loader(_FLOAT, types.float32)
load_bits = loader(ir.IntType(16), types.uint16)
load_int4 = loader(_HALF_BYTES, vector, _from_nibbles)
load_int8 = loader(_BYTES, vector, lambda builder, value: builder.sitofp(value, _FLOATS))
store = storer(_FLOATS, vector)
stream = storer(_FLOATS, vector, aligned=_VECTOR_BYTES)
store_scalar = storer(_FLOAT, types.float32)
store_bits = storer(ir.IntType(16), types.uint16)
store_int4 = storer(_HALF_BYTES, vector, _to_nibbles)
store_int8 = storer(_BYTES, vector, lambda builder, value: builder.trunc(builder.fptosi(value, _INTS), _BYTES))
