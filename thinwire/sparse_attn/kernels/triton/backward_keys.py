"""Gradients of keys and values in Triton: along columns of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.gradients import row_statistics, score_gradients
from thinwire.sparse_attn.kernels.triton.tiles import finite_rows, load_rows, store_rows

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
    q_row,
    d_out,
    d_out_row,
    lse,
    delta,
    entries,
    masks,
    key_bias,
    bias,
    bias_row,
    bias_step,
    seed,
    number,
    query_length,
    key_length,
    width,
    scale,
    threshold,
    kept,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add what one tile of queries does to the gradients of a column of keys and their values."""
    first = tl.load(entries + entry) * T
    rows = first + tl.arange(0, T)
    queries = load_rows(q, first, query_length, q_row, width, T, WIDTH)
    of_out = load_rows(d_out, first, query_length, d_out_row, width, T, WIDTH)
    shift, inner = row_statistics(lse, delta, number, rows, query_length)
    mask = tl.load(masks + entry) if MASKED else 0
    seen, d_scores = score_gradients(
        queries,
        keys,
        values,
        of_out,
        shift,
        inner,
        rows,
        columns,
        mask,
        key_bias,
        bias,
        bias_row,
        bias_step,
        seed,
        number,
        query_length,
        key_length,
        scale,
        threshold,
        kept,
        MASKED,
        CAUSAL,
        HAS_KEY_BIAS,
        HAS_BIAS,
        DROPOUT,
        T,
        BLOCK,
    )
    if MASKED or HAS_KEY_BIAS or HAS_BIAS:
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
    d_out,
    q,
    k,
    v,
    lse,
    delta,
    d_k,
    d_v,
    key_bias,
    bias,
    seed,
    items,
    entries,
    masks,
    k_parts,
    v_parts,
    d_out_batch,
    d_out_head,
    d_out_row,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    d_k_batch,
    d_k_head,
    d_k_row,
    d_v_batch,
    d_v_head,
    d_v_row,
    bias_batch,
    bias_head,
    bias_row,
    bias_step,
    heads,
    query_length,
    key_length,
    width,
    slots,
    scale,
    threshold,
    kept,
    factor,
    CAUSAL: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gradients of one item's keys and values, of one sample."""
    item = items + tl.program_id(0) * 6
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(item)
    first = tl.load(item + 1) * T
    start, end, unmasked = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    slot = tl.load(item + 5)
    columns = first + tl.arange(0, T)
    number = batch * heads + head
    keys = load_rows(k + batch * k_batch + head * k_head, first, key_length, k_row, width, T, WIDTH)
    values = load_rows(v + batch * v_batch + head * v_head, first, key_length, v_row, width, T, WIDTH)
    q += batch * q_batch + head * q_head
    d_out += batch * d_out_batch + head * d_out_head
    key_bias += batch * key_length
    bias += batch * bias_batch + head * bias_head
    of_keys = tl.zeros([T, WIDTH], tl.float32)
    of_values = tl.zeros([T, WIDTH], tl.float32)
    for entry in range(start, tl.minimum(end, unmasked)):
        of_keys, of_values = _along_column(
            entry,
            of_keys,
            of_values,
            keys,
            values,
            columns,
            q,
            q_row,
            d_out,
            d_out_row,
            lse,
            delta,
            entries,
            masks,
            key_bias,
            bias,
            bias_row,
            bias_step,
            seed,
            number,
            query_length,
            key_length,
            width,
            scale,
            threshold,
            kept,
            True,
            CAUSAL,
            HAS_KEY_BIAS,
            HAS_BIAS,
            DROPOUT,
            T,
            BLOCK,
            WIDTH,
        )
    for entry in range(tl.maximum(start, unmasked), end):
        of_keys, of_values = _along_column(
            entry,
            of_keys,
            of_values,
            keys,
            values,
            columns,
            q,
            q_row,
            d_out,
            d_out_row,
            lse,
            delta,
            entries,
            masks,
            key_bias,
            bias,
            bias_row,
            bias_step,
            seed,
            number,
            query_length,
            key_length,
            width,
            scale,
            threshold,
            kept,
            False,
            CAUSAL,
            HAS_KEY_BIAS,
            HAS_BIAS,
            DROPOUT,
            T,
            BLOCK,
            WIDTH,
        )
    of_keys *= factor
    if slot < 0:
        store_rows(d_k + batch * d_k_batch + head * d_k_head, of_keys, first, key_length, d_k_row, width, T, WIDTH)
        store_rows(d_v + batch * d_v_batch + head * d_v_head, of_values, first, key_length, d_v_row, width, T, WIDTH)
    else:
        part = (batch * slots + slot) * T * WIDTH
        store_rows(k_parts + part, of_keys, 0, T, WIDTH, WIDTH, T, WIDTH)
        store_rows(v_parts + part, of_values, 0, T, WIDTH, WIDTH, T, WIDTH)
