"""Gradients of queries, and of a bias, in Triton: along rows of tiles."""

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

__all__ = ["queries_kernel"]


@triton.jit
def _along_row(
    entry,
    d_q,
    queries,
    d_out,
    shift,
    inner,
    rows,
    k,
    v,
    d_bias,
    walk,
    head,
    config,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """Add what one tile of keys does to the gradients of a row of queries."""
    first = first_of(entry, walk, config)
    columns = (first + tl.arange(0, config.STEP))[None, :]
    keys = load_rows(k, first, config.STEP, config)
    values = load_rows(v, first, config.STEP, config)
    mask = mask_of(entry, walk, config) if MASKED else 0
    scores, d_powers = product(queries, tl.trans(keys)), product(d_out, tl.trans(values))
    _, d_scores = score_gradients(scores, d_powers, shift, inner, rows, columns, mask, head, config, MASKED)
    if d_bias is not None:
        place = d_bias + rows.to(tl.int64) * head.keys + columns
        tl.store(place, d_scores, mask=(rows < head.queries) & (columns < head.keys))
    if CAREFUL:
        keys, bad = load_finite_rows(k, first, config.STEP, config)
        reached = tl.max(tl.where(d_scores != 0.0, bad[None, :], 0), 1)
        d_q = tl.where((reached > 0)[:, None], float("nan"), d_q)
    return add_product(d_scores.to(keys.dtype), keys, d_q)


@triton.jit
def _along_whole_row(queries, d_out, shift, inner, rows, k, v, d_bias, item, walk, head, config, CAREFUL: tl.constexpr):
    """The gradients of an item's queries. CAREFUL as in the forward."""
    d_q = tl.zeros([config.T, config.WIDTH], tl.float32)
    if CAREFUL:
        for entry in tl.range(item.start, item.end, num_stages=1):
            d_q = _along_row(
                entry, d_q, queries, d_out, shift, inner, rows, k, v, d_bias, walk, head, config, True, True
            )
    else:
        for entry in range(item.start, tl.minimum(item.end, item.unmasked)):
            d_q = _along_row(
                entry, d_q, queries, d_out, shift, inner, rows, k, v, d_bias, walk, head, config, True, False
            )
        for entry in range(tl.maximum(item.start, item.unmasked), item.end):
            d_q = _along_row(
                entry, d_q, queries, d_out, shift, inner, rows, k, v, d_bias, walk, head, config, False, False
            )
    return d_q


@triton.jit
def queries_kernel(d_out, q, k, v, lse, delta, d_q, d_bias, walk, parts, sizes, biases, dropout, scale, factor, config):
    """Gradients of one item's queries, of one sample.

    d_out, q, k, v, d_q: Heads. lse, delta: float32 [B, H, Sq]. d_bias: float32 [B, H, Sq, Sk], or None. parts:
    float32 [B, slots, T, WIDTH]. scale: in exponents of two. factor: what scores were scaled by.
    """
    item = load_item(walk, config)
    head = this_head(item, sizes, biases, dropout, scale)
    rows = (item.first + tl.arange(0, config.T))[:, None]
    queries = load_rows(rows_of(q, item.batch, item.head, sizes.queries, sizes.width), item.first, config.T, config)
    of_out = load_rows(rows_of(d_out, item.batch, item.head, sizes.queries, sizes.width), item.first, config.T, config)
    shift, inner = row_statistics(lse, delta, head, rows)
    k_rows = rows_of(k, item.batch, item.head, sizes.keys, sizes.width)
    v_rows = rows_of(v, item.batch, item.head, sizes.keys, sizes.width)
    if d_bias is not None:
        d_bias += head.number * sizes.queries * sizes.keys
    result = _along_whole_row(
        queries, of_out, shift, inner, rows, k_rows, v_rows, d_bias, item, walk, head, config, False
    )
    if not_finite(result):
        result = _along_whole_row(
            queries, of_out, shift, inner, rows, k_rows, v_rows, d_bias, item, walk, head, config, True
        )
    result *= factor
    if item.slot < 0:
        store_rows(rows_of(d_q, item.batch, item.head, sizes.queries, sizes.width), result, item.first, config)
    else:
        store_rows(part_of(parts, item.batch * walk.slots + item.slot, config), result, 0, config)
