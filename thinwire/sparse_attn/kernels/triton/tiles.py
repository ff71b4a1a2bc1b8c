"""What the Triton kernels share: a tile's scores with all masks, dropout, and values made safe to multiply by zero."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attended_scores", "finite_rows", "keep_mask", "load_rows", "store_rows"]


@triton.jit
def load_rows(base, first, length, row_stride, width, T: tl.constexpr, WIDTH: tl.constexpr):
    """[T, WIDTH] from row `first` on, zeros beyond `length` rows and `width` columns."""
    rows = first + tl.arange(0, T)
    columns = tl.arange(0, WIDTH)
    inside = (rows[:, None] < length) & (columns[None, :] < width)
    return tl.load(base + rows[:, None].to(tl.int64) * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, values, first, length, row_stride, width, T: tl.constexpr, WIDTH: tl.constexpr):
    """The opposite of `load_rows`, in the memory's dtype."""
    rows = first + tl.arange(0, T)
    columns = tl.arange(0, WIDTH)
    inside = (rows[:, None] < length) & (columns[None, :] < width)
    place = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _mix(word):
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def keep_mask(seed, number, rows, columns, threshold):
    """What dropout keeps of a tile of head `number`; `thinwire.sparse_attn.dropout` in 32 bits."""
    value = tl.load(seed)
    low = (value & 0xFFFFFFFF).to(tl.uint32)
    high = ((value >> 32) & 0xFFFFFFFF).to(tl.uint32)
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    head_key = _mix(low ^ _mix(high + number.to(tl.uint32) * golden))
    row_keys = _mix(head_key + rows.to(tl.uint32))
    words = _mix(row_keys[:, None] ^ (columns.to(tl.uint32) * golden)[None, :])
    return words >= threshold


@triton.jit
def attended_scores(
    scores,
    rows,
    columns,
    query_length,
    key_length,
    mask,
    key_bias,
    bias,
    bias_row,
    bias_step,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Exponents of two with the biases in; -inf where a query does not attend a key, whatever the score was."""
    log2_e: tl.constexpr = 1.4426950408889634
    if HAS_KEY_BIAS:
        added = tl.load(key_bias + columns, mask=columns < key_length, other=0.0)
        scores = tl.where((added == float("-inf"))[None, :], float("-inf"), scores + (added * log2_e)[None, :])
    if HAS_BIAS:
        inside = (rows[:, None] < query_length) & (columns[None, :] < key_length)
        place = bias + rows[:, None].to(tl.int64) * bias_row + columns[None, :].to(tl.int64) * bias_step
        added = tl.load(place, mask=inside, other=0.0)
        scores = tl.where(added == float("-inf"), float("-inf"), scores + added * log2_e)
    if MASKED:
        joined: tl.constexpr = T // BLOCK
        inner = tl.arange(0, T) // BLOCK
        bits = inner[:, None] * joined + inner[None, :]
        attends = (((mask >> bits) & 1) != 0) & (columns[None, :] < key_length)
        if CAUSAL:
            attends = attends & (columns[None, :] <= rows[:, None])
        scores = tl.where(attends, scores, float("-inf"))
    return scores


@triton.jit
def finite_rows(values):
    """`values` [T, WIDTH] with zeros for what is not finite, and which rows held such."""
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    clean = tl.where(finite, values, tl.zeros_like(values))
    bad = tl.max(tl.where(finite, 0, 1), 1)
    return clean, bad
