"""Fused kernels that turn float32 vectors into packets and back, in one pass over memory.

A packet row is 16 header bytes that no kernel touches, one float32 scale a block, then the codes: a bit
an element for "sign1" (least significant first, 1 where u >= 0), a signed byte for "int8". `packets` has
the shape [rows, packet_bytes]; a row carries a shard, which is a whole number of blocks; `numel` counts the
valid elements over all rows laid end to end, and what lies beyond it is padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compress.kernels.layout import (
    BLOCK_MULTIPLE,
    CODE_BITS,
    HEADER_BYTES,
    MAX_BLOCK_SIZE,
    packet_bytes,
)
from thinwire.compress.kernels.ops import Backend, backends

__all__ = [
    "BLOCK_MULTIPLE",
    "CODE_BITS",
    "HEADER_BYTES",
    "MAX_BLOCK_SIZE",
    "Backend",
    "backends",
    "decode",
    "decode_mean",
    "encode",
    "packet_bytes",
]


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    """Encode u = payload + residual into `packets`, and leave what the codec lost in `payload`.

    payload: float32 [rows * shard]; becomes u - decoded(u), 0 on the padding. residual: the same shape, only
    read; None means zeros. packets: uint8 [rows, packet_bytes(codec, shard, block_size)], overwritten except
    for the headers. numel: valid elements, from 0 to rows * shard. Padding never enters a scale.

    A block's scale is mean |u| ("sign1") or max |u| / 127 ("int8"). A NaN or infinity anywhere in a block
    makes its scale, and so all it decodes to, non-finite, as does a sum of |u| beyond the float32 range;
    other blocks are untouched. Raises TypeError or ValueError for arguments that do not fit together.
    """
    _operator(codec, "encode")(payload, residual, packets, numel, block_size)


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Write the values of every row of `packets` to `output`, row after row, and 0 on the padding.

    packets: uint8 [rows, packet_bytes(codec, shard, block_size)]. output: float32 [rows * shard],
    overwritten. numel: valid elements, from 0 to rows * shard. Raises TypeError or ValueError for arguments that
    do not fit together.
    """
    _operator(codec, "decode")(packets, output, numel, block_size)


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Write the mean over the rows of `packets` to `output`, and 0 on the padding.

    packets: uint8 [rows, packet_bytes(codec, shard, block_size)], every row about the same shard. output:
    float32 [shard], overwritten. numel: valid elements of this shard. Rows are summed in order in float32 and
    the sum divided by their number, so that every backend and machine gives the same bits. Raises TypeError
    or ValueError for arguments that do not fit together.
    """
    _operator(codec, "decode_mean")(packets, output, numel, block_size)


def _operator(codec: str, operation: str) -> Callable[..., None]:
    if codec not in CODE_BITS:
        raise ValueError(f"no kernels for codec {codec!r}: choose one of {', '.join(CODE_BITS)}")
    operator: Callable[..., None] = getattr(torch.ops.thinwire, f"{codec}_{operation}")
    return operator
