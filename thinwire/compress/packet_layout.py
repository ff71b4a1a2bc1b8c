"""Byte offsets inside a packet row: the one place that knows them. No tensors, so that a plan can ask
how large packets are without torch."""

from __future__ import annotations

import functools
import math
from typing import Literal

BlockCodecName = Literal["sign1", "stat2", "int4", "fp8", "int8"]
CodecName = Literal[BlockCodecName, "bf16", "fp16", "none"]
MemorylessCodec = Literal["none", "int8", "int4", "fp8", "bf16", "fp16"]
"""Those that serve without what they lost before, and whose scales zeros leave as they are: padding may be any."""

HEADER_BYTES = 16
SCALE_BYTES = 4
# One fp32 scale a block: at 2048 elements the scales add 1.6% to sign1's bits.
DEFAULT_BLOCK_SIZE = 2048
# Of activations, which have outliers in a few channels that spoil what shares a scale with them: at 64 int4 takes 4.5
# bits an element, at 256 int8 and fp8 take 8.1.
ACTIVATION_BLOCKS: dict[MemorylessCodec, int] = {"int8": 256, "int4": 64, "fp8": 256, "bf16": 64, "fp16": 64}
# Of int4: an eighth of a bit an element, and less error for it than more levels would bring (docs, "Decisions").
_INT4_BLOCK = 256
_ACTIVATION_DIRECTIONS = 12
LOW_RANK = 4
"""Directions that 1-bit Muon sends beside a codec, unless told otherwise."""
CODE_BITS = {"sign1": 1, "stat2": 2, "int4": 4, "fp8": 8, "int8": 8}
"""Of the codecs that have kernels."""
BLOCK_SCALES = {"sign1": 1, "stat2": 2, "int4": 1, "fp8": 1, "int8": 1}
"""fp32 scales a block, of the same."""
VALUE_BYTES = {"bf16": 2, "fp16": 2, "none": 4}
"""Of the codecs that send values themselves."""


@functools.cache
def scale_block(codec: str, block_size: int) -> int:
    """Elements that share their scales where a codec is asked for blocks of `block_size`: that many; of int4 256, or
    where these do not divide them 128 or 64."""
    return math.gcd(block_size, _INT4_BLOCK) if codec == "int4" else block_size


def sharded_block(codec: MemorylessCodec | None) -> int:
    """Elements of sharded weights and gradients that share a scale. Few nodes average what int4 loses of gradients, for
    which Adam takes shorter steps: with blocks of 256 a GPT's loss ended 0.6% higher."""
    return 64 if codec == "int4" else DEFAULT_BLOCK_SIZE


def codes_offset(codec: str, shard: int, block_size: int) -> int:
    """Offset in bytes of the codes inside a packet row: after the header and the fp32 scales of every block."""
    return HEADER_BYTES + SCALE_BYTES * BLOCK_SCALES[codec] * (shard // block_size)


@functools.cache
def packet_bytes(codec: str, shard: int, block_size: int) -> int:
    """Length in bytes of one packet row of a codec that has kernels, which carries `shard` elements.

    `block_size`: elements that share their scales, `scale_block`'s.

    Raises ValueError for an unknown codec, a block size that is not a multiple of 64 between 64 and
    65536, or a shard that is not whole blocks.
    """
    check_codec(codec)
    check_block_size(block_size)
    if shard < 0 or shard % block_size:
        raise ValueError(
            f"a shard of {shard} elements is not a whole number of blocks of {block_size}: "
            f"pad it to a multiple of block_size"
        )
    return codes_offset(codec, shard, block_size) + shard * CODE_BITS[codec] // 8


@functools.cache
def codec_packet_bytes(codec: CodecName, shard: int, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Length in bytes of one packet row of any codec that carries `shard` elements, in blocks of `block_size` as
    `make_codec` takes it; raises as `packet_bytes` does."""
    if codec in VALUE_BYTES:
        return HEADER_BYTES + shard * VALUE_BYTES[codec]
    return packet_bytes(codec, shard, scale_block(codec, block_size))


def filled_bytes(codec: CodecName, shard: int, filled: int, block_size: int) -> list[slice]:
    """What of a packet of `shard` elements its first `filled`, whole blocks, take: together, their own packet."""
    if codec in VALUE_BYTES:
        return [slice(0, HEADER_BYTES + filled * VALUE_BYTES[codec])]
    block = scale_block(codec, block_size)
    codes = codes_offset(codec, shard, block)
    return [slice(0, codes_offset(codec, filled, block)), slice(codes, codes + filled * CODE_BITS[codec] // 8)]


@functools.cache
def check_codec(codec: str) -> None:
    """Raise ValueError for a codec that has no kernels."""
    if codec not in CODE_BITS:
        raise ValueError(f"no kernels for codec {codec!r}: choose one of {', '.join(CODE_BITS)}")


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless a block size is a multiple of 64 from 64 to 65536."""
    if not isinstance(block_size, int) or block_size % 64 or not 64 <= block_size <= 65536:
        raise ValueError(f"block_size must be a multiple of 64 from 64 to 65536, got {block_size!r}")


def shard_numel(numel: int, world_size: int, multiple: int) -> int:
    """Elements in each of `world_size` equal shards that together hold `numel`, a whole number of `multiple`s.

    At least one multiple, so that an empty bucket still has a shard to send.
    """
    if numel < 0 or world_size < 1 or multiple < 1:
        raise ValueError(
            f"shard_numel needs numel >= 0, world_size >= 1 and multiple >= 1, "
            f"got numel={numel}, world_size={world_size}, multiple={multiple}"
        )
    blocks = -(-numel // multiple)
    return max(1, -(-blocks // world_size)) * multiple


def valid_in_shard(numel: int, shard: int, owner: int) -> int:
    """How many of the elements of `owner`'s shard are real; the rest, at its end, is padding."""
    return min(max(numel - owner * shard, 0), shard)


def leading_rank(rows: int, columns: int, low_rank: int) -> int:
    """How many singular directions of a matrix go beside a codec: at most `low_rank`, and a bit an element, in bf16."""
    return min(low_rank, rows * columns // (16 * max(rows + columns, 1)))


def activation_directions(codec: str, rows: int, columns: int) -> int:
    """How many singular directions of an activation, as a matrix, go beside what a codec rounds, in bf16: of `int4`
    alone twelve, for at most two bits an element."""
    return min(_ACTIVATION_DIRECTIONS, rows * columns // (8 * max(rows + columns, 1))) if codec == "int4" else 0


@functools.cache
def activation_packet_bytes(codec: MemorylessCodec, rows: int, columns: int) -> int:
    """Bytes of what goes from a stage to the next one for a matrix: a packet, and its directions behind."""
    block = ACTIVATION_BLOCKS[codec]
    padded = -(-rows * columns // block) * block
    return codec_packet_bytes(codec, padded, block) + 2 * activation_directions(codec, rows, columns) * (rows + columns)
