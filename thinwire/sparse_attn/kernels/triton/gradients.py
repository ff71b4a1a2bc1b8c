"""What both backward kernels do with a tile: probabilities again from the log-sum-exp, and the gradients of scores
(Dao et al., 2022, arXiv:2205.14135, algorithm 4); and how parts of long rows are added up, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.sparse_attn.kernels.triton.tiles import attended_scores, keep_mask, load_rows, store_rows

__all__ = ["add_parts_kernel", "row_statistics", "score_gradients"]


@triton.jit
def score_gradients(
    queries,
    keys,
    values,
    d_out,
    shift,
    delta,
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
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_KEY_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile's probabilities as the output has them, and the gradients of its scores."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
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
    attends = scores != float("-inf")
    powers = tl.where(attends, tl.exp2(scores - shift[:, None]), 0.0)
    d_powers = tl.dot(d_out, tl.trans(values), input_precision="ieee")
    seen = powers
    if DROPOUT:
        keep = keep_mask(seed, number, rows, columns, threshold)
        d_powers = tl.where(keep, d_powers * kept, 0.0)
        seen = tl.where(keep, powers * kept, 0.0)
    # Where a query does not attend a key, NaN in the one is none of the other's business.
    d_scores = tl.where(attends, powers * (d_powers - delta[:, None]), 0.0)
    return seen, d_scores


@triton.jit
def row_statistics(lse, delta, number, rows, query_length):
    """Of a tile's queries: log-sum-exp in exponents of two, and the inner product of output and its gradient."""
    inside = rows < query_length
    place = number * query_length + rows
    shift = tl.load(lse + place, mask=inside, other=float("inf")) * 1.4426950408889634
    return shift, tl.load(delta + place, mask=inside, other=0.0)


@triton.jit
def add_parts_kernel(
    target,
    merges,
    parts,
    target_batch,
    target_head,
    target_row,
    length,
    width,
    slots,
    T: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add up the parts of one long row or column of one sample, in their order."""
    merge = merges + tl.program_id(0) * 4
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(merge)
    first = tl.load(merge + 1) * T
    slot, count = tl.load(merge + 2), tl.load(merge + 3)
    result = tl.zeros([T, WIDTH], tl.float32)
    for part in range(count):
        result += load_rows(parts + (batch * slots + slot + part) * T * WIDTH, 0, T, WIDTH, WIDTH, T, WIDTH)
    store_rows(target + batch * target_batch + head * target_head, result, first, length, target_row, width, T, WIDTH)
