"""What the loops of the CPU backend are given, and where they find a block: valid elements, scale and codes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.packet_layout import BLOCK_SCALES, CODE_BITS, HEADER_BYTES, SCALE_BYTES
from thinwire.simd.compiling import helper

__all__ = [
    "FP8",
    "INT4",
    "INT8",
    "SIGN1",
    "STAT2",
    "Bytes",
    "Floats",
    "Form",
    "Layout",
    "Place",
    "Range",
    "form_of",
    "locate",
]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


SIGN1, STAT2, INT4, FP8, INT8 = range(5)
_CODECS = {"sign1": SIGN1, "stat2": STAT2, "int4": INT4, "fp8": FP8, "int8": INT8}


class Form(NamedTuple):
    """How a codec, one of those above, writes a block: bits a code, and scales."""

    codec: int
    code_bits: int
    scales: int


def form_of(codec: str) -> Form:
    """The form of the codec of that name."""
    return Form(_CODECS[codec], CODE_BITS[codec], BLOCK_SCALES[codec])


class Layout(NamedTuple):
    """How packets end to end, of `row_blocks` blocks and `row_bytes` bytes each, carry a vector of `numel` valid
    elements. Apart from their memory: to count references to that costs inner loops more than what they do."""

    form: Form
    block_size: int
    row_blocks: int
    row_bytes: int
    numel: int


class Place(NamedTuple):
    """Where a block lies: valid elements, and bytes at which scales and codes begin."""

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
    scale_bytes = SCALE_BYTES * layout.form.scales
    scale_at = row_at + HEADER_BYTES + scale_bytes * column
    codes = row_at + HEADER_BYTES + scale_bytes * layout.row_blocks
    return Place(valid, scale_at, codes + column * layout.block_size * layout.form.code_bits // 8)
