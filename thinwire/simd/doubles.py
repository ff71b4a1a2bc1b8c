"""Sums of squares of sixteen floats in float64, inside a numba function: squares of 1e-30 or 1e30 are no float32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from thinwire.simd import floats
from thinwire.simd.building import LANES, operation, vector_type

_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)

vector = vector_type("float64x16", _DOUBLES)

# What a type checker sees of numba's values.
Doubles = Any


def _add_squares(builder: Any, total: Any, value: Any) -> Any:
    wide = builder.fpext(value, _DOUBLES)
    return builder.fadd(total, builder.fmul(wide, wide))  # a float32's square is exact


# Zeros, whatever the argument is.
zeros = operation(lambda builder, value: ir.Constant(_DOUBLES, [0.0] * LANES), vector, floats.vector)
add = operation(lambda builder, left, right: builder.fadd(left, right), vector, vector, vector)
# The first plus the squares of the second.
add_squares = operation(_add_squares, vector, vector, floats.vector)
reduce_sum = operation(lambda builder, value: floats.fold(builder, value, builder.fadd), types.float64, vector)
