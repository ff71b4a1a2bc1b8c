"""Products with packed blocks in Triton: a program for each block that is wanted, or each tile of a dense result."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Matrix", "expanded_kernel", "sampled_kernel"]


class Matrix(NamedTuple):
    """A tensor [B, H, M, N] with any strides: its memory, and its strides in elements."""

    memory: Any
    batch: Any
    head: Any
    row: Any
    column: Any

    @classmethod
    def of(cls, tensor: Tensor) -> Matrix:
        """`tensor` as kernels take it."""
        return cls(tensor, *tensor.stride())


@triton.jit
def sampled_kernel(a, b, out, places, entries, inner, BLOCK: tl.constexpr, T: tl.constexpr, INNER: tl.constexpr):
    """A tile T x T of one block of a b, of one sample. places: int32 [entries, 3], head, row and column of blocks."""
    entry, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = BLOCK // T
    rows = tl.program_id(2) // tiles * T + tl.arange(0, T)
    columns = tl.program_id(2) % tiles * T + tl.arange(0, T)
    place = places + entry * 3
    head = tl.load(place).to(tl.int64)
    row = tl.load(place + 1).to(tl.int64)
    column = tl.load(place + 2).to(tl.int64)
    a_rows = a.memory + batch * a.batch + head * a.head + (row * BLOCK + rows)[:, None] * a.row
    b_columns = b.memory + batch * b.batch + head * b.head + (column * BLOCK + columns)[None, :] * b.column
    result = tl.zeros([T, T], tl.float32)
    for first in range(0, inner, INNER):
        step = first + tl.arange(0, INNER)
        left = tl.load(a_rows + step[None, :].to(tl.int64) * a.column, mask=(step < inner)[None, :], other=0.0)
        right = tl.load(b_columns + step[:, None].to(tl.int64) * b.row, mask=(step < inner)[:, None], other=0.0)
        result = tl.dot(left, right, result, input_precision="tf32x3")
    target = out + (batch * entries + entry) * BLOCK * BLOCK + rows[:, None] * BLOCK + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty))


@triton.jit
def expanded_kernel(
    packed,
    b,
    out,
    offsets,
    others,
    places,
    lines,
    entries,
    width,
    BLOCK: tl.constexpr,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """T rows of one row of blocks of the result, and `WIDTH` columns, of one sample.

    The blocks of a line are those from offsets[line] to offsets[line + 1]: `others` says which rows of b they multiply,
    and `places`, where TRANSPOSED, which of the packed blocks they are.
    """
    tiles: tl.constexpr = BLOCK // T
    line, batch = tl.program_id(0) // tiles, tl.program_id(2).to(tl.int64)
    head = (line // lines).to(tl.int64)
    rows = tl.program_id(0) % tiles * T + tl.arange(0, T)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (columns < width)[None, :]
    b_columns = b.memory + batch * b.batch + head * b.head + columns[None, :].to(tl.int64) * b.column
    across, down = (1, BLOCK) if TRANSPOSED else (BLOCK, 1)
    result = tl.zeros([T, WIDTH], tl.float32)
    for run in range(tl.load(offsets + line), tl.load(offsets + line + 1)):
        entry = tl.load(places + run) if TRANSPOSED else run
        first = tl.load(others + run).to(tl.int64) * BLOCK
        block = packed + (batch * entries + entry) * BLOCK * BLOCK
        for part in range(tiles):
            inner = part * T + tl.arange(0, T)
            left = tl.load(block + rows[:, None] * across + inner[None, :] * down)
            right = tl.load(b_columns + (first + inner)[:, None] * b.row, mask=inside, other=0.0)
            result = tl.dot(left, right, result, input_precision="tf32x3")
    target = out + ((batch * (tl.num_programs(0) // tiles) + line) * BLOCK + rows)[:, None] * width
    tl.store(target + columns[None, :], result.to(out.dtype.element_ty), mask=inside)
