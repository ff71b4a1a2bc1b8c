"""Block-sparse attention in Triton. Forward: an online softmax along a row of tiles, or a part of a long one, and the
merge of such parts by their log-sum-exp. Gradients: of queries and a bias along rows of tiles, of keys and values along
columns; probabilities are made again from the log-sum-exp (Dao et al., 2022, arXiv:2205.14135), and parts of long rows
are added up in a fixed order, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from thinwire.sparse_attn.kernels.triton.tiles import (
    add_product,
    attended_scores,
    first_of,
    keep_mask,
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


@triton.jit
def _attend(entry, out, largest, total, queries, rows, k, v, head, config, MASKED: constexpr, CAREFUL: constexpr):
    """Take one more tile of keys in."""
    first = first_of(entry, head.walk, config)
    columns = (first + tl.arange(0, config.STEP))[None, :]
    keys = load_rows(k, first, config.STEP, config)
    scores = product(queries, tl.trans(keys)) * head.scale
    mask = mask_of(entry, head.walk, config) if MASKED else 0
    scores = attended_scores(scores, rows, columns, mask, head, config, MASKED)
    top = tl.maximum(largest, tl.max(scores, 1))
    powers = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(largest - top)
    total = total * shrink + tl.sum(powers, 1)
    out = out * shrink[:, None]
    if config.DROPOUT:
        powers = tl.where(keep_mask(head, rows, columns), powers * head.dropout.kept, 0.0)
    if CAREFUL:
        values, bad = load_finite_rows(v, first, config.STEP, config)
        reached = tl.max(tl.where(powers != 0.0, bad[None, :], 0), 1)
        out = tl.where((reached > 0)[:, None], float("nan"), out)
    else:
        values = load_rows(v, first, config.STEP, config)
    return add_product(powers.to(values.dtype), values, out), top, total


@triton.jit
def _attend_all(queries, rows, k, v, item, head, config, CAREFUL: constexpr):
    """An item's tiles of keys one after another: the sum of values, and of the powers their largest exponent and sum.

    With CAREFUL, values that are not finite reach only queries that attend them; without, which is faster, all queries
    of the tile, as zero times NaN is NaN.
    """
    out = tl.zeros([config.T, config.WIDTH], tl.float32)
    # Below every score that is no -inf, so that its difference to -inf is -inf and not NaN.
    largest = tl.full([config.T], -3.0e38, tl.float32)
    total = tl.zeros([config.T], tl.float32)
    if CAREFUL:
        for entry in tl.range(item.start, item.end, num_stages=1):
            out, largest, total = _attend(entry, out, largest, total, queries, rows, k, v, head, config, True, True)
    else:
        for entry in range(item.start, tl.minimum(item.end, item.unmasked)):
            out, largest, total = _attend(entry, out, largest, total, queries, rows, k, v, head, config, True, False)
        for entry in range(tl.maximum(item.start, item.unmasked), item.end):
            out, largest, total = _attend(entry, out, largest, total, queries, rows, k, v, head, config, False, False)
    return out, largest, total


@triton.jit
def forward_kernel(q, k, v, out, lse, walk, parts, part_lse, sizes, biases, dropout, scale, config):
    """One item, one sample; `scale` in exponents of two.

    q, k, v, out: Heads. lse: float32 [B, H, Sq]. parts, part_lse: float32 [B, slots, T, WIDTH] and [B, slots, T].
    """
    item = load_item(walk, config)
    head = this_head(item, walk, sizes, biases, dropout, scale)
    rows = item.first + tl.arange(0, config.T)
    places = rows[:, None]
    queries = load_rows(rows_of(q, item.batch, item.head, sizes.queries, sizes.width), item.first, config.T, config)
    k_rows = rows_of(k, item.batch, item.head, sizes.keys, sizes.width)
    v_rows = rows_of(v, item.batch, item.head, sizes.keys, sizes.width)
    result, largest, total = _attend_all(queries, places, k_rows, v_rows, item, head, config, False)
    if not_finite(result):
        result, largest, total = _attend_all(queries, places, k_rows, v_rows, item, head, config, True)
    nothing = total == 0.0
    result = tl.where(nothing[:, None], 0.0, result / tl.where(nothing, 1.0, total)[:, None])
    sums = (largest + tl.log2(tl.where(nothing, 1.0, total))) * 0.6931471805599453
    if item.slot < 0:
        sums = tl.where(nothing, float("inf"), sums)
        store_rows(rows_of(out, item.batch, item.head, sizes.queries, sizes.width), result, item.first, config)
        tl.store(lse + head.number * sizes.queries + rows, sums, mask=rows < sizes.queries)
    else:
        sums = tl.where(nothing, float("-inf"), sums)
        part = item.batch * walk.slots + item.slot
        store_rows(part_of(parts, part, config), result, 0, config)
        tl.store(part_lse + part * config.T + tl.arange(0, config.T), sums)


@triton.jit
def merge_kernel(out, lse, merges, slots, parts, part_lse, sizes, config):
    """Join the parts of one long row of one sample."""
    merge = merges + tl.program_id(0) * 4
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1) * config.T
    slot, count = tl.load(merge + 2), tl.load(merge + 3)
    rows = first + tl.arange(0, config.T)
    places = tl.arange(0, config.T)
    largest = tl.full([config.T], -3.0e38, tl.float32)
    for part in range(count):
        number = batch * slots + slot + part
        largest = tl.maximum(largest, tl.load(part_lse + number * config.T + places))
    total = tl.zeros([config.T], tl.float32)
    result = tl.zeros([config.T, config.WIDTH], tl.float32)
    for part in range(count):
        number = batch * slots + slot + part
        weight = tl.exp(tl.load(part_lse + number * config.T + places) - largest)
        total += weight
        result += weight[:, None] * load_rows(part_of(parts, number, config), 0, config.T, config)
    nothing = total == 0.0
    result = tl.where(nothing[:, None], 0.0, result / tl.where(nothing, 1.0, total)[:, None])
    sums = tl.where(nothing, float("inf"), largest + tl.log(tl.where(nothing, 1.0, total)))
    store_rows(rows_of(out, batch, head, sizes.queries, sizes.width), result, first, config)
    tl.store(lse + (batch * sizes.heads + head) * sizes.queries + rows, sums, mask=rows < sizes.queries)


@triton.jit
def score_gradients(scores, d_powers, shift, delta, rows, columns, mask, head, config, MASKED: constexpr):
    """A tile's probabilities as the output has them, and the gradients of its scores.

    scores: products of queries and keys. d_powers: of the output's gradients and values. Both are [queries, keys] or
    their transpose; rows, columns: as `attended_scores` has them. shift: log-sum-exp in exponents of two. delta: the
    inner product of output and its gradient. Both shaped like rows.
    """
    scores = attended_scores(scores * head.scale, rows, columns, mask, head, config, MASKED)
    attends = scores != float("-inf")
    powers = tl.where(attends, tl.exp2(scores - shift), 0.0)
    seen = powers
    if config.DROPOUT:
        keep = keep_mask(head, rows, columns)
        d_powers = tl.where(keep, d_powers * head.dropout.kept, 0.0)
        seen = tl.where(keep, powers * head.dropout.kept, 0.0)
    # Where a query does not attend a key, NaN in the one is none of the other's business.
    d_scores = tl.where(attends, powers * (d_powers - delta), 0.0)
    return seen, d_scores


@triton.jit
def exponents_of(lse, head, rows):
    """Of a tile's queries: log-sum-exp in exponents of two."""
    place = lse + head.number * head.queries + rows
    return tl.load(place, mask=rows < head.queries, other=float("inf")) * 1.4426950408889634


@triton.jit
def add_parts_kernel(target, merges, slots, parts, length, width, config):
    """Add up the parts of one long row or column of one sample, in their order. target: Heads."""
    merge = merges + tl.program_id(0) * 4
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1) * config.T
    slot, count = tl.load(merge + 2), tl.load(merge + 3)
    result = tl.zeros([config.T, config.WIDTH], tl.float32)
    for part in range(count):
        result += load_rows(part_of(parts, batch * slots + slot + part, config), 0, config.T, config)
    store_rows(rows_of(target, batch, head, length, width), result, first, config)


@triton.jit
def _along_row(
    entry, d_q, queries, d_out, shift, inner, rows, k, v, d_bias, head, config, MASKED: constexpr, CAREFUL: constexpr
):
    """Add what one tile of keys does to the gradients of a row of queries."""
    first = first_of(entry, head.walk, config)
    columns = (first + tl.arange(0, config.STEP))[None, :]
    keys = load_rows(k, first, config.STEP, config)
    values = load_rows(v, first, config.STEP, config)
    mask = mask_of(entry, head.walk, config) if MASKED else 0
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
def _along_whole_row(queries, d_out, shift, inner, rows, k, v, d_bias, item, head, config, CAREFUL: constexpr):
    """The gradients of an item's queries. CAREFUL as in the forward."""
    d_q = tl.zeros([config.T, config.WIDTH], tl.float32)
    if CAREFUL:
        for entry in tl.range(item.start, item.end, num_stages=1):
            d_q = _along_row(entry, d_q, queries, d_out, shift, inner, rows, k, v, d_bias, head, config, True, True)
    else:
        for entry in range(item.start, tl.minimum(item.end, item.unmasked)):
            d_q = _along_row(entry, d_q, queries, d_out, shift, inner, rows, k, v, d_bias, head, config, True, False)
        for entry in range(tl.maximum(item.start, item.unmasked), item.end):
            d_q = _along_row(entry, d_q, queries, d_out, shift, inner, rows, k, v, d_bias, head, config, False, False)
    return d_q


@triton.jit
def queries_kernel(
    d_out, q, k, v, lse, delta, out, d_q, d_bias, walk, parts, sizes, biases, dropout, scale, factor, config
):
    """Gradients of one item's queries, of one sample; and `delta`, of which the gradients of keys are made.

    d_out, q, k, v, out, d_q: Heads. lse, delta: float32 [B, H, Sq]. d_bias: float32 [B, H, Sq, Sk], or None. parts:
    float32 [B, slots, T, WIDTH]. scale: in exponents of two. factor: what scores were scaled by.
    """
    item = load_item(walk, config)
    head = this_head(item, walk, sizes, biases, dropout, scale)
    rows = (item.first + tl.arange(0, config.T))[:, None]
    queries = load_rows(rows_of(q, item.batch, item.head, sizes.queries, sizes.width), item.first, config.T, config)
    of_out = load_rows(rows_of(d_out, item.batch, item.head, sizes.queries, sizes.width), item.first, config.T, config)
    of_row = load_rows(rows_of(out, item.batch, item.head, sizes.queries, sizes.width), item.first, config.T, config)
    inner = tl.sum(of_out.to(tl.float32) * of_row.to(tl.float32), 1)[:, None]
    tl.store(delta + head.number * sizes.queries + rows, inner, mask=rows < sizes.queries)
    shift = exponents_of(lse, head, rows)
    k_rows = rows_of(k, item.batch, item.head, sizes.keys, sizes.width)
    v_rows = rows_of(v, item.batch, item.head, sizes.keys, sizes.width)
    if d_bias is not None:
        d_bias += head.number * sizes.queries * sizes.keys
    result = _along_whole_row(queries, of_out, shift, inner, rows, k_rows, v_rows, d_bias, item, head, config, False)
    if not_finite(result):
        result = _along_whole_row(queries, of_out, shift, inner, rows, k_rows, v_rows, d_bias, item, head, config, True)
    result *= factor
    if item.slot < 0:
        store_rows(rows_of(d_q, item.batch, item.head, sizes.queries, sizes.width), result, item.first, config)
    else:
        store_rows(part_of(parts, item.batch * walk.slots + item.slot, config), result, 0, config)


@triton.jit
def _along_column(
    entry, d_k, d_v, keys, values, columns, q, d_out, lse, delta, head, config, MASKED: constexpr, CAREFUL: constexpr
):
    """Add what one tile of queries does to the gradients of a column of keys and their values."""
    first = first_of(entry, head.walk, config)
    rows = (first + tl.arange(0, config.STEP))[None, :]
    queries = load_rows(q, first, config.STEP, config)
    of_out = load_rows(d_out, first, config.STEP, config)
    shift = exponents_of(lse, head, rows)
    inner = tl.load(delta + head.number * head.queries + rows, mask=rows < head.queries, other=0.0)
    mask = mask_of(entry, head.walk, config) if MASKED else 0
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
def _along_whole_column(keys, values, columns, q, d_out, lse, delta, item, head, config, CAREFUL: constexpr):
    """The gradients of an item's keys and values. CAREFUL as in the forward."""
    d_k = tl.zeros([config.T, config.WIDTH], tl.float32)
    d_v = tl.zeros([config.T, config.WIDTH], tl.float32)
    if CAREFUL:
        for entry in tl.range(item.start, item.end, num_stages=1):
            d_k, d_v = _along_column(
                entry, d_k, d_v, keys, values, columns, q, d_out, lse, delta, head, config, True, True
            )
    else:
        for entry in range(item.start, tl.minimum(item.end, item.unmasked)):
            d_k, d_v = _along_column(
                entry, d_k, d_v, keys, values, columns, q, d_out, lse, delta, head, config, True, False
            )
        for entry in range(tl.maximum(item.start, item.unmasked), item.end):
            d_k, d_v = _along_column(
                entry, d_k, d_v, keys, values, columns, q, d_out, lse, delta, head, config, False, False
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
    head = this_head(item, walk, sizes, biases, dropout, scale)
    columns = (item.first + tl.arange(0, config.T))[:, None]
    keys = load_rows(rows_of(k, item.batch, item.head, sizes.keys, sizes.width), item.first, config.T, config)
    values = load_rows(rows_of(v, item.batch, item.head, sizes.keys, sizes.width), item.first, config.T, config)
    q_rows = rows_of(q, item.batch, item.head, sizes.queries, sizes.width)
    d_out_rows = rows_of(d_out, item.batch, item.head, sizes.queries, sizes.width)
    of_keys, of_values = _along_whole_column(
        keys, values, columns, q_rows, d_out_rows, lse, delta, item, head, config, False
    )
    if not_finite(of_keys + of_values):
        of_keys, of_values = _along_whole_column(
            keys, values, columns, q_rows, d_out_rows, lse, delta, item, head, config, True
        )
    of_keys *= factor
    if item.slot < 0:
        store_rows(rows_of(d_k, item.batch, item.head, sizes.keys, sizes.width), of_keys, item.first, config)
        store_rows(rows_of(d_v, item.batch, item.head, sizes.keys, sizes.width), of_values, item.first, config)
    else:
        part = item.batch * walk.slots + item.slot
        store_rows(part_of(k_parts, part, config), of_keys, 0, config)
        store_rows(part_of(v_parts, part, config), of_values, 0, config)
