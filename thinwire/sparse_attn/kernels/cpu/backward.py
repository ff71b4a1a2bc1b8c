"""Backward of block-sparse attention on a CPU, one head: probabilities again from the saved log-sum-exp, and all three
gradients in one pass over the tiles (Dao et al., 2022, arXiv:2205.14135, algorithm 4)."""

from __future__ import annotations

import numpy as np

from thinwire.simd import floats
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.floats import LANES
from thinwire.simd.products import ROWS, Matrix, product, product_where_nonzero
from thinwire.sparse_attn.kernels.cpu.arguments import Floats, Head, HeadDropout, Heads, Integers, Rows, Scores, Tile
from thinwire.sparse_attn.kernels.cpu.tiles import (
    CHUNK,
    LARGEST_TILE,
    LOG2_E,
    add_masks,
    drop,
    fill_keys,
    gather_rows,
    head_of,
    load_rows,
    load_transposed,
    power_of_two,
    rows_of,
    store_transposed,
)

__all__ = ["backward_heads"]

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_INFINITY = np.float32(np.inf)


@kernel
def backward_heads(
    d_out: Heads,
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    lse: Floats,
    d_q: Heads,
    d_k: Heads,
    d_v: Heads,
    d_bias: Floats,
    scores: Scores,
    numbers: Integers,
) -> None:
    """Write `d_q`, `d_k` and `d_v` of the heads with these numbers, counted sample by sample; `lse` is flat [B, H, Sq].

    Unless it is empty, add to `d_bias`, which lies in memory as the bias does.
    """
    queries, biases = scores.sizes.queries, scores.biases
    for number in numbers:
        batch, head = number // scores.sizes.heads, number % scores.sizes.heads
        _backward_head(
            rows_of(d_out, batch, head),
            rows_of(q, batch, head),
            rows_of(k, batch, head),
            rows_of(v, batch, head),
            rows_of(out, batch, head),
            lse[number * queries : (number + 1) * queries],
            rows_of(d_q, batch, head),
            rows_of(d_k, batch, head),
            rows_of(d_v, batch, head),
            Matrix(d_bias[batch * biases.batch + head * biases.head :], biases.row, biases.column),
            scores,
            head_of(scores, batch, head),
        )


@helper
def _backward_head(
    d_out: Rows,
    q: Rows,
    k: Rows,
    v: Rows,
    out: Rows,
    lse: Floats,
    d_q: Rows,
    d_k: Rows,
    d_v: Rows,
    d_bias: Matrix,
    scores: Scores,
    head: Head,
) -> None:
    block, columns, row_offsets, causal = scores.blocks.block, scores.blocks.columns, head.row_offsets, scores.causal
    width, scale = scores.sizes.width, scores.scale
    out_values, out_row = out.values, out.stride
    lanes = min(block, LARGEST_TILE)
    padded = (width + LANES - 1) // LANES * LANES
    keys = np.empty(CHUNK, np.int32)
    k_rows = np.empty(CHUNK * padded, np.float32)
    v_rows = np.empty(CHUNK * padded, np.float32)
    powers = np.empty(CHUNK * lanes, np.float32)
    d_powers = np.empty(CHUNK * lanes, np.float32)
    d_rows = np.empty(CHUNK * padded, np.float32)
    q_t = np.empty(padded * lanes, np.float32)
    q_rows = np.empty(padded * lanes, np.float32)
    d_out_t = np.empty(padded * lanes, np.float32)
    d_out_rows = np.empty(padded * lanes, np.float32)
    d_q_t = np.empty(padded * lanes, np.float32)
    shift = np.empty(lanes, np.float32)
    delta = np.empty(lanes, np.float32)
    scales = np.full(lanes, scale)
    _clear(d_k, scores.sizes.keys, width)
    _clear(d_v, scores.sizes.keys, width)
    for row in range(scores.blocks.num_rows):
        row_end = min(row * block + block, scores.sizes.queries)
        for first in range(row * block, row_end, lanes):
            tile = Tile(first, min(lanes, row_end - first), lanes)
            key_end = min(scores.sizes.keys, first + tile.queries) if causal else scores.sizes.keys
            finite_q = load_transposed(q, tile, width, scale * LOG2_E, q_t)
            finite_d = load_transposed(d_out, tile, width, _ONE, d_out_t)
            load_rows(q, tile, width, padded, q_rows)
            load_rows(d_out, tile, width, padded, d_out_rows)
            shift[:] = _INFINITY
            delta[:] = _ZERO
            finite_queries = finite_q and finite_d
            for number in range(tile.queries):
                shift[number] = lse[first + number] * LOG2_E
                total = _ZERO
                for at in range(width):
                    total += d_out_rows[number * padded + at] * out_values[(first + number) * out_row + at]
                delta[number] = total
                finite_queries = finite_queries and total * _ZERO == _ZERO and shift[number] == shift[number]
            d_q_t[:] = _ZERO
            entry = row_offsets[row]
            while entry < row_offsets[row + 1]:
                entry, count = fill_keys(keys, columns, entry, row_offsets[row + 1], block, key_end, head.key_bias)
                if count == 0:
                    continue
                rows = (count + ROWS - 1) // ROWS * ROWS
                finite_k = gather_rows(k, keys, count, rows, width, padded, k_rows)
                finite_v = gather_rows(v, keys, count, rows, width, padded, v_rows)
                seen, d_scores = Matrix(powers, lanes, 1), Matrix(d_powers, lanes, 1)
                product(Matrix(k_rows, padded, 1), Matrix(q_t, lanes, 1), seen, rows, lanes, padded, False)
                add_masks(powers, tile, keys, count, head, causal)
                product(Matrix(v_rows, padded, 1), Matrix(d_out_t, lanes, 1), d_scores, rows, lanes, padded, False)
                _differentiate(powers, d_powers, tile, keys, count, shift, delta, head.dropout)
                _add_to_bias(d_bias, d_powers, tile, keys, count)
                added, of_out, of_q = (
                    Matrix(d_rows, padded, 1),
                    Matrix(d_out_rows, padded, 1),
                    Matrix(q_rows, padded, 1),
                )
                product_where_nonzero(seen, of_out, added, rows, padded, lanes, False, True, finite_queries)
                _scatter_rows(d_v, keys, count, width, _ONE, added)
                product_where_nonzero(d_scores, of_q, added, rows, padded, lanes, False, True, finite_queries)
                _scatter_rows(d_k, keys, count, width, scale, added)
                k_t, finite = Matrix(k_rows, 1, padded), finite_k and finite_v
                product_where_nonzero(k_t, d_scores, Matrix(d_q_t, lanes, 1), padded, lanes, count, True, False, finite)
            store_transposed(d_q_t, scales, tile, width, d_q)


@helper
def _clear(matrix: Rows, length: int, width: int) -> None:
    values, stride = matrix.values, matrix.stride
    for row in range(length):
        values[row * stride : row * stride + width] = _ZERO


@helper
def _differentiate(
    powers: Floats,
    d_scores: Floats,
    tile: Tile,
    keys: Integers,
    count: int,
    shift: Floats,
    delta: Floats,
    dropout: HeadDropout,
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
