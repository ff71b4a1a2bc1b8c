"""Sixteen unsigned 32-bit integers as one value inside a numba function: for the bits of floats, for floats of 16 bits,
with which numba cannot calculate, and for random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from thinwire.simd import building, floats
from thinwire.simd.building import LANES, add_intrinsic, loader, operation, pointer, select_by_bits, splat, storer
from thinwire.simd.compiling import helper

_INT = ir.IntType(32)
_WORD = ir.IntType(64)
_INTS = ir.VectorType(_INT, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)

_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint32(16), np.uint32(15), np.uint32(16)
_FACTOR_1, _FACTOR_2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)

vector = building.vector_type("uint32x16", _INTS)

# What a type checker sees of numba's values.
Integers = Any


def _binary(build: Callable[..., Any]) -> Any:
    return operation(build, vector, vector, vector)


def _shift(build: Callable[..., Any]) -> Any:
    return operation(
        lambda builder, value, distance: build(builder, value, splat(builder, distance)),
        vector,
        vector,
        types.uint32,
    )


broadcast = operation(splat, vector, types.uint32)
# The value in the first lane, one more in each following one.
lanes = operation(
    lambda builder, first: builder.add(splat(builder, first), ir.Constant(_INTS, list(range(LANES)))),
    vector,
    types.uint32,
)
add = _binary(lambda builder, left, right: builder.add(left, right))
subtract = _binary(lambda builder, left, right: builder.sub(left, right))
multiply = _binary(lambda builder, left, right: builder.mul(left, right))
bit_xor = _binary(lambda builder, left, right: builder.xor(left, right))
bit_and = _binary(lambda builder, left, right: builder.and_(left, right))
bit_or = _binary(lambda builder, left, right: builder.or_(left, right))
shift_left = _shift(lambda builder, value, distance: builder.shl(value, distance))
shift_right = _shift(lambda builder, value, distance: builder.lshr(value, distance))
# Bit k is set where lane k of the first is below that of the second.
below = operation(
    lambda builder, left, right: builder.bitcast(builder.icmp_unsigned("<", left, right), ir.IntType(16)),
    types.uint16,
    vector,
    vector,
)
# Lane k of the first vector where bit k is set, of the second elsewhere.
select = operation(select_by_bits, vector, types.uint16, vector, vector)
# The same bits as another type, and the same value.
bits_of = operation(lambda builder, value: builder.bitcast(value, _INTS), vector, floats.vector)
as_floats = operation(lambda builder, value: builder.bitcast(value, _FLOATS), floats.vector, vector)
to_floats = operation(lambda builder, value: builder.uitofp(value, _FLOATS), floats.vector, vector)

load_8_bits = loader(_BYTES, vector, lambda builder, value: builder.zext(value, _INTS))
load_16_bits = loader(_SHORTS, vector, lambda builder, value: builder.zext(value, _INTS))
store_8_bits = storer(_BYTES, vector, lambda builder, value: builder.trunc(value, _BYTES))
store_16_bits = storer(_SHORTS, vector, lambda builder, value: builder.trunc(value, _SHORTS))


@add_intrinsic
def look_up(typing_context: Any, table: Any, codes: Any, index: Any) -> Any:
    """table[codes[index]], table[codes[index + 1]], ... for a table of floats and an array of bytes.

    Entry by entry, from codes taken out of two 64-bit words: gather instructions are slower on some processors.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        table_at, codes_at, at = values
        result = ir.Constant(_FLOATS, ir.Undefined)
        for lane in range(LANES):
            if lane % 8 == 0:
                place = builder.add(at, ir.Constant(at.type, lane))
                word = builder.load(pointer(context, builder, codes, codes_at, place, _WORD), align=1)
            code = builder.and_(builder.lshr(word, ir.Constant(_WORD, 8 * (lane % 8))), ir.Constant(_WORD, 0xFF))
            entry = pointer(context, builder, table, table_at, code, ir.FloatType())
            result = builder.insert_element(result, builder.load(entry), ir.Constant(_INT, lane))
        return result

    return floats.vector(table, codes, types.intp), generate


@helper
def mix(word: Integers) -> Integers:
    """Words that look drawn by chance, each another for each given: shifts and factors of lowbias32 (Wellons, 2018)."""
    word = bit_xor(word, shift_right(word, _SHIFT_1))
    word = multiply(word, broadcast(_FACTOR_1))
    word = bit_xor(word, shift_right(word, _SHIFT_2))
    word = multiply(word, broadcast(_FACTOR_2))
    return bit_xor(word, shift_right(word, _SHIFT_3))
