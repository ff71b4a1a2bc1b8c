"""What the loops over a whole bucket are given: where each run of it lies in memory, and where its blocks lie."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.blocks import Form, Place
from thinwire.compress.packet_layout import HEADER_BYTES, SCALE_BYTES
from thinwire.simd.compiling import helper

__all__ = ["ADDRESS", "END", "FIRST", "KIND", "PartLayout", "Table", "covers", "first_run", "place_in_part", "start_of"]

Table = NDArray[np.int64]
"""A row for each run: first element, end, and then addresses, each followed by the format of what lies there."""

FIRST, END, ADDRESS, KIND = range(4)


class PartLayout(NamedTuple):
    """How packets, `row_blocks` blocks of `block_size` and `row_bytes` each, carry the part of every shard of `shard`
    elements that begins at its element `first`; `numel` elements of the bucket are not padding."""

    form: Form
    block_size: int
    row_blocks: int
    row_bytes: int
    first: int
    shard: int
    numel: int


@helper
def start_of(part: PartLayout, block: int) -> int:
    """The bucket's element that a block begins at, counted over all rows of packets."""
    row, column = block // part.row_blocks, block % part.row_blocks
    return row * part.shard + part.first + column * part.block_size


@helper
def place_in_part(part: PartLayout, block: int, start: int) -> Place:
    """The place of the block that begins at the bucket's element `start`."""
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
