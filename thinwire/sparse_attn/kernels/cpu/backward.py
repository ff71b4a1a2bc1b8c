"""Backward of block-sparse attention on a CPU, one head: probabilities again from the saved log-sum-exp, and all three
gradients in one pass over the tiles (Dao et al., 2022, arXiv:2205.14135, algorithm 4)."""

from __future__ import annotations

import numpy as np

from thinwire.simd import floats
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.floats import LANES
from thinwire.simd.products import ROWS, product, product_where_nonzero
from thinwire.sparse_attn.kernels.cpu.tiles import (
    CHUNK,
    LARGEST_TILE,
    LOG2_E,
    Floats,
    Numbers,
    add_masks,
    drop,
    fill_keys,
    gather_rows,
    load_rows,
    load_transposed,
    power_of_two,
)

__all__ = ["backward_head"]

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_INFINITY = np.float32(np.inf)


@kernel
def backward_head(
    d_out: Floats,
    d_out_row: int,
    q: Floats,
    q_row: int,
    k: Floats,
    k_row: int,
    v: Floats,
    v_row: int,
    out: Floats,
    out_row: int,
    lse: Floats,
    d_q: Floats,
    d_q_row: int,
    d_k: Floats,
    d_k_row: int,
    d_v: Floats,
    d_v_row: int,
    d_bias: Floats,
    row_offsets: Numbers,
    columns: Numbers,
    block: int,
    num_rows: int,
    query_length: int,
    key_length: int,
    width: int,
    key_bias: Floats,
    bias: Floats,
    bias_row: int,
    bias_step: int,
    causal: bool,
    scale: np.float32,
    head_key: np.uint32,
    threshold: np.uint32,
    kept: np.float32,
) -> None:
    """Write `d_q`, and add to `d_k`, `d_v` and, unless it is empty, `d_bias`, which lies in memory as `bias` does.

    The other arguments are `forward_rows`'.
    """
    tile = min(block, LARGEST_TILE)
    padded = (width + LANES - 1) // LANES * LANES
    keys = np.empty(CHUNK, np.int32)
    k_rows = np.empty(CHUNK * padded, np.float32)
    v_rows = np.empty(CHUNK * padded, np.float32)
    powers = np.empty(CHUNK * tile, np.float32)
    d_scores = np.empty(CHUNK * tile, np.float32)
    d_rows = np.empty(CHUNK * padded, np.float32)
    q_t = np.empty(padded * tile, np.float32)
    q_rows = np.empty(padded * tile, np.float32)
    d_out_t = np.empty(padded * tile, np.float32)
    d_out_rows = np.empty(padded * tile, np.float32)
    d_q_t = np.empty(padded * tile, np.float32)
    shift = np.empty(tile, np.float32)
    delta = np.empty(tile, np.float32)
    for row in range(num_rows):
        row_end = min(row * block + block, query_length)
        for first in range(row * block, row_end, tile):
            queries = min(tile, row_end - first)
            key_end = min(key_length, first + queries) if causal else key_length
            finite_q = load_transposed(q, q_row, first, queries, tile, width, padded, scale * LOG2_E, q_t)
            finite_d = load_transposed(d_out, d_out_row, first, queries, tile, width, padded, _ONE, d_out_t)
            load_rows(q, q_row, first, queries, tile, width, padded, q_rows)
            load_rows(d_out, d_out_row, first, queries, tile, width, padded, d_out_rows)
            shift[:] = _INFINITY
            delta[:] = _ZERO
            finite_queries = finite_q and finite_d
            for number in range(queries):
                shift[number] = lse[first + number] * LOG2_E
                total = _ZERO
                for at in range(width):
                    total += d_out_rows[number * padded + at] * out[(first + number) * out_row + at]
                delta[number] = total
                finite_queries = finite_queries and total * _ZERO == _ZERO and shift[number] == shift[number]
            d_q_t[:] = _ZERO
            entry = row_offsets[row]
            while entry < row_offsets[row + 1]:
                entry, count = fill_keys(keys, columns, entry, row_offsets[row + 1], block, key_end, key_bias)
                if count == 0:
                    continue
                rows = (count + ROWS - 1) // ROWS * ROWS
                finite_k = gather_rows(k, k_row, keys, count, rows, width, padded, k_rows)
                finite_v = gather_rows(v, v_row, keys, count, rows, width, padded, v_rows)
                product(k_rows, 0, padded, 1, q_t, 0, tile, powers, 0, tile, rows, tile, padded, False)
                add_masks(powers, tile, keys, count, first, queries, key_bias, bias, bias_row, bias_step, causal)
                product(v_rows, 0, padded, 1, d_out_t, 0, tile, d_scores, 0, tile, rows, tile, padded, False)
                _differentiate(powers, d_scores, tile, keys, count, first, shift, delta, head_key, threshold, kept)
                _add_to_bias(d_bias, d_scores, tile, keys, count, first, queries, bias_row, bias_step)
                if finite_queries:
                    product(powers, 0, tile, 1, d_out_rows, 0, padded, d_rows, 0, padded, rows, padded, tile, False)
                    _scatter_rows(d_v, d_v_row, keys, count, width, padded, _ONE, d_rows)
                    product(d_scores, 0, tile, 1, q_rows, 0, padded, d_rows, 0, padded, rows, padded, tile, False)
                    _scatter_rows(d_k, d_k_row, keys, count, width, padded, scale, d_rows)
                else:
                    product_where_nonzero(
                        powers, 0, tile, 1, d_out_rows, 0, padded, d_rows, 0, padded, rows, padded, tile, False, True
                    )
                    _scatter_rows(d_v, d_v_row, keys, count, width, padded, _ONE, d_rows)
                    product_where_nonzero(
                        d_scores, 0, tile, 1, q_rows, 0, padded, d_rows, 0, padded, rows, padded, tile, False, True
                    )
                    _scatter_rows(d_k, d_k_row, keys, count, width, padded, scale, d_rows)
                if finite_k and finite_v:
                    product(k_rows, 0, 1, padded, d_scores, 0, tile, d_q_t, 0, tile, padded, tile, count, True)
                else:
                    product_where_nonzero(
                        k_rows, 0, 1, padded, d_scores, 0, tile, d_q_t, 0, tile, padded, tile, count, True, False
                    )
            for number in range(queries):
                for at in range(width):
                    d_q[(first + number) * d_q_row + at] = d_q_t[at * tile + number] * scale


@helper
def _differentiate(
    powers: Floats,
    d_scores: Floats,
    tile: int,
    keys: Numbers,
    count: int,
    first: int,
    shift: Floats,
    delta: Floats,
    head_key: np.uint32,
    threshold: np.uint32,
    kept: np.float32,
) -> None:
    """Scores to probabilities as the output has them, dropped ones 0; their gradients to those of the scores."""
    zero, nothing = floats.broadcast(_ZERO), floats.broadcast(-_INFINITY)
    for lane in range(0, tile, LANES):
        of_row, inner = floats.load(shift, lane), floats.load(delta, lane)
        for number in range(count):
            place = number * tile + lane
            score, d_power = floats.load(powers, place), floats.load(d_scores, place)
            power = power_of_two(floats.subtract(score, of_row))
            power = floats.select(floats.equal(score, nothing), zero, power)
            seen = power
            if threshold != np.uint32(0):
                d_power = drop(d_power, first + lane, keys[number], head_key, threshold, kept)
                seen = drop(power, first + lane, keys[number], head_key, threshold, kept)
            d_score = floats.multiply(power, floats.subtract(d_power, inner))
            # A query that does not attend the key: NaN in its gradient, or in the key's value, is none of its business.
            d_score = floats.select(floats.equal(power, zero), zero, d_score)
            floats.store(powers, place, seen)
            floats.store(d_scores, place, d_score)


@helper
def _add_to_bias(
    d_bias: Floats,
    d_scores: Floats,
    tile: int,
    keys: Numbers,
    count: int,
    first: int,
    queries: int,
    bias_row: int,
    bias_step: int,
) -> None:
    if d_bias.size:
        for number in range(count):
            for lane in range(queries):
                place = (first + lane) * bias_row + np.int64(keys[number]) * bias_step
                d_bias[place] += d_scores[number * tile + lane]


@helper
def _scatter_rows(
    target: Floats, target_row: int, keys: Numbers, count: int, width: int, padded: int, scale: np.float32, rows: Floats
) -> None:
    """Add `scale` times rows of [count, padded] to rows `keys` of `target`."""
    whole = width // LANES * LANES
    factor = floats.broadcast(scale)
    for number in range(count):
        origin, place = number * padded, np.int64(keys[number]) * target_row
        for at in range(0, whole, LANES):
            added = floats.multiply_add(floats.load(rows, origin + at), factor, floats.load(target, place + at))
            floats.store(target, place + at, added)
        for at in range(whole, width):
            target[place + at] += scale * rows[origin + at]
