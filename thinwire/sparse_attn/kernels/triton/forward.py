"""Forward of block-sparse attention in Triton: an online softmax along a row of tiles, or a part of a long one, and the
merge of such parts by their log-sum-exp (Dao et al., 2022, arXiv:2205.14135)."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.tiles import (
    attended_scores,
    finite_rows,
    keep_mask,
    load_item,
    load_rows,
    part_of,
    rows_of,
    store_rows,
    this_head,
)

__all__ = ["forward_kernel", "merge_kernel"]


@triton.jit
def _attend(entry, out, largest, total, queries, rows, k, v, walk, head, config, MASKED: tl.constexpr):
    """Take one more tile of keys in."""
    first = tl.load(walk.entries + entry) * config.T
    columns = first + tl.arange(0, config.T)
    keys = load_rows(k, first, config)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * head.scale
    mask = tl.load(walk.masks + entry) if MASKED else 0
    scores = attended_scores(scores, rows, columns, mask, head, config, MASKED)
    top = tl.maximum(largest, tl.max(scores, 1))
    powers = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(largest - top)
    total = total * shrink + tl.sum(powers, 1)
    out = out * shrink[:, None]
    if config.DROPOUT:
        powers = tl.where(keep_mask(head, rows, columns), powers * head.dropout.kept, 0.0)
    values = load_rows(v, first, config)
    if MASKED or config.HAS_KEY_BIAS or config.HAS_BIAS:
        values, bad = finite_rows(values)
        reached = tl.max(tl.where(powers != 0.0, bad[None, :], 0), 1)
        out = tl.where((reached > 0)[:, None], float("nan"), out)
    out += tl.dot(powers.to(values.dtype), values, input_precision="ieee")
    return out, top, total


@triton.jit
def forward_kernel(q, k, v, out, lse, walk, parts, part_lse, sizes, biases, dropout, scale, config):
    """One item, one sample; `scale` in exponents of two.

    q, k, v, out: Heads. lse: float32 [B, H, Sq]. parts, part_lse: float32 [B, slots, T, WIDTH] and [B, slots, T].
    """
    item = load_item(walk, config)
    head = this_head(item, sizes, biases, dropout, scale)
    rows = item.first + tl.arange(0, config.T)
    queries = load_rows(rows_of(q, item.batch, item.head, sizes.queries, sizes.width), item.first, config)
    k_rows = rows_of(k, item.batch, item.head, sizes.keys, sizes.width)
    v_rows = rows_of(v, item.batch, item.head, sizes.keys, sizes.width)
    result = tl.zeros([config.T, config.WIDTH], tl.float32)
    # Below every score that is no -inf, so that its difference to -inf is -inf and not NaN.
    largest = tl.full([config.T], -3.0e38, tl.float32)
    total = tl.zeros([config.T], tl.float32)
    for unmasked in tl.static_range(2):
        start = tl.maximum(item.start, item.unmasked) if unmasked else item.start
        end = item.end if unmasked else tl.minimum(item.end, item.unmasked)
        for entry in range(start, end):
            result, largest, total = _attend(
                entry, result, largest, total, queries, rows, k_rows, v_rows, walk, head, config, unmasked == 0
            )
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
    head = tl.load(merge)
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
        result += weight[:, None] * load_rows(part_of(parts, number, config), 0, config)
    nothing = total == 0.0
    result = tl.where(nothing[:, None], 0.0, result / tl.where(nothing, 1.0, total)[:, None])
    sums = tl.where(nothing, float("inf"), largest + tl.log(tl.where(nothing, 1.0, total)))
    store_rows(rows_of(out, batch, head, sizes.queries, sizes.width), result, first, config)
    tl.store(lse + (batch * sizes.heads + head) * sizes.queries + rows, sums, mask=rows < sizes.queries)
