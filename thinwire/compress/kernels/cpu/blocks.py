"""Arguments of the loops of the CPU backend: where a block lies in packets and in memory, its scale and codes, and,
over a whole bucket, where each run of it lies."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.packet_layout import BLOCK_SCALES, CODE_BITS, HEADER_BYTES, SCALE_BYTES
from thinwire.simd import floats, memory
from thinwire.simd.building import LANES
from thinwire.simd.compiling import helper, inner

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


SIGN1, STAT2, INT4, FP8, INT8 = range(5)
_CODECS = {"sign1": SIGN1, "stat2": STAT2, "int4": INT4, "fp8": FP8, "int8": INT8}


class CodecForm(NamedTuple):
    """How a codec, one of those above, writes a block: bits a code, and scales."""

    codec: int
    code_bits: int
    scales: int


@functools.cache
def form_of(codec: str) -> CodecForm:
    """The form of the codec of that name."""
    return CodecForm(_CODECS[codec], CODE_BITS[codec], BLOCK_SCALES[codec])


class Place(NamedTuple):
    """Where a block lies: valid elements, and bytes at which scales and codes begin."""

    valid: int
    scale_at: int
    codes: int


class Range(NamedTuple):
    """What one thread does of a call: some of its blocks, counted over all packets, or of its elements."""

    first: int
    last: int


Table = NDArray[np.int64]
"""A row for each run: first element, end, and then addresses, each followed by the format of what lies there."""

FIRST, END, ADDRESS, KIND = range(4)


class Layout(NamedTuple):
    """How packets, `row_blocks` blocks of `block_size` and `row_bytes` each, carry the part of every shard of `shard`
    elements that begins at its element `first`; `numel` elements of the vector are not padding. Apart from their
    memory: to count references to that costs inner loops more than what they do."""

    form: CodecForm
    block_size: int
    row_blocks: int
    row_bytes: int
    first: int
    shard: int
    numel: int


@helper
def start_of(part: Layout, block: int) -> int:
    """The vector's element that a block begins at, counted over all rows of packets."""
    row, column = block // part.row_blocks, block % part.row_blocks
    return row * part.shard + part.first + column * part.block_size


@helper
def place_in_part(part: Layout, block: int, start: int) -> Place:
    """The place of the block that begins at the vector's element `start`, in the first of the packets about it."""
    row, column = block // part.row_blocks, block % part.row_blocks
    valid = min(max(part.numel - start, 0), part.block_size)
    scales = row * part.row_bytes + HEADER_BYTES
    scale_bytes = SCALE_BYTES * part.form.scales
    codes = scales + scale_bytes * part.row_blocks + column * part.block_size * part.form.code_bits // 8
    return Place(valid, scales + scale_bytes * column, codes)


@helper
def first_run(table: Table, element: int) -> int:
    """The first run that ends behind an element; the number of runs where none does."""
    low, high = 0, table.shape[0]
    while low < high:
        middle = (low + high) // 2
        if table[middle, END] > element:
            high = middle
        else:
            low = middle + 1
    return low


@helper
def covers(table: Table, run: int, start: int, stop: int) -> bool:
    """Whether a run holds all elements from `start` to `stop`; one that there is not holds none."""
    return bool(run < table.shape[0] and table[run, FIRST] <= start and stop <= table[run, END])


STEP = 4 * LANES  # four sums side by side hide the latency of an addition; every block is a multiple


@helper
def corrected_at(payload: Floats, residual: Floats, at: int, correct: bool) -> floats.Vector:
    """Sixteen elements of the payload, and of the residual if `correct`."""
    value = floats.load(payload, at)
    return floats.add(value, floats.load(residual, at)) if correct else value


@inner
def store_step(
    at: int, value0: floats.Vector, value1: floats.Vector, value2: floats.Vector, value3: floats.Vector
) -> None:
    """Write `STEP` elements to an address."""
    memory.store_floats(at, value0)
    memory.store_floats(at + 4 * LANES, value1)
    memory.store_floats(at + 8 * LANES, value2)
    memory.store_floats(at + 12 * LANES, value3)
