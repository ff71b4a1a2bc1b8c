"""What both backward kernels do with a tile: probabilities again from the log-sum-exp, and the gradients of scores
(Dao et al., 2022, arXiv:2205.14135, algorithm 4); and how parts of long rows are added up, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.tiles import (
    attended_scores,
    keep_mask,
    load_rows,
    part_of,
    rows_of,
    store_rows,
)

__all__ = ["add_parts_kernel", "row_statistics", "score_gradients"]


@triton.jit
def score_gradients(scores, d_powers, shift, delta, rows, columns, mask, head, config, MASKED: tl.constexpr):
    """A tile's probabilities as the output has them, and the gradients of its scores.

    scores: products of queries and keys. d_powers: of the output's gradients and values. Both are [queries, keys] or
    their transpose; rows, columns: as `attended_scores` has them. shift, delta: as `row_statistics` gives them, shaped
    like rows.
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
def row_statistics(lse, delta, head, rows):
    """Of a tile's queries: log-sum-exp in exponents of two, and the inner product of output and its gradient."""
    inside = rows < head.queries
    place = head.number * head.queries + rows
    shift = tl.load(lse + place, mask=inside, other=float("inf")) * 1.4426950408889634
    return shift, tl.load(delta + place, mask=inside, other=0.0)


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
