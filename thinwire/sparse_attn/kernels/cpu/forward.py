"""Forward of block-sparse attention on a CPU, one head: an online softmax over chunks of the keys that a tile of
queries attends (Dao et al., 2022, arXiv:2205.14135, algorithm 1)."""

from __future__ import annotations

import numpy as np

from thinwire.simd import floats
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper, kernel
from thinwire.simd.products import ROWS, Matrix, product, product_where_nonzero
from thinwire.sparse_attn.kernels.cpu.tiles import (
    CHUNK,
    LARGEST_TILE,
    LOG2_E,
    LOWEST,
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
    load_transposed,
    power_of_two,
    rows_of,
    store_transposed,
)

_LN_2 = np.float32(0.6931471805599453)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_INFINITY = np.float32(np.inf)


@kernel
def forward_heads(
    q: Heads, k: Heads, v: Heads, out: Heads, lse: Floats, scores: Scores, tasks: Integers, parts: int
) -> None:
    """Write `out` and `lse`, flat [B, H, Sq], for the tasks with these numbers: `parts` tasks a head, each an equal
    part of its rows of blocks. Heads are counted sample by sample."""
    num_rows, queries = scores.blocks.num_rows, scores.sizes.queries
    for task in tasks:
        number, part = task // parts, task % parts
        batch, head = number // scores.sizes.heads, number % scores.sizes.heads
        _forward_rows(
            rows_of(q, batch, head),
            rows_of(k, batch, head),
            rows_of(v, batch, head),
            rows_of(out, batch, head),
            lse[number * queries : (number + 1) * queries],
            scores,
            head_of(scores, batch, head),
            num_rows * part // parts,
            num_rows * (part + 1) // parts,
        )


@helper
def _forward_rows(
    q: Rows, k: Rows, v: Rows, out: Rows, lse: Floats, scores: Scores, head: Head, first_row: int, last_row: int
) -> None:
    """Rows of blocks `first_row` to `last_row` of one head."""
    block, columns, row_offsets, causal = scores.blocks.block, scores.blocks.columns, head.row_offsets, scores.causal
    width, scale = scores.sizes.width, scores.scale
    lanes = min(block, LARGEST_TILE)
    padded = (width + LANES - 1) // LANES * LANES
    keys = np.empty(CHUNK, np.int32)
    packed = np.empty(CHUNK * padded, np.float32)
    powers = np.empty(CHUNK * lanes, np.float32)
    queries_t = np.empty(padded * lanes, np.float32)
    out_t = np.empty(padded * lanes, np.float32)
    largest = np.empty(lanes, np.float32)
    total = np.empty(lanes, np.float32)
    factor = np.empty(lanes, np.float32)
    for row in range(first_row, last_row):
        row_end = min(row * block + block, scores.sizes.queries)
        for first in range(row * block, row_end, lanes):
            tile = Tile(first, min(lanes, row_end - first), lanes)
            key_end = min(scores.sizes.keys, first + tile.queries) if causal else scores.sizes.keys
            load_transposed(q, tile, width, scale * LOG2_E, queries_t)
            largest[:] = LOWEST
            total[:] = _ZERO
            out_t[:] = _ZERO
            entry = row_offsets[row]
            while entry < row_offsets[row + 1]:
                entry, count = fill_keys(keys, columns, entry, row_offsets[row + 1], block, key_end, head.key_bias)
                if count == 0:
                    continue
                rows = (count + ROWS - 1) // ROWS * ROWS
                gather_rows(k, keys, count, rows, width, padded, packed)
                softened = Matrix(powers, lanes, 1)
                product(Matrix(packed, padded, 1), Matrix(queries_t, lanes, 1), softened, rows, lanes, padded, False)
                add_masks(powers, tile, keys, count, head, causal)
                _soften(powers, tile, keys, count, largest, total, factor, head.dropout)
                _rescale(out_t, lanes, padded, factor)
                finite = gather_rows(v, keys, count, rows, width, padded, packed)
                values_t, sums = Matrix(packed, 1, padded), Matrix(out_t, lanes, 1)
                product_where_nonzero(values_t, softened, sums, padded, lanes, count, True, False, finite)
            for number in range(tile.queries):
                divisor = total[number]
                lse[first + number] = _INFINITY
                factor[number] = _ZERO
                if divisor != _ZERO:  # a NaN is not
                    lse[first + number] = largest[number] * _LN_2 + np.log(divisor)
                    factor[number] = _ONE / divisor
            store_transposed(out_t, factor, tile, width, out)


@helper
def _soften(
    scores: Floats,
    tile: Tile,
    keys: Integers,
    count: int,
    largest: Floats,
    total: Floats,
    factor: Floats,
    dropout: HeadDropout,
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


@helper
def _rescale(out_t: Floats, lanes: int, padded: int, factor: Floats) -> None:
    for lane in range(0, lanes, LANES):
        shrink = floats.load(factor, lane)
        for at in range(padded):
            place = at * lanes + lane
            floats.store(out_t, place, floats.multiply(floats.load(out_t, place), shrink))
