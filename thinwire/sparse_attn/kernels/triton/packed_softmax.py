"""The softmax of packed blocks in Triton: a program for each row of blocks, which it reads twice."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = ["Scores", "softmax_backward_kernel", "softmax_kernel"]


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
