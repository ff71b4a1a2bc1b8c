"""Gradients of queries, and of a bias, in Triton: along rows of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.gradients import row_statistics, score_gradients
from thinwire.sparse_attn.kernels.triton.tiles import finite_rows, load_rows, store_rows

__all__ = ["queries_kernel"]


@triton.jit
def _along_row(
    entry,
    d_q,
    q,
    d_out,
    shift,
    inner,
    rows,
    k,
    k_row,
    v,
    v_row,
    entries,
    masks,
    key_bias,
    bias,
    d_bias,
    bias_row,
    bias_step,
    d_bias_row,
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
    NEEDS_D_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add what one tile of keys does to the gradients of a row of queries."""
    first = tl.load(entries + entry) * T
    columns = first + tl.arange(0, T)
    keys = load_rows(k, first, key_length, k_row, width, T, WIDTH)
    values = load_rows(v, first, key_length, v_row, width, T, WIDTH)
    mask = tl.load(masks + entry) if MASKED else 0
    _, d_scores = score_gradients(
        q,
        keys,
        values,
        d_out,
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
    if NEEDS_D_BIAS:
        inside = (rows[:, None] < query_length) & (columns[None, :] < key_length)
        place = d_bias + rows[:, None].to(tl.int64) * d_bias_row + columns[None, :]
        tl.store(place, d_scores, mask=inside)
    if MASKED or HAS_KEY_BIAS or HAS_BIAS:
        keys, bad = finite_rows(keys)
        reached = tl.max(tl.where(d_scores != 0.0, bad[None, :], 0), 1)
        d_q = tl.where((reached > 0)[:, None], float("nan"), d_q)
    return d_q + tl.dot(d_scores.to(keys.dtype), keys, input_precision="ieee")


@triton.jit
def queries_kernel(
    d_out,
    q,
    k,
    v,
    lse,
    delta,
    d_q,
    key_bias,
    bias,
    d_bias,
    seed,
    items,
    entries,
    masks,
    parts,
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
    d_q_batch,
    d_q_head,
    d_q_row,
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
    NEEDS_D_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gradients of one item's queries; of one sample. `d_bias` [B, H, Sq, Sk]; `factor`: what scores were scaled by."""
    item = items + tl.program_id(0) * 6
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(item)
    first = tl.load(item + 1) * T
    start, end, unmasked = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    slot = tl.load(item + 5)
    rows = first + tl.arange(0, T)
    number = batch * heads + head
    queries = load_rows(q + batch * q_batch + head * q_head, first, query_length, q_row, width, T, WIDTH)
    of_out = load_rows(d_out + batch * d_out_batch + head * d_out_head, first, query_length, d_out_row, width, T, WIDTH)
    shift, inner = row_statistics(lse, delta, number, rows, query_length)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    key_bias += batch * key_length
    bias += batch * bias_batch + head * bias_head
    d_bias += number * query_length * key_length
    result = tl.zeros([T, WIDTH], tl.float32)
    for entry in range(start, tl.minimum(end, unmasked)):
        result = _along_row(
            entry,
            result,
            queries,
            of_out,
            shift,
            inner,
            rows,
            k,
            k_row,
            v,
            v_row,
            entries,
            masks,
            key_bias,
            bias,
            d_bias,
            bias_row,
            bias_step,
            key_length,
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
            NEEDS_D_BIAS,
            DROPOUT,
            T,
            BLOCK,
            WIDTH,
        )
    for entry in range(tl.maximum(start, unmasked), end):
        result = _along_row(
            entry,
            result,
            queries,
            of_out,
            shift,
            inner,
            rows,
            k,
            k_row,
            v,
            v_row,
            entries,
            masks,
            key_bias,
            bias,
            d_bias,
            bias_row,
            bias_step,
            key_length,
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
            NEEDS_D_BIAS,
            DROPOUT,
            T,
            BLOCK,
            WIDTH,
        )
    result *= factor
    if slot < 0:
        store_rows(d_q + batch * d_q_batch + head * d_q_head, result, first, query_length, d_q_row, width, T, WIDTH)
    else:
        store_rows(parts + (batch * slots + slot) * T * WIDTH, result, 0, T, WIDTH, WIDTH, T, WIDTH)
