"""Forward of block-sparse attention in Triton: an online softmax along a row of tiles, or a part of a long one, and the
merge of such parts by their log-sum-exp (Dao et al., 2022, arXiv:2205.14135)."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.tiles import attended_scores, finite_rows, keep_mask, load_rows, store_rows

__all__ = ["forward_kernel", "merge_kernel"]


@triton.jit
def _attend(
    entry,
    out,
    largest,
    total,
    q,
    rows,
    k,
    k_row,
    v,
    v_row,
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
    """Take one more tile of keys in."""
    first = tl.load(entries + entry) * T
    columns = first + tl.arange(0, T)
    keys = load_rows(k, first, key_length, k_row, width, T, WIDTH)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    mask = tl.load(masks + entry) if MASKED else 0
    scores = attended_scores(
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
        MASKED,
        CAUSAL,
        HAS_KEY_BIAS,
        HAS_BIAS,
        T,
        BLOCK,
    )
    top = tl.maximum(largest, tl.max(scores, 1))
    powers = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(largest - top)
    total = total * shrink + tl.sum(powers, 1)
    out = out * shrink[:, None]
    if DROPOUT:
        powers = tl.where(keep_mask(seed, number, rows, columns, threshold), powers * kept, 0.0)
    values = load_rows(v, first, key_length, v_row, width, T, WIDTH)
    if MASKED or HAS_KEY_BIAS or HAS_BIAS:
        values, bad = finite_rows(values)
        reached = tl.max(tl.where(powers != 0.0, bad[None, :], 0), 1)
        out = tl.where((reached > 0)[:, None], float("nan"), out)
    out += tl.dot(powers.to(values.dtype), values, input_precision="ieee")
    return out, top, total


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    key_bias,
    bias,
    seed,
    items,
    entries,
    masks,
    part_out,
    part_lse,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    out_batch,
    out_head,
    out_row,
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
    CAUSAL: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One item, one sample; `scale` in exponents of two. `part_out` [B, slots, T, WIDTH], `part_lse` [B, slots, T]."""
    item = items + tl.program_id(0) * 6
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(item)
    first = tl.load(item + 1) * T
    start, end, unmasked = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    slot = tl.load(item + 5)
    rows = first + tl.arange(0, T)
    number = batch * heads + head
    queries = load_rows(q + batch * q_batch + head * q_head, first, query_length, q_row, width, T, WIDTH)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    key_bias += batch * key_length
    bias += batch * bias_batch + head * bias_head
    result = tl.zeros([T, WIDTH], tl.float32)
    # Below every score that is no -inf, so that its difference to -inf is -inf and not NaN.
    largest = tl.full([T], -3.0e38, tl.float32)
    total = tl.zeros([T], tl.float32)
    for entry in range(start, tl.minimum(end, unmasked)):
        result, largest, total = _attend(
            entry,
            result,
            largest,
            total,
            queries,
            rows,
            k,
            k_row,
            v,
            v_row,
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
        result, largest, total = _attend(
            entry,
            result,
            largest,
            total,
            queries,
            rows,
            k,
            k_row,
            v,
            v_row,
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
    nothing = total == 0.0
    result = tl.where(nothing[:, None], 0.0, result / tl.where(nothing, 1.0, total)[:, None])
    sums = (largest + tl.log2(tl.where(nothing, 1.0, total))) * 0.6931471805599453
    if slot < 0:
        sums = tl.where(nothing, float("inf"), sums)
        store_rows(out + batch * out_batch + head * out_head, result, first, query_length, out_row, width, T, WIDTH)
        tl.store(lse + number * query_length + rows, sums, mask=rows < query_length)
    else:
        sums = tl.where(nothing, float("-inf"), sums)
        part = batch * slots + slot
        store_rows(part_out + part * T * WIDTH, result, 0, T, WIDTH, WIDTH, T, WIDTH)
        tl.store(part_lse + part * T + tl.arange(0, T), sums)


@triton.jit
def merge_kernel(
    out,
    lse,
    merges,
    part_out,
    part_lse,
    out_batch,
    out_head,
    out_row,
    heads,
    query_length,
    width,
    slots,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Join the parts of one long row of one sample."""
    merge = merges + tl.program_id(0) * 4
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(merge)
    first = tl.load(merge + 1) * T
    slot, parts = tl.load(merge + 2), tl.load(merge + 3)
    rows = first + tl.arange(0, T)
    places = tl.arange(0, T)
    largest = tl.full([T], -3.0e38, tl.float32)
    for part in range(parts):
        largest = tl.maximum(largest, tl.load(part_lse + (batch * slots + slot + part) * T + places))
    total = tl.zeros([T], tl.float32)
    result = tl.zeros([T, WIDTH], tl.float32)
    for part in range(parts):
        number = batch * slots + slot + part
        weight = tl.exp(tl.load(part_lse + number * T + places) - largest)
        total += weight
        result += weight[:, None] * load_rows(part_out + number * T * WIDTH, 0, T, WIDTH, WIDTH, T, WIDTH)
    nothing = total == 0.0
    result = tl.where(nothing[:, None], 0.0, result / tl.where(nothing, 1.0, total)[:, None])
    sums = tl.where(nothing, float("inf"), largest + tl.log(tl.where(nothing, 1.0, total)))
    store_rows(out + batch * out_batch + head * out_head, result, first, query_length, out_row, width, T, WIDTH)
    tl.store(lse + (batch * heads + head) * query_length + rows, sums, mask=rows < query_length)
