"""Where everything sits inside a packet row: the one place that knows byte offsets. No tensors, so that a plan can ask
how large packets are without torch."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "BLOCK_MULTIPLE",
    "CODE_BITS",
    "DEFAULT_BLOCK_SIZE",
    "HEADER_BYTES",
    "MAX_BLOCK_SIZE",
    "SCALE_BYTES",
    "VALUE_BYTES",
    "CodecName",
    "check_codec",
    "codec_packet_bytes",
    "codes_offset",
    "packet_bytes",
]

CodecName = Literal["sign1", "int8", "bf16", "fp16", "none"]

HEADER_BYTES = 16
SCALE_BYTES = 4
BLOCK_MULTIPLE = 64
MAX_BLOCK_SIZE = 65536
# One fp32 scale a block: at 2048 elements the scales add 1.6% to sign1's bits.
DEFAULT_BLOCK_SIZE = 2048
CODE_BITS = {"sign1": 1, "int8": 8}
"""Of the codecs that have kernels."""
VALUE_BYTES = {"bf16": 2, "fp16": 2, "none": 4}
"""Of the codecs that send values themselves."""


def codes_offset(shard: int, block_size: int) -> int:
    """Offset in bytes of the codes inside a packet row: after the header and one fp32 scale a block."""
    return HEADER_BYTES + SCALE_BYTES * (shard // block_size)


def packet_bytes(codec: str, shard: int, block_size: int) -> int:
    """Length in bytes of one packet row of a codec that has kernels, which carries `shard` elements.

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


def codec_packet_bytes(codec: CodecName, shard: int, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Length in bytes of one packet row of any codec that carries `shard` elements; raises as `packet_bytes` does."""
    if codec in VALUE_BYTES:
        return HEADER_BYTES + shard * VALUE_BYTES[codec]
    return packet_bytes(codec, shard, block_size)


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
