"""What the loops of the CPU backend are given, and where they find a block: valid elements, scale and codes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.packet_layout import HEADER_BYTES, SCALE_BYTES
from thinwire.simd.compiling import helper

__all__ = ["Bytes", "Floats", "Layout", "Place", "Range", "locate"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Layout(NamedTuple):
    """How packets end to end, of `row_blocks` blocks and `row_bytes` bytes each, carry a vector of `numel` valid
    elements. Apart from their memory: to count references to that costs inner loops more than what they do."""

    code_bits: int
    block_size: int
    row_blocks: int
    row_bytes: int
    numel: int


class Place(NamedTuple):
    """Where a block lies: valid elements, and bytes at which scale and codes begin."""

    valid: int
    scale_at: int
    codes: int


class Range(NamedTuple):
    """What one thread does of a call: some of its blocks, counted over all packets, or of its elements."""

    first: int
    last: int


@helper
def locate(layout: Layout, block: int, rows: int) -> Place:
    """The place of a block, in the first of the `rows` packets that are about it."""
    valid = min(max(layout.numel - block * layout.block_size, 0), layout.block_size)
    row_at = block // layout.row_blocks * rows * layout.row_bytes
    column = block % layout.row_blocks
    scale_at = row_at + HEADER_BYTES + SCALE_BYTES * column
    codes = row_at + HEADER_BYTES + SCALE_BYTES * layout.row_blocks
    return Place(valid, scale_at, codes + column * layout.block_size * layout.code_bits // 8)
