"""Gradients of keys and values in Triton: along columns of tiles."""

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

__all__ = ["keys_kernel"]


@triton.jit
def _along_column(
    entry, d_k, d_v, keys, values, columns, q, d_out, lse, delta, walk, head, config, MASKED: tl.constexpr
):
    """Add what one tile of queries does to the gradients of a column of keys and their values."""
    first = tl.load(walk.entries + entry) * config.T
    rows = first + tl.arange(0, config.T)
    queries = load_rows(q, first, config)
    of_out = load_rows(d_out, first, config)
    shift, inner = row_statistics(lse, delta, head, rows)
    mask = tl.load(walk.masks + entry) if MASKED else 0
    seen, d_scores = score_gradients(
        queries, keys, values, of_out, shift, inner, rows, columns, mask, head, config, MASKED
    )
    if MASKED or config.HAS_KEY_BIAS or config.HAS_BIAS:
        of_out, bad_out = finite_rows(of_out)
        queries, bad_queries = finite_rows(queries)
        reached = tl.max(tl.where(seen != 0.0, bad_out[:, None], 0), 0)
        d_v = tl.where((reached > 0)[:, None], float("nan"), d_v)
        reached = tl.max(tl.where(d_scores != 0.0, bad_queries[:, None], 0), 0)
        d_k = tl.where((reached > 0)[:, None], float("nan"), d_k)
    d_v += tl.dot(tl.trans(seen.to(of_out.dtype)), of_out, input_precision="ieee")
    d_k += tl.dot(tl.trans(d_scores.to(queries.dtype)), queries, input_precision="ieee")
    return d_k, d_v


@triton.jit
def keys_kernel(
    d_out, q, k, v, lse, delta, d_k, d_v, walk, k_parts, v_parts, sizes, biases, dropout, scale, factor, config
):
    """Gradients of one item's keys and values, of one sample.

    d_out, q, k, v, d_k, d_v: Heads. lse, delta: float32 [B, H, Sq]. k_parts, v_parts: float32 [B, slots, T, WIDTH].
    scale: in exponents of two. factor: what scores were scaled by.
    """
    item = load_item(walk, config)
    head = this_head(item, sizes, biases, dropout, scale)
    columns = item.first + tl.arange(0, config.T)
    keys = load_rows(rows_of(k, item.batch, item.head, sizes.keys, sizes.width), item.first, config)
    values = load_rows(rows_of(v, item.batch, item.head, sizes.keys, sizes.width), item.first, config)
    q_rows = rows_of(q, item.batch, item.head, sizes.queries, sizes.width)
    d_out_rows = rows_of(d_out, item.batch, item.head, sizes.queries, sizes.width)
    of_keys = tl.zeros([config.T, config.WIDTH], tl.float32)
    of_values = tl.zeros([config.T, config.WIDTH], tl.float32)
    for unmasked in tl.static_range(2):
        start = tl.maximum(item.start, item.unmasked) if unmasked else item.start
        end = item.end if unmasked else tl.minimum(item.end, item.unmasked)
        for entry in range(start, end):
            of_keys, of_values = _along_column(
                entry,
                of_keys,
                of_values,
                keys,
                values,
                columns,
                q_rows,
                d_out_rows,
                lse,
                delta,
                walk,
                head,
                config,
                unmasked == 0,
            )
    of_keys *= factor
    if item.slot < 0:
        store_rows(rows_of(d_k, item.batch, item.head, sizes.keys, sizes.width), of_keys, item.first, config)
        store_rows(rows_of(d_v, item.batch, item.head, sizes.keys, sizes.width), of_values, item.first, config)
    else:
        part = item.batch * walk.slots + item.slot
        store_rows(part_of(k_parts, part, config), of_keys, 0, config)
        store_rows(part_of(v_parts, part, config), of_values, 0, config)
