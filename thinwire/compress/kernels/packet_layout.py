"""Where everything sits inside a packet row: the one place that knows byte offsets."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "BLOCK_MULTIPLE",
    "CODE_BITS",
    "HEADER_BYTES",
    "MAX_BLOCK_SIZE",
    "SCALE_BYTES",
    "check_codec",
    "codes_offset",
    "packet_bytes",
    "scales",
    "span",
]

HEADER_BYTES = 16
SCALE_BYTES = 4
BLOCK_MULTIPLE = 64
MAX_BLOCK_SIZE = 65536
CODE_BITS = {"sign1": 1, "int8": 8}


def scales(codec: str, packets: Tensor, block_size: int) -> Tensor:
    """The scales in `packets`, uint8 [rows, packet_bytes]: fp32 [rows, blocks], a view."""
    block_bytes = SCALE_BYTES + block_size * CODE_BITS[codec] // 8
    blocks = (packets.shape[1] - HEADER_BYTES) // block_bytes
    return packets[:, HEADER_BYTES : HEADER_BYTES + SCALE_BYTES * blocks].view(torch.float32)


def span(vector: Tensor) -> int:
    """Elements from the first of a vector, or of [rows, shard], to its last, what lies between rows included."""
    if vector.dim() < 2 or not vector.numel():
        return vector.numel()
    return (vector.size(0) - 1) * vector.stride(0) + vector.size(1)


def codes_offset(shard: int, block_size: int) -> int:
    """Offset in bytes of the codes inside a packet row: after the header and one fp32 scale a block."""
    return HEADER_BYTES + SCALE_BYTES * (shard // block_size)


def packet_bytes(codec: str, shard: int, block_size: int) -> int:
    """Length in bytes of one packet row that carries `shard` elements.

    Raises ValueError for an unknown codec, a block size that is not a multiple of 64 between 64 and
    65536, or a shard that is not whole blocks.
    """
    check_codec(codec)
    _check_block_size(block_size)
    if shard < 0 or shard % block_size:
        raise ValueError(
            f"a shard of {shard} elements is not a whole number of blocks of {block_size}: "
            f"pad it to a multiple of block_size"
        )
    return codes_offset(shard, block_size) + shard * CODE_BITS[codec] // 8


def check_codec(codec: str) -> None:
    """Raise ValueError for a codec that has no kernels."""
    if codec not in CODE_BITS:
        raise ValueError(f"no kernels for codec {codec!r}: choose one of {', '.join(CODE_BITS)}")


def _check_block_size(block_size: int) -> None:
    if block_size < BLOCK_MULTIPLE or block_size > MAX_BLOCK_SIZE or block_size % BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size is {block_size}: it must be a multiple of {BLOCK_MULTIPLE} "
            f"from {BLOCK_MULTIPLE} to {MAX_BLOCK_SIZE}"
        )
