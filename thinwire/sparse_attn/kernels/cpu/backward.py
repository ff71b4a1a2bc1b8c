"""Backward of block-sparse attention on a CPU, one head: probabilities again from the saved log-sum-exp, and all three
gradients in one pass over the tiles (Dao et al., 2022, arXiv:2205.14135, algorithm 4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thinwire.simd import floats
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.products import ROWS, Matrix, product, product_where_nonzero
from thinwire.sparse_attn.kernels.cpu.tiles import (
    CHUNK,
    LARGEST_TILE,
    LOG2_E,
    Floats,
    Head,
    HeadDropout,
    Heads,
    Integers,
    Rows,
    Scores,
    Tile,
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


class _Scratch(NamedTuple):
    """What a tile's gradients are worked out in; `_t`: transposed, the tile's queries side by side."""

    keys: Integers
    k_rows: Matrix
    v_rows: Matrix
    powers: Matrix
    d_scores: Matrix
    d_rows: Matrix
    q_t: Matrix
    q_rows: Matrix
    d_out_t: Matrix
    d_out_rows: Matrix
    d_q_t: Matrix
    shift: Floats
    delta: Floats


@helper
def _make_scratch(lanes: int, padded: int) -> _Scratch:
    return _Scratch(
        np.empty(CHUNK, np.int32),
        Matrix(np.empty(CHUNK * padded, np.float32), padded, 1),
        Matrix(np.empty(CHUNK * padded, np.float32), padded, 1),
        Matrix(np.empty(CHUNK * lanes, np.float32), lanes, 1),
        Matrix(np.empty(CHUNK * lanes, np.float32), lanes, 1),
        Matrix(np.empty(CHUNK * padded, np.float32), padded, 1),
        Matrix(np.empty(padded * lanes, np.float32), lanes, 1),
        Matrix(np.empty(padded * lanes, np.float32), padded, 1),
        Matrix(np.empty(padded * lanes, np.float32), lanes, 1),
        Matrix(np.empty(padded * lanes, np.float32), padded, 1),
        Matrix(np.empty(padded * lanes, np.float32), lanes, 1),
        np.empty(lanes, np.float32),
        np.empty(lanes, np.float32),
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
    blocks, width = scores.blocks, scores.sizes.width
    row_offsets, columns, block = head.row_offsets, blocks.columns, blocks.block
    lanes = min(block, LARGEST_TILE)
    scratch = _make_scratch(lanes, (width + LANES - 1) // LANES * LANES)
    keys, scales = scratch.keys, np.full(lanes, scores.scale)
    _clear(d_k, scores.sizes.keys, width)
    _clear(d_v, scores.sizes.keys, width)
    for row in range(blocks.num_rows):
        row_end = min(row * block + block, scores.sizes.queries)
        for first in range(row * block, row_end, lanes):
            tile = Tile(first, min(lanes, row_end - first), lanes)
            key_end = min(scores.sizes.keys, first + tile.queries) if scores.causal else scores.sizes.keys
            finite = _load_queries(d_out, q, out, lse, tile, width, scores.scale, scratch)
            entry = row_offsets[row]
            while entry < row_offsets[row + 1]:
                entry, count = fill_keys(keys, columns, entry, row_offsets[row + 1], block, key_end, head.key_bias)
                if count:
                    _take_keys(k, v, d_k, d_v, d_bias, tile, count, finite, scores, head, scratch)
            store_transposed(scratch.d_q_t.values, scales, tile, width, d_q)


@helper
def _load_queries(
    d_out: Rows, q: Rows, out: Rows, lse: Floats, tile: Tile, width: int, scale: np.float32, scratch: _Scratch
) -> bool:
    """Make ready for a tile of queries; whether nothing about them is infinite or NaN but a log-sum-exp of +inf."""
    padded, d_out_rows, shift, delta = scratch.q_rows.row, scratch.d_out_rows.values, scratch.shift, scratch.delta
    finite_q = load_transposed(q, tile, width, scale * LOG2_E, scratch.q_t.values)
    finite = load_transposed(d_out, tile, width, _ONE, scratch.d_out_t.values) and finite_q
    load_rows(q, tile, width, padded, scratch.q_rows.values)
    load_rows(d_out, tile, width, padded, d_out_rows)
    shift[:] = _INFINITY
    delta[:] = _ZERO
    for number in range(tile.queries):
        query = tile.first + number
        shift[number] = lse[query] * LOG2_E
        gradient, value = d_out_rows[number * padded :], out.values[query * out.stride : query * out.stride + width]
        total = _ZERO
        for at in range(width):
            total += gradient[at] * value[at]
        delta[number] = total
        finite = finite and total * _ZERO == _ZERO and shift[number] == shift[number]
    scratch.d_q_t.values[:] = _ZERO
    return finite


@helper
def _take_keys(
    k: Rows,
    v: Rows,
    d_k: Rows,
    d_v: Rows,
    d_bias: Matrix,
    tile: Tile,
    count: int,
    finite: bool,
    scores: Scores,
    head: Head,
    scratch: _Scratch,
) -> None:
    """Add to all gradients what the tile's queries and the next `count` keys do to them."""
    width, lanes, padded, keys = scores.sizes.width, tile.lanes, scratch.k_rows.row, scratch.keys
    powers, d_scores, d_rows = scratch.powers, scratch.d_scores, scratch.d_rows
    rows = (count + ROWS - 1) // ROWS * ROWS
    finite_k = gather_rows(k, keys, count, rows, width, padded, scratch.k_rows.values)
    finite_v = gather_rows(v, keys, count, rows, width, padded, scratch.v_rows.values)
    product(scratch.k_rows, scratch.q_t, powers, rows, lanes, padded, False)
    add_masks(powers.values, tile, keys, count, head, scores.causal)
    product(scratch.v_rows, scratch.d_out_t, d_scores, rows, lanes, padded, False)
    _differentiate(powers.values, d_scores.values, tile, keys, count, scratch.shift, scratch.delta, head.dropout)
    _add_to_bias(d_bias, d_scores.values, tile, keys, count)
    product_where_nonzero(powers, scratch.d_out_rows, d_rows, rows, padded, lanes, False, True, finite)
    _scatter_rows(d_v, keys, count, width, _ONE, d_rows)
    product_where_nonzero(d_scores, scratch.q_rows, d_rows, rows, padded, lanes, False, True, finite)
    _scatter_rows(d_k, keys, count, width, scores.scale, d_rows)
    k_t, finite_keys = Matrix(scratch.k_rows.values, 1, padded), finite_k and finite_v
    product_where_nonzero(k_t, d_scores, scratch.d_q_t, padded, lanes, count, True, False, finite_keys)


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
