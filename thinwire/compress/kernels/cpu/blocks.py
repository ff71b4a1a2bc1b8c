"""Where the loops of the CPU backend find a block: its valid elements, its scale and its codes."""

from __future__ import annotations

from thinwire.compress.kernels.packet_layout import HEADER_BYTES, SCALE_BYTES
from thinwire.simd.compiling import helper

__all__ = ["locate", "valid_elements"]


@helper
def valid_elements(block: int, numel: int, block_size: int) -> int:
    """How many elements of a block are not padding."""
    return min(max(numel - block * block_size, 0), block_size)


@helper
def locate(block: int, row_blocks: int, row_bytes: int, rows: int, block_size: int, code_bits: int) -> tuple[int, int]:
    """Bytes at which scale and codes of a block begin, in the first of the `rows` packets that are about it."""
    row_at = block // row_blocks * rows * row_bytes
    column = block % row_blocks
    scale_at = row_at + HEADER_BYTES + SCALE_BYTES * column
    codes = row_at + HEADER_BYTES + SCALE_BYTES * row_blocks + column * block_size * code_bits // 8
    return scale_at, codes
