"""Tiles, and the named tuples that the compiled loops are given; matrices lie in flat memory, strides are in elements.

A tile of queries lies across the lanes of vectors, the keys it attends one below the other, so that softmax needs no
sums across lanes and no matrix but the queries' has to be transposed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.simd import floats, integers
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper
from thinwire.simd.products import Matrix
from thinwire.sparse_attn.block_index import Heads, Sizes
from thinwire.sparse_attn.masks import Biases

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


class Rows(NamedTuple):
    """A matrix: row i begins at i * stride."""

    values: Floats
    stride: int


class Blocks(NamedTuple):
    """A block index: `num_rows` rows a head, or the same rows for every head where `heads` is 1."""

    row_offsets: Integers
    columns: Integers
    heads: int
    num_rows: int
    block: int


class Dropout(NamedTuple):
    """Each head's key of the hash, or in `Head` that one's; the smallest hash that is kept, 0 where nothing is dropped;
    and the factor of what is kept."""

    keys: Any
    threshold: np.uint32
    kept: np.float32


class Scores(NamedTuple):
    """Which scores there are and what is done to them; `causal`: no key of the future is attended."""

    blocks: Blocks
    sizes: Sizes
    biases: Biases
    dropout: Dropout
    causal: bool
    scale: np.float32


class Head(NamedTuple):
    """What of `Scores` is about one head of one sample: its rows of blocks, its biases, both empty where there is none,
    and its dropout."""

    row_offsets: Integers
    key_bias: Floats
    bias: Matrix
    dropout: Dropout


class Tile(NamedTuple):
    """Queries that lie across the lanes of vectors: the first one's number, how many, and lanes for them."""

    first: int
    queries: int
    lanes: int


CHUNK = 256
"""Keys that one pass takes: their rows, scores and gradients stay in the second-level cache."""

LARGEST_TILE = 64
"""Queries of a tile, or the block's size where that is smaller."""

LOG2_E = np.float32(1.4426950408889634)
LOWEST = np.float32(-3.0e38)  # below every score that is no -inf, so that its difference to -inf is -inf, not NaN

_INFINITY = np.float32(np.inf)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_SMALLEST_POWER = np.float32(-126.0)
_ROUNDS_TO_INTEGERS = np.float32(12582912.0)  # 1.5 * 2^23: what is added to it ends in the mantissa's last bits
_MANTISSA_BITS = np.uint32(23)
# 2^x on [-0.5, 0.5], largest relative error 2e-09 before rounding.
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(one)
    for one in (0.6931472029, 0.2402264791, 0.05550332471, 0.00961843736, 0.001339887452, 0.000153533616)
)

_GOLDEN = np.uint32(0x9E3779B9)


@helper
def rows_of(heads: Heads, batch: int, head: int) -> Rows:
    """The matrix of one head of one sample."""
    return Rows(heads.memory[batch * heads.batch + head * heads.head :], heads.row)


@helper
def head_of(scores: Scores, batch: int, head: int) -> Head:
    """What `scores` says about one head of one sample."""
    blocks, biases, dropout = scores.blocks, scores.biases, scores.dropout
    first_row = (head if blocks.heads > 1 else 0) * blocks.num_rows
    key_bias, pairs, key = biases.keys, biases.pairs, np.uint32(0)
    if key_bias.size:
        key_bias = key_bias[batch * scores.sizes.keys : (batch + 1) * scores.sizes.keys]
    if pairs.size:
        pairs = pairs[batch * biases.batch + head * biases.head :]
    if dropout.keys.size:
        key = dropout.keys[batch * scores.sizes.heads + head]
    return Head(
        blocks.row_offsets[first_row : first_row + blocks.num_rows + 1],
        key_bias,
        Matrix(pairs, biases.row, biases.column),
        Dropout(key, dropout.threshold, dropout.kept),
    )


@helper
def fill_keys(
    keys: Integers, columns: Integers, entry: int, last_entry: int, block: int, key_end: int, key_bias: Floats
) -> tuple[int, int]:
    """The next chunk's keys, from column `entry` on: (the entry after it, how many). Those with a bias of -inf are not
    among them: nothing of a key that no query attends is ever read."""
    count = 0
    while entry < last_entry and count + block <= CHUNK:
        first = columns[entry] * block
        for key in range(first, min(first + block, key_end)):
            if key_bias.size == 0 or key_bias[key] != -_INFINITY:
                keys[count] = key
                count += 1
        entry += 1
    return entry, count


@helper
def gather_rows(source: Rows, keys: Integers, count: int, rows: int, width: int, padded: int, packed: Floats) -> bool:
    """Rows `keys` of `source` as `packed`, [rows, padded] with zeros around; whether all are finite."""
    values = source.values
    whole = width // LANES * LANES
    check = floats.broadcast(_ZERO)
    rest = _ZERO
    for number in range(count):
        origin, target = np.int64(keys[number]) * source.stride, number * padded
        for at in range(0, whole, LANES):
            loaded = floats.load(values, origin + at)
            check = floats.add(check, floats.multiply(loaded, floats.broadcast(_ZERO)))
            floats.store(packed, target + at, loaded)
        for at in range(whole, width):
            packed[target + at] = values[origin + at]
            rest += values[origin + at] * _ZERO
        for at in range(width, padded):
            packed[target + at] = _ZERO
    for at in range(count * padded, rows * padded, LANES):
        floats.store(packed, at, floats.broadcast(_ZERO))
    return bool(floats.reduce_sum(check) + rest == _ZERO)


@helper
def load_transposed(source: Rows, tile: Tile, width: int, scale: np.float32, transposed: Floats) -> None:
    """`scale` times a tile's rows of `source` as [padded, lanes], zeros around."""
    values = source.values
    transposed[:] = _ZERO
    for number in range(tile.queries):
        origin = (tile.first + number) * source.stride
        row, column = values[origin : origin + width], transposed[number:]
        for at in range(width):
            column[at * tile.lanes] = scale * row[at]


@helper
def store_transposed(transposed: Floats, factors: Floats, tile: Tile, width: int, target: Rows) -> None:
    """Each query's column of `transposed`, [padded, lanes], times its factor, to a tile's rows of `target`."""
    values = target.values
    for number in range(tile.queries):
        origin, factor = (tile.first + number) * target.stride, factors[number]
        row, column = values[origin : origin + width], transposed[number:]
        for at in range(width):
            row[at] = column[at * tile.lanes] * factor


@helper
def power_of_two(exponent: Any) -> Any:
    """2^x for sixteen x up to 127: 0 below 2^-126 and for -inf, NaN for NaN."""
    bottom = floats.broadcast(_SMALLEST_POWER)
    vanishes = floats.below(exponent, bottom)
    bounded = floats.select(vanishes, bottom, exponent)
    shifted = floats.add(bounded, floats.broadcast(_ROUNDS_TO_INTEGERS))
    rest = floats.subtract(bounded, floats.subtract(shifted, floats.broadcast(_ROUNDS_TO_INTEGERS)))
    power = floats.broadcast(_C6)
    power = floats.multiply_add(power, rest, floats.broadcast(_C5))
    power = floats.multiply_add(power, rest, floats.broadcast(_C4))
    power = floats.multiply_add(power, rest, floats.broadcast(_C3))
    power = floats.multiply_add(power, rest, floats.broadcast(_C2))
    power = floats.multiply_add(power, rest, floats.broadcast(_C1))
    power = floats.multiply_add(power, rest, floats.broadcast(_ONE))
    # Shifted so far, the bits that say 1.5 * 2^23 are gone, and a NaN's are too: it stays what it is.
    whole = integers.shift_left(integers.bits_of(shifted), _MANTISSA_BITS)
    scaled = integers.as_floats(integers.add(integers.bits_of(power), whole))
    return floats.select(vanishes, floats.broadcast(_ZERO), scaled)


@helper
def add_masks(scores: Floats, tile: Tile, keys: Integers, count: int, head: Head, causal: bool) -> None:
    """Add the biases to scores, [count, lanes], that are exponents of two; -inf where a query does not attend a key."""
    key_bias, bias, bias_row, bias_column = head.key_bias, head.bias.values, head.bias.row, head.bias.column
    for number in range(count):
        key, at = np.int64(keys[number]), number * tile.lanes
        if key_bias.size:
            added = floats.broadcast(key_bias[key] * LOG2_E)
            for lane in range(0, tile.lanes, LANES):
                floats.store(scores, at + lane, floats.add(floats.load(scores, at + lane), added))
        if bias.size:
            for lane in range(tile.queries):
                value = bias[(tile.first + lane) * bias_row + key * bias_column]
                scores[at + lane] = -_INFINITY if value == -_INFINITY else scores[at + lane] + value * LOG2_E
        if causal:
            for lane in range(min(np.int64(tile.lanes), max(np.int64(0), key - tile.first))):
                scores[at + lane] = -_INFINITY


@helper
def drop(values: Any, first_query: int, key: int, dropout: Dropout) -> Any:
    """Sixteen consecutive queries' values for one key: 0 where dropout drops, `kept` times the value elsewhere."""
    row_keys = integers.mix(integers.add(integers.broadcast(dropout.keys), integers.lanes(np.uint32(first_query))))
    column = integers.broadcast(np.uint32(np.uint32(key) * _GOLDEN))
    dropped = integers.below(integers.mix(integers.bit_xor(row_keys, column)), integers.broadcast(dropout.threshold))
    return floats.select(dropped, floats.broadcast(_ZERO), floats.multiply(values, floats.broadcast(dropout.kept)))
