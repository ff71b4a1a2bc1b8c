"""Gradients of keys and values in Triton: along columns of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.gradients import row_statistics, score_gradients
from thinwire.sparse_attn.kernels.triton.tiles import (
    add_product,
    first_of,
    load_finite_rows,
    load_item,
    load_rows,
    mask_of,
    not_finite,
    part_of,
    product,
    rows_of,
    store_rows,
    this_head,
)

__all__ = ["keys_kernel"]


@triton.jit
def _along_column(
    entry,
    d_k,
    d_v,
    keys,
    values,
    columns,
    q,
    d_out,
    lse,
    delta,
    walk,
    head,
    config,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Add what one tile of queries does to the gradients of a column of keys and their values."""
    first = first_of(entry, walk, config)
    rows = (first + tl.arange(0, config.STEP))[None, :]
    queries = load_rows(q, first, config.STEP, config)
    of_out = load_rows(d_out, first, config.STEP, config)
    shift, inner = row_statistics(lse, delta, head, rows)
    mask = mask_of(entry, walk, config) if MASKED else 0
    # Transposed, so that what comes out of two products goes into two more as it lies in registers.
    scores, d_powers = product(keys, tl.trans(queries)), product(values, tl.trans(of_out))
    seen, d_scores = score_gradients(scores, d_powers, shift, inner, rows, columns, mask, head, config, MASKED)
    if CAREFUL:
        of_out, bad_out = load_finite_rows(d_out, first, config.STEP, config)
        queries, bad_queries = load_finite_rows(q, first, config.STEP, config)
        reached = tl.max(tl.where(seen != 0.0, bad_out[None, :], 0), 1)
        d_v = tl.where((reached > 0)[:, None], float("nan"), d_v)
        reached = tl.max(tl.where(d_scores != 0.0, bad_queries[None, :], 0), 1)
        d_k = tl.where((reached > 0)[:, None], float("nan"), d_k)
    d_v = add_product(seen.to(of_out.dtype), of_out, d_v)
    d_k = add_product(d_scores.to(queries.dtype), queries, d_k)
    return d_k, d_v


@triton.jit
def _along_whole_column(keys, values, columns, q, d_out, lse, delta, item, walk, head, config, CAREFUL: tl.constexpr):
    """The gradients of an item's keys and values. CAREFUL as in the forward."""
    d_k = tl.zeros([config.T, config.WIDTH], tl.float32)
    d_v = tl.zeros([config.T, config.WIDTH], tl.float32)
    if CAREFUL:
        for entry in tl.range(item.start, item.end, num_stages=1):
            d_k, d_v = _along_column(
                entry, d_k, d_v, keys, values, columns, q, d_out, lse, delta, walk, head, config, True, True
            )
    else:
        for entry in range(item.start, tl.minimum(item.end, item.unmasked)):
            d_k, d_v = _along_column(
                entry, d_k, d_v, keys, values, columns, q, d_out, lse, delta, walk, head, config, True, False
            )
        for entry in range(tl.maximum(item.start, item.unmasked), item.end):
            d_k, d_v = _along_column(
                entry, d_k, d_v, keys, values, columns, q, d_out, lse, delta, walk, head, config, False, False
            )
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
    columns = (item.first + tl.arange(0, config.T))[:, None]
    keys = load_rows(rows_of(k, item.batch, item.head, sizes.keys, sizes.width), item.first, config.T, config)
    values = load_rows(rows_of(v, item.batch, item.head, sizes.keys, sizes.width), item.first, config.T, config)
    q_rows = rows_of(q, item.batch, item.head, sizes.queries, sizes.width)
    d_out_rows = rows_of(d_out, item.batch, item.head, sizes.queries, sizes.width)
    of_keys, of_values = _along_whole_column(
        keys, values, columns, q_rows, d_out_rows, lse, delta, item, walk, head, config, False
    )
    if not_finite(of_keys + of_values):
        of_keys, of_values = _along_whole_column(
            keys, values, columns, q_rows, d_out_rows, lse, delta, item, walk, head, config, True
        )
    of_keys *= factor
    if item.slot < 0:
        store_rows(rows_of(d_k, item.batch, item.head, sizes.keys, sizes.width), of_keys, item.first, config)
        store_rows(rows_of(d_v, item.batch, item.head, sizes.keys, sizes.width), of_values, item.first, config)
    else:
        part = item.batch * walk.slots + item.slot
        store_rows(part_of(k_parts, part, config), of_keys, 0, config)
        store_rows(part_of(v_parts, part, config), of_values, 0, config)
