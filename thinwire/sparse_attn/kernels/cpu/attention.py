"""Block-sparse attention on a CPU, one head: forward, an online softmax over chunks of the keys that a tile of queries
attends (Dao et al., 2022, arXiv:2205.14135, algorithm 1); backward, probabilities again from the saved log-sum-exp, and
all three gradients in one pass over the tiles (algorithm 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.simd import floats
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.products import ROWS, Matrix, product, product_where_nonzero
from thinwire.sparse_attn.block_index import Heads
from thinwire.sparse_attn.kernels.cpu.tiles import (
    CHUNK,
    LARGEST_TILE,
    LOG2_E,
    LOWEST,
    Dropout,
    Floats,
    Integers,
    Rows,
    Scores,
    Tile,
    add_masks,
    drop,
    fill_keys,
    gather_rows,
    head_of,
    load_transposed,
    power_of_two,
    rows_of,
    store_transposed,
)

_LN_2 = np.float32(0.6931471805599453)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_INFINITY = np.float32(np.inf)


@helper
def _matrix(rows: int, columns: int) -> Matrix:
    return Matrix(np.empty(rows * columns, np.float32), columns, 1)


@kernel
def forward_heads(lse: Floats, scores: Scores, parts: int, matrices: Sequence[Heads], tasks: Integers) -> None:
    """Write the output, the last of `matrices` after q, k and v, and `lse`, flat [B, H, Sq], for the tasks with these
    numbers: `parts` tasks a head, each an equal part of its rows of blocks. Heads are counted sample by sample."""
    for task in tasks:
        _forward_rows(matrices, lse, scores, task // parts, task % parts, parts)


@helper
def _forward_rows(matrices: Sequence[Heads], lse: Floats, scores: Scores, number: int, part: int, parts: int) -> None:
    """Of head `number` the rows of blocks that are this one of `parts`."""
    blocks, sizes, causal = scores.blocks, scores.sizes, scores.causal
    batch, of_sample = number // sizes.heads, number % sizes.heads
    q, k = rows_of(matrices[0], batch, of_sample), rows_of(matrices[1], batch, of_sample)
    v, out = rows_of(matrices[2], batch, of_sample), rows_of(matrices[3], batch, of_sample)
    head, block, width = head_of(scores, batch, of_sample), blocks.block, sizes.width
    lanes, padded = min(block, LARGEST_TILE), (width + LANES - 1) // LANES * LANES
    keys, packed, powers = np.empty(CHUNK, np.int32), _matrix(CHUNK, padded), _matrix(CHUNK, lanes)
    queries_t, out_t = _matrix(padded, lanes), _matrix(padded, lanes)
    largest, total, factor = np.empty(lanes, np.float32), np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for row in range(blocks.num_rows * part // parts, blocks.num_rows * (part + 1) // parts):
        row_end = min(row * block + block, sizes.queries)
        for first in range(row * block, row_end, lanes):
            tile = Tile(first, min(lanes, row_end - first), lanes)
            key_end = min(sizes.keys, first + tile.queries) if causal else sizes.keys
            load_transposed(q, tile, width, scores.scale * LOG2_E, queries_t.values)
            largest[:] = LOWEST
            total[:] = _ZERO
            out_t.values[:] = _ZERO
            entry, last = head.row_offsets[row], head.row_offsets[row + 1]
            while entry < last:
                entry, count = fill_keys(keys, blocks.columns, entry, last, block, key_end, head.key_bias)
                if count == 0:
                    continue
                rows = (count + ROWS - 1) // ROWS * ROWS
                gather_rows(k, keys, count, rows, width, padded, packed.values)
                product(packed, queries_t, powers, rows, lanes, padded, False)
                add_masks(powers.values, tile, keys, count, head, causal)
                _soften(powers.values, tile, keys, count, largest, total, factor, head.dropout)
                for lane in range(0, lanes, LANES):
                    shrink = floats.load(factor, lane)
                    for place in range(lane, padded * lanes + lane, lanes):
                        floats.store(out_t.values, place, floats.multiply(floats.load(out_t.values, place), shrink))
                finite = gather_rows(v, keys, count, rows, width, padded, packed.values)
                values_t = Matrix(packed.values, 1, padded)
                product_where_nonzero(values_t, powers, out_t, padded, lanes, count, True, False, finite)
            for lane in range(tile.queries):
                divisor, place = total[lane], number * sizes.queries + first + lane
                lse[place] = _INFINITY
                factor[lane] = _ZERO
                if divisor != _ZERO:  # a NaN is not
                    lse[place] = largest[lane] * _LN_2 + np.log(divisor)
                    factor[lane] = _ONE / divisor
            store_transposed(out_t.values, factor, tile, width, out)


@helper
def _soften(
    scores: Floats,
    tile: Tile,
    keys: Integers,
    count: int,
    largest: Floats,
    total: Floats,
    factor: Floats,
    dropout: Dropout,
) -> None:
    """Scores to powers relative to the largest so far; `factor` is what earlier powers have to be multiplied by."""
    lanes = tile.lanes
    for lane in range(0, lanes, LANES):
        before = floats.load(largest, lane)
        top = before
        for number in range(count):
            top = floats.larger(floats.load(scores, number * lanes + lane), top)
        shrink = power_of_two(floats.subtract(before, top))
        sums = floats.multiply(floats.load(total, lane), shrink)
        for number in range(count):
            power = power_of_two(floats.subtract(floats.load(scores, number * lanes + lane), top))
            sums = floats.add(sums, power)
            if dropout.threshold != np.uint32(0):
                power = drop(power, tile.first + lane, keys[number], dropout)
            floats.store(scores, number * lanes + lane, power)
        floats.store(largest, lane, top)
        floats.store(total, lane, sums)
        floats.store(factor, lane, shrink)


@kernel
def backward_heads(lse: Floats, d_bias: Floats, scores: Scores, matrices: Sequence[Heads], numbers: Integers) -> None:
    """Write the gradients of q, k and v, the last of `matrices` after the output's gradient, q, k, v and the output, of
    the heads with these numbers, counted sample by sample; `lse` is flat [B, H, Sq].

    Unless it is empty, add to `d_bias`, which lies in memory as the bias does.
    """
    for number in numbers:
        _backward_head(lse, d_bias, scores, matrices, number)


@helper
def _backward_head(lse: Floats, d_bias: Floats, scores: Scores, matrices: Sequence[Heads], number: int) -> None:
    """Names that end in `_t` are transposed: a tile's queries lie side by side."""
    blocks, sizes, biases, causal = scores.blocks, scores.sizes, scores.biases, scores.causal
    batch, of_sample, block, width = number // sizes.heads, number % sizes.heads, blocks.block, sizes.width
    d_out, q = rows_of(matrices[0], batch, of_sample), rows_of(matrices[1], batch, of_sample)
    k, v = rows_of(matrices[2], batch, of_sample), rows_of(matrices[3], batch, of_sample)
    out, d_q = rows_of(matrices[4], batch, of_sample), rows_of(matrices[5], batch, of_sample)
    d_k, d_v = rows_of(matrices[6], batch, of_sample), rows_of(matrices[7], batch, of_sample)
    of_bias = Matrix(d_bias[batch * biases.batch + of_sample * biases.head :], biases.row, biases.column)
    of_lse, head = lse[number * sizes.queries : (number + 1) * sizes.queries], head_of(scores, batch, of_sample)
    lanes, padded = min(block, LARGEST_TILE), (width + LANES - 1) // LANES * LANES
    keys, queries, scales = np.empty(CHUNK, np.int32), np.empty(lanes, np.int32), np.full(lanes, scores.scale)
    shift, delta = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    k_rows, v_rows, d_rows = _matrix(CHUNK, padded), _matrix(CHUNK, padded), _matrix(CHUNK, padded)
    powers, d_scores = _matrix(CHUNK, lanes), _matrix(CHUNK, lanes)
    q_rows, d_out_rows = _matrix(lanes, padded), _matrix(lanes, padded)
    q_t, d_out_t, d_q_t = _matrix(padded, lanes), _matrix(padded, lanes), _matrix(padded, lanes)
    k_t = Matrix(k_rows.values, 1, padded)
    for row in range(sizes.keys):
        d_k.values[row * d_k.stride : row * d_k.stride + width] = _ZERO
        d_v.values[row * d_v.stride : row * d_v.stride + width] = _ZERO
    for row in range(blocks.num_rows):
        row_end = min(row * block + block, sizes.queries)
        for first in range(row * block, row_end, lanes):
            tile = Tile(first, min(lanes, row_end - first), lanes)
            key_end = min(sizes.keys, first + tile.queries) if causal else sizes.keys
            load_transposed(q, tile, width, scores.scale * LOG2_E, q_t.values)
            load_transposed(d_out, tile, width, _ONE, d_out_t.values)
            for lane in range(tile.queries):
                queries[lane] = first + lane
            finite_q = gather_rows(q, queries, tile.queries, lanes, width, padded, q_rows.values)
            finite_out = gather_rows(d_out, queries, tile.queries, lanes, width, padded, d_out_rows.values)
            finite = _statistics(d_out_rows, out, of_lse, tile, width, shift, delta) and finite_q and finite_out
            d_q_t.values[:] = _ZERO
            entry, last = head.row_offsets[row], head.row_offsets[row + 1]
            while entry < last:
                entry, count = fill_keys(keys, blocks.columns, entry, last, block, key_end, head.key_bias)
                if count == 0:
                    continue
                rows = (count + ROWS - 1) // ROWS * ROWS
                finite_k = gather_rows(k, keys, count, rows, width, padded, k_rows.values)
                finite_v = gather_rows(v, keys, count, rows, width, padded, v_rows.values)
                product(k_rows, q_t, powers, rows, lanes, padded, False)
                add_masks(powers.values, tile, keys, count, head, causal)
                product(v_rows, d_out_t, d_scores, rows, lanes, padded, False)
                _differentiate(powers.values, d_scores.values, tile, keys, count, shift, delta, head.dropout)
                _add_to_bias(of_bias, d_scores.values, tile, keys, count)
                product_where_nonzero(powers, d_out_rows, d_rows, rows, padded, lanes, False, True, finite)
                _scatter_rows(d_v, keys, count, width, _ONE, d_rows)
                product_where_nonzero(d_scores, q_rows, d_rows, rows, padded, lanes, False, True, finite)
                _scatter_rows(d_k, keys, count, width, scores.scale, d_rows)
                product_where_nonzero(k_t, d_scores, d_q_t, padded, lanes, count, True, False, finite_k and finite_v)
            store_transposed(d_q_t.values, scales, tile, width, d_q)


@helper
def _statistics(
    d_out_rows: Matrix, out: Rows, lse: Floats, tile: Tile, width: int, shift: Floats, delta: Floats
) -> bool:
    """Of a tile's queries: log-sum-exp in exponents of two, and the inner product of output and its gradient. Whether
    nothing about them is infinite or NaN but a log-sum-exp of +inf."""
    finite = True
    shift[:] = _INFINITY
    delta[:] = _ZERO
    for number in range(tile.queries):
        query = tile.first + number
        shift[number] = lse[query] * LOG2_E
        gradient = d_out_rows.values[number * d_out_rows.row :]
        value = out.values[query * out.stride : query * out.stride + width]
        total = _ZERO
        for at in range(width):
            total += gradient[at] * value[at]
        delta[number] = total
        finite = finite and total * _ZERO == _ZERO and shift[number] == shift[number]
    return finite


@helper
def _differentiate(
    powers: Floats,
    d_scores: Floats,
    tile: Tile,
    keys: Integers,
    count: int,
    shift: Floats,
    delta: Floats,
    dropout: Dropout,
) -> None:
    """Scores to probabilities as the output has them, dropped ones 0; their gradients to those of the scores."""
    zero, nothing = floats.broadcast(_ZERO), floats.broadcast(-_INFINITY)
    for lane in range(0, tile.lanes, LANES):
        of_row, inner = floats.load(shift, lane), floats.load(delta, lane)
        for number in range(count):
            place = number * tile.lanes + lane
            score, d_power = floats.load(powers, place), floats.load(d_scores, place)
            power = power_of_two(floats.subtract(score, of_row))
            power = floats.select(floats.equal(score, nothing), zero, power)
            seen = power
            if dropout.threshold != np.uint32(0):
                d_power = drop(d_power, tile.first + lane, keys[number], dropout)
                seen = drop(power, tile.first + lane, keys[number], dropout)
            d_score = floats.multiply(power, floats.subtract(d_power, inner))
            # A query that does not attend the key: NaN in its gradient, or in the key's value, is none of its business.
            d_score = floats.select(floats.equal(power, zero), zero, d_score)
            floats.store(powers, place, seen)
            floats.store(d_scores, place, d_score)


@helper
def _add_to_bias(d_bias: Matrix, d_scores: Floats, tile: Tile, keys: Integers, count: int) -> None:
    values, row, column = d_bias.values, d_bias.row, d_bias.column
    if values.size:
        for number in range(count):
            for lane in range(tile.queries):
                place = (tile.first + lane) * row + np.int64(keys[number]) * column
                values[place] += d_scores[number * tile.lanes + lane]


@helper
def _scatter_rows(target: Rows, keys: Integers, count: int, width: int, scale: np.float32, rows: Matrix) -> None:
    """Add `scale` times the first of `rows` to rows `keys` of `target`."""
    values, added_values = target.values, rows.values
    whole = width // LANES * LANES
    factor = floats.broadcast(scale)
    for number in range(count):
        origin, place = number * rows.row, np.int64(keys[number]) * target.stride
        for at in range(0, whole, LANES):
            added = floats.multiply_add(floats.load(added_values, origin + at), factor, floats.load(values, place + at))
            floats.store(values, place + at, added)
        for at in range(whole, width):
            values[place + at] += scale * added_values[origin + at]
