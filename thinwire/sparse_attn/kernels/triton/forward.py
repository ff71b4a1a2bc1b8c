"""Forward of block-sparse attention in Triton: an online softmax along a row of tiles, or a part of a long one, and the
merge of such parts by their log-sum-exp (Dao et al., 2022, arXiv:2205.14135)."""

from __future__ import annotations

import triton
import triton.language as tl

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
def _attend(
    entry, out, largest, total, queries, rows, k, v, walk, head, config, MASKED: tl.constexpr, CAREFUL: tl.constexpr
):
    """Take one more tile of keys in."""
    first = first_of(entry, walk, config)
    columns = (first + tl.arange(0, config.STEP))[None, :]
    keys = load_rows(k, first, config.STEP, config)
    scores = product(queries, tl.trans(keys)) * head.scale
    mask = mask_of(entry, walk, config) if MASKED else 0
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
def _attend_all(queries, rows, k, v, item, walk, head, config, CAREFUL: tl.constexpr):
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
            out, largest, total = _attend(
                entry, out, largest, total, queries, rows, k, v, walk, head, config, True, True
            )
    else:
        for entry in range(item.start, tl.minimum(item.end, item.unmasked)):
            out, largest, total = _attend(
                entry, out, largest, total, queries, rows, k, v, walk, head, config, True, False
            )
        for entry in range(tl.maximum(item.start, item.unmasked), item.end):
            out, largest, total = _attend(
                entry, out, largest, total, queries, rows, k, v, walk, head, config, False, False
            )
    return out, largest, total


@triton.jit
def forward_kernel(q, k, v, out, lse, walk, parts, part_lse, sizes, biases, dropout, scale, config):
    """One item, one sample; `scale` in exponents of two.

    q, k, v, out: Heads. lse: float32 [B, H, Sq]. parts, part_lse: float32 [B, slots, T, WIDTH] and [B, slots, T].
    """
    item = load_item(walk, config)
    head = this_head(item, sizes, biases, dropout, scale)
    rows = item.first + tl.arange(0, config.T)
    places = rows[:, None]
    queries = load_rows(rows_of(q, item.batch, item.head, sizes.queries, sizes.width), item.first, config.T, config)
    k_rows = rows_of(k, item.batch, item.head, sizes.keys, sizes.width)
    v_rows = rows_of(v, item.batch, item.head, sizes.keys, sizes.width)
    result, largest, total = _attend_all(queries, places, k_rows, v_rows, item, walk, head, config, False)
    if not_finite(result):
        result, largest, total = _attend_all(queries, places, k_rows, v_rows, item, walk, head, config, True)
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
