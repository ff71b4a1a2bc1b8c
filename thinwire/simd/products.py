"""Matrix products with a few rows of sums in registers, for kernels that fuse several products on tiles which fit the
caches: calling a library for each would cost as much as it saves."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numpy.typing import NDArray

from thinwire.simd.building import LANES, add_intrinsic, fused_multiply_add, pointer, splat
from thinwire.simd.compiling import helper

__all__ = ["ROWS", "product", "product_where_nonzero"]

ROWS = 8
"""Rows of the result must be a multiple of this."""

_Floats = NDArray[np.float32]

_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_PLACE = ir.IntType(64)

# Sums that registers hold, rows x vectors: 16 of 32 with AVX-512, 8 of 16 (two for each vector) with AVX2.
_WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
_TALL, _WIDE = (4, 4) if _WIDE_REGISTERS else (4, 1)
_TALL_SLIM = 8 if _WIDE_REGISTERS else 4


def _tile(rows: int, vectors: int, accumulate: bool) -> Any:
    """Intrinsic: result[rows, vectors * LANES] (+)= left[rows, depth] @ right[depth, vectors * LANES], on flat arrays.

    Element (i, k) of `left` lies at left_at + i * left_row + k * left_step, row k of `right` at
    right_at + k * right_row.
    """

    @add_intrinsic
    def tile(
        typing_context: Any,
        left: Any,
        left_at: Any,
        left_row: Any,
        left_step: Any,
        right: Any,
        right_at: Any,
        right_row: Any,
        depth: Any,
        result: Any,
        result_at: Any,
        result_row: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            left, left_at, left_row, left_step, right, right_at, right_row, depth, result, result_at, result_row = (
                values
            )
            left_base = pointer(context, builder, signature.args[0], left, left_at, _FLOAT)
            right_base = pointer(context, builder, signature.args[4], right, right_at, _FLOAT)
            result_base = pointer(context, builder, signature.args[8], result, result_at, _FLOAT)

            def place(row: int, vector: int) -> Any:
                offset = builder.mul(result_row, ir.Constant(_PLACE, row))
                offset = builder.add(offset, ir.Constant(_PLACE, vector * LANES))
                return builder.bitcast(builder.gep(result_base, [offset]), _FLOATS.as_pointer())

            zeros = ir.Constant(_FLOATS, [0.0] * LANES)
            every = [(row, vector) for row in range(rows) for vector in range(vectors)]
            first = {one: builder.load(place(*one), align=4) if accumulate else zeros for one in every}
            before = builder.block
            loop, after = builder.append_basic_block("depth"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed(">", depth, ir.Constant(_PLACE, 0)), loop, after)

            builder.position_at_end(loop)
            step = builder.phi(_PLACE)
            sums = {one: builder.phi(_FLOATS) for one in every}
            right_at_step = builder.gep(right_base, [builder.mul(step, right_row)])
            loaded = []
            for vector in range(vectors):
                address = builder.gep(right_at_step, [ir.Constant(_PLACE, vector * LANES)])
                loaded.append(builder.load(builder.bitcast(address, _FLOATS.as_pointer()), align=4))
            left_at_step = builder.gep(left_base, [builder.mul(step, left_step)])
            added = {}
            for row in range(rows):
                address = builder.gep(left_at_step, [builder.mul(left_row, ir.Constant(_PLACE, row))])
                factor = splat(builder, builder.load(address, align=4))
                for vector in range(vectors):
                    added[row, vector] = fused_multiply_add(builder, factor, loaded[vector], sums[row, vector])
            following = builder.add(step, ir.Constant(_PLACE, 1))
            step.add_incoming(ir.Constant(_PLACE, 0), before)
            step.add_incoming(following, loop)
            for one in every:
                sums[one].add_incoming(first[one], before)
                sums[one].add_incoming(added[one], loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)

            builder.position_at_end(after)
            final = {one: builder.phi(_FLOATS) for one in every}
            for one in every:
                final[one].add_incoming(first[one], before)
                final[one].add_incoming(added[one], loop)
            for one in every:
                builder.store(final[one], place(*one), align=4)
            return context.get_dummy_value()

        place = types.intp
        operands = (left, place, place, place, right, place, place, place, result, place, place)
        return types.void(*operands), generate

    return tile


_wide_new, _wide_added = (_tile(_TALL, _WIDE, accumulate) for accumulate in (False, True))
_slim_new, _slim_added = (_tile(_TALL_SLIM, 1, accumulate) for accumulate in (False, True))


@helper
def product(
    left: _Floats,
    left_at: int,
    left_row: int,
    left_step: int,
    right: _Floats,
    right_at: int,
    right_row: int,
    result: _Floats,
    result_at: int,
    result_row: int,
    rows: int,
    columns: int,
    depth: int,
    accumulate: bool,
) -> None:
    """result[rows, columns] = left[rows, depth] @ right[depth, columns], or += with `accumulate`, on flat float32.

    Element (i, k) of `left` lies at left_at + i * left_row + k * left_step; rows of the others are contiguous, at
    right_at + k * right_row and result_at + i * result_row. `rows` is a multiple of ROWS, `columns` of LANES.
    """
    column = 0
    while column + _WIDE * LANES <= columns:
        for row in range(0, rows, _TALL):
            a, c = left_at + row * left_row, result_at + row * result_row + column
            if accumulate:
                _wide_added(
                    left, a, left_row, left_step, right, right_at + column, right_row, depth, result, c, result_row
                )
            else:
                _wide_new(
                    left, a, left_row, left_step, right, right_at + column, right_row, depth, result, c, result_row
                )
        column += _WIDE * LANES
    while column < columns:
        for row in range(0, rows, _TALL_SLIM):
            a, c = left_at + row * left_row, result_at + row * result_row + column
            if accumulate:
                _slim_added(
                    left, a, left_row, left_step, right, right_at + column, right_row, depth, result, c, result_row
                )
            else:
                _slim_new(
                    left, a, left_row, left_step, right, right_at + column, right_row, depth, result, c, result_row
                )
        column += LANES


@helper
def product_where_nonzero(
    left: _Floats,
    left_at: int,
    left_row: int,
    left_step: int,
    right: _Floats,
    right_at: int,
    right_row: int,
    result: _Floats,
    result_at: int,
    result_row: int,
    rows: int,
    columns: int,
    depth: int,
    accumulate: bool,
    by_left: bool,
) -> None:
    """The same, but a factor of 0 in `left` (`by_left`) or else in `right` also silences NaN and infinity."""
    for row in range(rows):
        for column in range(columns):
            total = result[result_at + row * result_row + column] if accumulate else np.float32(0.0)
            for step in range(depth):
                a = left[left_at + row * left_row + step * left_step]
                b = right[right_at + step * right_row + column]
                if (a if by_left else b) != 0.0:
                    total += a * b
            result[result_at + row * result_row + column] = total
