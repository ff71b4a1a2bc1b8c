"""Forward of block-sparse attention on a CPU, one head: an online softmax over chunks of the keys that a tile of
queries attends (Dao et al., 2022, arXiv:2205.14135, algorithm 1)."""

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
    LOWEST,
    Floats,
    Numbers,
    add_masks,
    drop,
    fill_keys,
    gather_rows,
    load_transposed,
    power_of_two,
)

__all__ = ["forward_rows"]

_LN_2 = np.float32(0.6931471805599453)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_INFINITY = np.float32(np.inf)


@kernel
def forward_rows(
    q: Floats,
    q_row: int,
    k: Floats,
    k_row: int,
    v: Floats,
    v_row: int,
    out: Floats,
    out_row: int,
    lse: Floats,
    row_offsets: Numbers,
    columns: Numbers,
    block: int,
    first_row: int,
    last_row: int,
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
    """Write `out` and `lse` of rows of blocks `first_row` to `last_row`, of one head.

    q, k, v, out: flat, row i at i * its stride, `width` elements long. row_offsets: this head's. key_bias, bias: empty
    where there are none; bias of query i and key j lies at i * bias_row + j * bias_step. Dropout with `threshold` 0
    drops nothing.
    """
    tile = min(block, LARGEST_TILE)
    padded = (width + LANES - 1) // LANES * LANES
    keys = np.empty(CHUNK, np.int32)
    packed = np.empty(CHUNK * padded, np.float32)
    scores = np.empty(CHUNK * tile, np.float32)
    queries_t = np.empty(padded * tile, np.float32)
    out_t = np.empty(padded * tile, np.float32)
    largest = np.empty(tile, np.float32)
    total = np.empty(tile, np.float32)
    factor = np.empty(tile, np.float32)
    for row in range(first_row, last_row):
        row_end = min(row * block + block, query_length)
        for first in range(row * block, row_end, tile):
            queries = min(tile, row_end - first)
            key_end = min(key_length, first + queries) if causal else key_length
            load_transposed(q, q_row, first, queries, tile, width, padded, scale * LOG2_E, queries_t)
            largest[:] = LOWEST
            total[:] = _ZERO
            out_t[:] = _ZERO
            entry = row_offsets[row]
            while entry < row_offsets[row + 1]:
                entry, count = fill_keys(keys, columns, entry, row_offsets[row + 1], block, key_end, key_bias)
                if count == 0:
                    continue
                rows = (count + ROWS - 1) // ROWS * ROWS
                gather_rows(k, k_row, keys, count, rows, width, padded, packed)
                product(packed, 0, padded, 1, queries_t, 0, tile, scores, 0, tile, rows, tile, padded, False)
                add_masks(scores, tile, keys, count, first, queries, key_bias, bias, bias_row, bias_step, causal)
                _soften(scores, tile, keys, count, first, largest, total, factor, head_key, threshold, kept)
                _rescale(out_t, tile, padded, factor)
                finite = gather_rows(v, v_row, keys, count, rows, width, padded, packed)
                if finite:
                    product(packed, 0, 1, padded, scores, 0, tile, out_t, 0, tile, padded, tile, count, True)
                else:
                    product_where_nonzero(
                        packed, 0, 1, padded, scores, 0, tile, out_t, 0, tile, padded, tile, count, True, False
                    )
            for number in range(queries):
                divisor = total[number]
                lse[first + number] = _INFINITY
                inverse = _ZERO
                if divisor != _ZERO:  # a NaN is not
                    lse[first + number] = largest[number] * _LN_2 + np.log(divisor)
                    inverse = _ONE / divisor
                for at in range(width):
                    out[(first + number) * out_row + at] = out_t[at * tile + number] * inverse


@helper
def _soften(
    scores: Floats,
    tile: int,
    keys: Numbers,
    count: int,
    first: int,
    largest: Floats,
    total: Floats,
    factor: Floats,
    head_key: np.uint32,
    threshold: np.uint32,
    kept: np.float32,
) -> None:
    """Scores to powers relative to the largest so far; `factor` is what earlier powers have to be multiplied by."""
    for lane in range(0, tile, LANES):
        before = floats.load(largest, lane)
        top = before
        for number in range(count):
            top = floats.larger(floats.load(scores, number * tile + lane), top)
        shrink = power_of_two(floats.subtract(before, top))
        sums = floats.multiply(floats.load(total, lane), shrink)
        for number in range(count):
            power = power_of_two(floats.subtract(floats.load(scores, number * tile + lane), top))
            sums = floats.add(sums, power)
            if threshold != np.uint32(0):
                power = drop(power, first + lane, keys[number], head_key, threshold, kept)
            floats.store(scores, number * tile + lane, power)
        floats.store(largest, lane, top)
        floats.store(total, lane, sums)
        floats.store(factor, lane, shrink)


@helper
def _rescale(out_t: Floats, tile: int, padded: int, factor: Floats) -> None:
    for lane in range(0, tile, LANES):
        shrink = floats.load(factor, lane)
        for at in range(padded):
            place = at * tile + lane
            floats.store(out_t, place, floats.multiply(floats.load(out_t, place), shrink))
