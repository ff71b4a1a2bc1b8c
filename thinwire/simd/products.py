"""Matrix products with a few rows of sums in registers, for kernels that fuse several products on tiles which fit the
caches: calling a library for each would cost as much as it saves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from thinwire.simd.building import LANES, add_intrinsic, fused_multiply_add, pointer, splat
from thinwire.simd.compiling import helper

ROWS = 8
"""Rows of the result must be a multiple of this."""


class Matrix(NamedTuple):
    """A matrix in flat float32: element (i, k) lies at i * row + k * column."""

    values: NDArray[np.float32]
    row: int
    column: int


_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_PLACE = ir.IntType(64)

# Sums that registers hold, rows x vectors: 16 of 32 with AVX-512, 8 of 16 (two for each vector) with AVX2.
_WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
_TALL, _WIDE = (4, 4) if _WIDE_REGISTERS else (4, 1)
_TALL_SLIM = 8 if _WIDE_REGISTERS else 4


class _Operand:
    """A `Matrix` while code for it is generated, from the element at place `at` on."""

    def __init__(self, context: Any, builder: Any, matrix_type: Any, matrix: Any, at: Any) -> None:
        array, self.row, self.column = cgutils.unpack_tuple(builder, matrix, 3)  # type: ignore[no-untyped-call]
        self._builder = builder
        self._base = pointer(context, builder, matrix_type.types[0], array, at, _FLOAT)

    def element(self, row: Any, column: Any) -> Any:
        """Address of the element that lies so many rows and columns on, numbers while code is generated or values."""
        row, column = (_PLACE(one) if isinstance(one, int) else one for one in (row, column))
        offset = self._builder.add(self._builder.mul(row, self.row), self._builder.mul(column, self.column))
        return self._builder.gep(self._base, [offset])

    def vector(self, row: Any, number: int) -> Any:
        """Address of a row's elements from `number` times LANES on, which lie side by side."""
        offset = self._builder.mul(_PLACE(row) if isinstance(row, int) else row, self.row)
        offset = self._builder.add(offset, _PLACE(number * LANES))
        return self._builder.bitcast(self._builder.gep(self._base, [offset]), _FLOATS.as_pointer())


def _tile(rows: int, vectors: int) -> Any:
    """Intrinsic: result[rows, vectors * LANES] (+)= left[rows, depth] @ right[depth, vectors * LANES].

    Its arguments are those of `product`, and where in each matrix its first element lies.
    """
    places = [(row, vector) for row in range(rows) for vector in range(vectors)]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        left, right, result = (
            _Operand(context, builder, signature.args[at], values[at], values[at + 1]) for at in (0, 2, 4)
        )
        depth, accumulate = values[6:]
        with builder.if_else(accumulate) as (added, new):
            with added:
                before = [builder.load(result.vector(*place), align=4) for place in places]
                loaded = builder.block
            with new:
                fresh = builder.block
        first = {}
        for place, value in zip(places, before, strict=True):
            first[place] = builder.phi(_FLOATS)
            first[place].add_incoming(value, loaded)
            first[place].add_incoming(ir.Constant(_FLOATS, [0.0] * LANES), fresh)
        for place, total in _sums(builder, left, right, depth, first).items():
            builder.store(total, result.vector(*place), align=4)
        return context.get_dummy_value()

    @add_intrinsic
    def tile(
        typing_context: Any,
        left: Any,
        left_at: Any,
        right: Any,
        right_at: Any,
        result: Any,
        result_at: Any,
        depth: Any,
        accumulate: Any,
    ) -> Any:
        place = types.intp
        return types.void(left, place, right, place, result, place, place, types.boolean), generate

    return tile


def _sums(
    builder: Any, left: _Operand, right: _Operand, depth: Any, first: dict[tuple[int, int], Any]
) -> dict[tuple[int, int], Any]:
    """A loop over `depth` that adds the products to the sums `first`, by row and vector; the sums after it."""
    before = builder.block
    loop, after = builder.append_basic_block("depth"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", depth, _PLACE(0)), loop, after)

    builder.position_at_end(loop)
    step = builder.phi(_PLACE)
    sums = {place: builder.phi(_FLOATS) for place in first}
    vectors = 1 + max(vector for _, vector in first)
    loaded = [builder.load(right.vector(step, vector), align=4) for vector in range(vectors)]
    added = {}
    for row in range(len(first) // vectors):
        factor = splat(builder, builder.load(left.element(row, step), align=4))
        for vector in range(vectors):
            added[row, vector] = fused_multiply_add(builder, factor, loaded[vector], sums[row, vector])
    following = builder.add(step, _PLACE(1))
    step.add_incoming(_PLACE(0), before)
    step.add_incoming(following, loop)
    for place, value in sums.items():
        value.add_incoming(first[place], before)
        value.add_incoming(added[place], loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)

    builder.position_at_end(after)
    final = {place: builder.phi(_FLOATS) for place in first}
    for place, value in final.items():
        value.add_incoming(first[place], before)
        value.add_incoming(added[place], loop)
    return final


_wide, _slim = _tile(_TALL, _WIDE), _tile(_TALL_SLIM, 1)


@helper
def product(left: Matrix, right: Matrix, result: Matrix, rows: int, columns: int, depth: int, accumulate: bool) -> None:
    """result[rows, columns] = left[rows, depth] @ right[depth, columns], or += with `accumulate`.

    Rows of `right` and `result` are contiguous. `rows` is a multiple of ROWS, `columns` of LANES.
    """
    column = 0
    while column + _WIDE * LANES <= columns:
        for row in range(0, rows, _TALL):
            _wide(left, row * left.row, right, column, result, row * result.row + column, depth, accumulate)
        column += _WIDE * LANES
    while column < columns:
        for row in range(0, rows, _TALL_SLIM):
            _slim(left, row * left.row, right, column, result, row * result.row + column, depth, accumulate)
        column += LANES


@helper
def product_where_nonzero(
    left: Matrix,
    right: Matrix,
    result: Matrix,
    rows: int,
    columns: int,
    depth: int,
    accumulate: bool,
    by_left: bool,
    finite: bool,
) -> None:
    """The same, but a factor of 0 in `left` (`by_left`) or else in `right` also silences NaN and infinity.

    `finite`: the other matrix is known to hold neither, so that the fast product will do.
    """
    if finite:
        product(left, right, result, rows, columns, depth, accumulate)
        return
    for row in range(rows):
        for column in range(columns):
            place = row * result.row + column
            total = result.values[place] if accumulate else np.float32(0.0)
            for step in range(depth):
                a = left.values[row * left.row + step * left.column]
                b = right.values[step * right.row + column]
                if (a if by_left else b) != 0.0:
                    total += a * b
            result.values[place] = total
