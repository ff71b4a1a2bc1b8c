"""What forward and backward on CPUs share: a tile of queries lies across the lanes of vectors, the keys it attends one
below the other, so that softmax needs no sums across lanes and no matrix but the queries' has to be transposed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.simd import floats, integers
from thinwire.simd.compiling import helper
from thinwire.simd.floats import LANES

__all__ = [
    "CHUNK",
    "LARGEST_TILE",
    "LOG2_E",
    "LOWEST",
    "add_masks",
    "drop",
    "fill_keys",
    "gather_rows",
    "load_rows",
    "load_transposed",
    "mix",
    "power_of_two",
]

Floats = NDArray[np.float32]
Numbers = NDArray[np.int32]

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

_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint32(16), np.uint32(15), np.uint32(16)
_FACTOR_1, _FACTOR_2, _GOLDEN = np.uint32(0x7FEB352D), np.uint32(0x846CA68B), np.uint32(0x9E3779B9)


@helper
def fill_keys(
    keys: Numbers,
    columns: Numbers,
    entry: int,
    last_entry: int,
    block: int,
    key_end: int,
    key_bias: Floats,
) -> tuple[int, int]:
    """The next chunk's keys, from column `entry` on: (the entry after it, how many). Those with a bias of -inf are not
    among them: nothing of a key that nobody attends is ever read."""
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
def gather_rows(
    source: Floats, source_row: int, keys: Numbers, count: int, rows: int, width: int, padded: int, packed: Floats
) -> bool:
    """Rows `keys` of `source` as `packed`, [rows, padded] with zeros around; whether all are finite."""
    whole = width // LANES * LANES
    check = floats.broadcast(_ZERO)
    rest = _ZERO
    for number in range(count):
        origin, target = np.int64(keys[number]) * source_row, number * padded
        for at in range(0, whole, LANES):
            values = floats.load(source, origin + at)
            check = floats.add(check, floats.multiply(values, floats.broadcast(_ZERO)))
            floats.store(packed, target + at, values)
        for at in range(whole, width):
            packed[target + at] = source[origin + at]
            rest += source[origin + at] * _ZERO
        for at in range(width, padded):
            packed[target + at] = _ZERO
    for at in range(count * padded, rows * padded, LANES):
        floats.store(packed, at, floats.broadcast(_ZERO))
    return bool(floats.reduce_sum(check) + rest == _ZERO)


@helper
def load_rows(
    source: Floats, source_row: int, first: int, count: int, tile: int, width: int, padded: int, rows: Floats
) -> None:
    """Rows `first` on of `source` as [tile, padded], zeros around."""
    for number in range(tile):
        for at in range(padded):
            inside = number < count and at < width
            rows[number * padded + at] = source[(first + number) * source_row + at] if inside else _ZERO


@helper
def load_transposed(
    source: Floats,
    source_row: int,
    first: int,
    count: int,
    tile: int,
    width: int,
    padded: int,
    scale: np.float32,
    transposed: Floats,
) -> bool:
    """`scale` times rows `first` on of `source` as [padded, tile], zeros around; whether all are finite."""
    check = _ZERO
    for at in range(padded):
        for number in range(tile):
            value = _ZERO
            if number < count and at < width:
                value = source[(first + number) * source_row + at]
            check += value * _ZERO
            transposed[at * tile + number] = scale * value
    return bool(check == _ZERO)


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
def add_masks(
    scores: Floats,
    tile: int,
    keys: Numbers,
    count: int,
    first: int,
    queries: int,
    key_bias: Floats,
    bias: Floats,
    bias_row: int,
    bias_step: int,
    causal: bool,
) -> None:
    """Add the biases to scores, [count, tile], that are exponents of two; -inf where a query does not attend a key."""
    for number in range(count):
        key, at = np.int64(keys[number]), number * tile
        if key_bias.size:
            added = floats.broadcast(key_bias[key] * LOG2_E)
            for lane in range(0, tile, LANES):
                floats.store(scores, at + lane, floats.add(floats.load(scores, at + lane), added))
        if bias.size:
            for lane in range(queries):
                value = bias[(first + lane) * bias_row + key * bias_step]
                scores[at + lane] = -_INFINITY if value == -_INFINITY else scores[at + lane] + value * LOG2_E
        if causal:
            for lane in range(min(np.int64(tile), max(np.int64(0), key - first))):
                scores[at + lane] = -_INFINITY


@helper
def mix(word: Any) -> Any:
    """The 32-bit mixer of `thinwire.sparse_attn.dropout` on sixteen words."""
    word = integers.bit_xor(word, integers.shift_right(word, _SHIFT_1))
    word = integers.multiply(word, integers.broadcast(_FACTOR_1))
    word = integers.bit_xor(word, integers.shift_right(word, _SHIFT_2))
    word = integers.multiply(word, integers.broadcast(_FACTOR_2))
    return integers.bit_xor(word, integers.shift_right(word, _SHIFT_3))


@helper
def drop(values: Any, first_query: int, key: int, head_key: np.uint32, threshold: np.uint32, kept: np.float32) -> Any:
    """Sixteen consecutive queries' values for one key: 0 where dropout drops, `kept` times the value elsewhere."""
    row_keys = mix(integers.add(integers.broadcast(head_key), integers.lanes(np.uint32(first_query))))
    column = integers.broadcast(np.uint32(np.uint32(key) * _GOLDEN))
    dropped = integers.below(mix(integers.bit_xor(row_keys, column)), integers.broadcast(threshold))
    return floats.select(dropped, floats.broadcast(_ZERO), floats.multiply(values, floats.broadcast(kept)))
