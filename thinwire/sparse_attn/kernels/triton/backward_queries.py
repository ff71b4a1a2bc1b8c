"""Gradients of queries, and of a bias, in Triton: along rows of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.gradients import row_statistics, score_gradients
from thinwire.sparse_attn.kernels.triton.tiles import (
    finite_rows,
    load_item,
    load_rows,
    part_of,
    rows_of,
    store_rows,
    this_head,
)

__all__ = ["queries_kernel"]


@triton.jit
def _along_row(entry, d_q, queries, d_out, shift, inner, rows, k, v, d_bias, walk, head, config, MASKED: tl.constexpr):
    """Add what one tile of keys does to the gradients of a row of queries."""
    first = tl.load(walk.entries + entry) * config.T
    columns = first + tl.arange(0, config.T)
    keys = load_rows(k, first, config)
    values = load_rows(v, first, config)
    mask = tl.load(walk.masks + entry) if MASKED else 0
    _, d_scores = score_gradients(queries, keys, values, d_out, shift, inner, rows, columns, mask, head, config, MASKED)
    if d_bias is not None:
        inside = (rows[:, None] < head.queries) & (columns[None, :] < head.keys)
        place = d_bias + rows[:, None].to(tl.int64) * head.keys + columns[None, :]
        tl.store(place, d_scores, mask=inside)
    if MASKED or config.HAS_KEY_BIAS or config.HAS_BIAS:
        keys, bad = finite_rows(keys)
        reached = tl.max(tl.where(d_scores != 0.0, bad[None, :], 0), 1)
        d_q = tl.where((reached > 0)[:, None], float("nan"), d_q)
    return d_q + tl.dot(d_scores.to(keys.dtype), keys, input_precision="ieee")


@triton.jit
def queries_kernel(d_out, q, k, v, lse, delta, d_q, d_bias, walk, parts, sizes, biases, dropout, scale, factor, config):
    """Gradients of one item's queries, of one sample.

    d_out, q, k, v, d_q: Heads. lse, delta: float32 [B, H, Sq]. d_bias: float32 [B, H, Sq, Sk], or None. parts:
    float32 [B, slots, T, WIDTH]. scale: in exponents of two. factor: what scores were scaled by.
    """
    item = load_item(walk, config)
    head = this_head(item, sizes, biases, dropout, scale)
    rows = item.first + tl.arange(0, config.T)
    queries = load_rows(rows_of(q, item.batch, item.head, sizes.queries, sizes.width), item.first, config)
    of_out = load_rows(rows_of(d_out, item.batch, item.head, sizes.queries, sizes.width), item.first, config)
    shift, inner = row_statistics(lse, delta, head, rows)
    k_rows = rows_of(k, item.batch, item.head, sizes.keys, sizes.width)
    v_rows = rows_of(v, item.batch, item.head, sizes.keys, sizes.width)
    if d_bias is not None:
        d_bias += head.number * sizes.queries * sizes.keys
    result = tl.zeros([config.T, config.WIDTH], tl.float32)
    for unmasked in tl.static_range(2):
        start = tl.maximum(item.start, item.unmasked) if unmasked else item.start
        end = item.end if unmasked else tl.minimum(item.end, item.unmasked)
        for entry in range(start, end):
            result = _along_row(
                entry,
                result,
                queries,
                of_out,
                shift,
                inner,
                rows,
                k_rows,
                v_rows,
                d_bias,
                walk,
                head,
                config,
                unmasked == 0,
            )
    result *= factor
    if item.slot < 0:
        store_rows(rows_of(d_q, item.batch, item.head, sizes.queries, sizes.width), result, item.first, config)
    else:
        store_rows(part_of(parts, item.batch * walk.slots + item.slot, config), result, 0, config)
