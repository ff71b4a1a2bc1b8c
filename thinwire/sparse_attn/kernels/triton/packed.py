"""Products and softmaxes of packed blocks on GPUs: launches their Triton kernels.

Packed blocks are [B, nnz, block, block] in the order of `BlockIndex.places`. Indices and tensors have as many heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.kernels.triton.launch import where_its_tensor_is


class Scores(NamedTuple):
    """What scores are made of: packed blocks, `entries` a sample; a packed bias, `bias_entries` a sample, 0 where one
    serves all; and a bias of `keys` keys, whose blocks `columns` says. What is not there is never read."""

    packed: Any
    bias: Any
    key_bias: Any
    columns: Any
    entries: Any
    bias_entries: Any
    keys: Any
    scale: Any


@triton.jit
def _block(scores, run, batch, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr):
    """One block of scores, float32, -inf where nothing is attended, even where packed holds NaN."""
    within = tl.arange(0, BLOCK)
    place = within[:, None] * BLOCK + within[None, :]
    first = (batch * scores.entries + run) * BLOCK * BLOCK
    values = tl.load(scores.packed + first + place).to(tl.float32) * scores.scale
    if HAS_BIAS:
        first = (batch * scores.bias_entries + run) * BLOCK * BLOCK
        added = tl.load(scores.bias + first + place).to(tl.float32)
        values = tl.where(added == float("-inf"), added, values + added)
    if HAS_KEY_BIAS:
        column = tl.load(scores.columns + run) * BLOCK + within
        of_keys = tl.load(scores.key_bias + batch * scores.keys + column)[None, :].to(tl.float32)
        values = tl.where(of_keys == float("-inf"), of_keys, values + of_keys)
    return values


@triton.jit
def softmax_kernel(scores, out, offsets, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEY_BIAS: tl.constexpr):
    """One row of blocks of one sample: the largest score and the sum first, then the probabilities."""
    line, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    within = tl.arange(0, BLOCK)
    place = within[:, None] * BLOCK + within[None, :]
    start, end = tl.load(offsets + line), tl.load(offsets + line + 1)
    # Below every score that is no -inf, so that its difference to -inf is -inf and not NaN.
    largest = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for run in range(start, end):
        values = _block(scores, run, batch, BLOCK, HAS_BIAS, HAS_KEY_BIAS)
        top = tl.maximum(largest, tl.max(values, 1))
        total = total * tl.exp(largest - top) + tl.sum(tl.exp(values - top[:, None]), 1)
        largest = top
    divisor = tl.where(total == 0.0, 1.0, total)
    for run in range(start, end):
        values = _block(scores, run, batch, BLOCK, HAS_BIAS, HAS_KEY_BIAS)
        kept = tl.exp(values - largest[:, None]) / divisor[:, None]
        tl.store(out + (batch * scores.entries + run) * BLOCK * BLOCK + place, kept.to(out.dtype.element_ty))


@triton.jit
def softmax_backward_kernel(d_out, out, d_scores, offsets, entries, BLOCK: tl.constexpr):
    """One row of blocks of one sample: p (dp - Σ p dp), float32."""
    line, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    within = tl.arange(0, BLOCK)
    place = within[:, None] * BLOCK + within[None, :]
    start, end = tl.load(offsets + line), tl.load(offsets + line + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for run in range(start, end):
        first = (batch * entries + run) * BLOCK * BLOCK
        kept = tl.load(out + first + place).to(tl.float32)
        total += tl.sum(kept * tl.load(d_out + first + place).to(tl.float32), 1)
    for run in range(start, end):
        first = (batch * entries + run) * BLOCK * BLOCK
        kept = tl.load(out + first + place).to(tl.float32)
        change = kept * (tl.load(d_out + first + place).to(tl.float32) - total[:, None])
        tl.store(d_scores + first + place, change)


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


_INNER = 32  # columns of a at a time
_WIDEST = 64  # rows and columns of the result that a program makes


@where_its_tensor_is
def sampled(a: Tensor, b: Tensor, index: BlockIndex) -> Tensor:
    """The blocks of a b: a [B, H, M, K], b [B, H, K, N] to [B, nnz, block, block]."""
    batch, _, _, inner = a.shape
    heads, rows, columns = index.places
    out = a.new_empty(batch, len(columns), index.block, index.block)
    if out.numel():
        places = torch.stack([heads, rows, columns], 1).int()
        tile = min(_WIDEST, index.block)
        grid = (len(columns), batch, (index.block // tile) ** 2)
        sampled_kernel[grid](
            Matrix.of(a), Matrix.of(b), out, places, len(columns), inner, BLOCK=index.block, T=tile, INNER=_INNER
        )
    return out


@where_its_tensor_is
def expanded(packed: Tensor, b: Tensor, index: BlockIndex, *, transposed: bool) -> Tensor:
    """The packed matrix, or its transpose, times b: b [B, H, K, N] to [B, H, M, N]."""
    batch, heads, _, width = b.shape
    lines = index.num_columns if transposed else index.num_rows
    offsets, others = (index.column_offsets, index.rows) if transposed else (index.row_offsets, index.columns)
    out = b.new_empty(batch, heads, lines * index.block, width)
    if not out.numel():
        return out
    # A program reads the places of transposed blocks; those of a row are where its offsets say.
    entries = index.packed_entries.int() if transposed else others
    rows, tile = min(_WIDEST, index.block), min(_WIDEST, max(16, int(triton.next_power_of_2(width))))
    grid = (heads * lines * (index.block // rows), triton.cdiv(width, tile), batch)
    expanded_kernel[grid](
        packed.contiguous(),
        Matrix.of(b),
        out,
        offsets,
        others,
        entries,
        lines,
        packed.size(1),
        width,
        BLOCK=index.block,
        T=rows,
        WIDTH=tile,
        TRANSPOSED=transposed,
    )
    return out


@where_its_tensor_is
def softmax(
    packed: Tensor, scale: float, bias: Tensor | None, key_bias: Tensor | None, index: BlockIndex, out: Tensor
) -> None:
    """Softmax along rows of scale * packed + bias + key_bias into contiguous `out`, which may be `packed`.

    bias is packed, [B|1, nnz, block, block], and key_bias [B, Sk]; where either is -inf nothing is attended. A row
    that attends nothing is 0. Sums are float32.
    """
    batch, entries, block, _ = packed.shape
    if not packed.numel():
        return
    written = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    scores = Scores(
        packed.contiguous(),
        packed if bias is None else bias.contiguous(),
        packed if key_bias is None else key_bias.contiguous(),
        index.columns,
        entries,
        0 if bias is None or bias.size(0) == 1 else entries,
        index.num_columns * block,
        scale,
    )
    softmax_kernel[(len(index.row_offsets) - 1, batch)](
        scores,
        written,
        index.row_offsets,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        HAS_KEY_BIAS=key_bias is not None,
        num_warps=_softmax_warps(block),
    )
    if written is not out:
        out.copy_(written)


@where_its_tensor_is
def softmax_backward(d_out: Tensor, out: Tensor, index: BlockIndex) -> Tensor:
    """The gradient of the scores, scaled and biased, of their softmax `out`: packed, float32."""
    batch, entries, block, _ = out.shape
    d_scores = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    if d_scores.numel():
        softmax_backward_kernel[(len(index.row_offsets) - 1, batch)](
            d_out.contiguous(),
            out.contiguous(),
            d_scores,
            index.row_offsets,
            entries,
            BLOCK=block,
            num_warps=_softmax_warps(block),
        )
    return d_scores


def _softmax_warps(block: int) -> int:
    """So many that a block of float32 stays in registers."""
    return 8 if block >= 128 else 4
