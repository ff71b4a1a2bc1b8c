"""Fused kernels that turn float32 vectors into packets and back, in one pass over memory.

A packet row is 16 header bytes that no kernel touches, the float32 scales of one block after the other, then the codes
of one block after the other:

- "sign1": scale mean |u|; a bit an element, least significant first, 1 where u >= 0.
- "stat2": split at 0.98 root mean squares of the block; scales the mean |u| below the split, 0 where there is none, and
  the mean |u| of the rest; the signs' bits of the whole block, then as many bits, 1 where |u| is at the split or above.
- "int4", "int8": scale max |u| / 7 and / 127; u / scale to the nearest integer, ties to even; "int4" has two in a byte,
  the first in its lower half.
- "fp8": scale max |u| / 448; u / scale to the nearest e4m3 number, as torch.float8_e4m3fn has them. The sign of zero
  stays; to the others -0 is 0.

`packets` has the shape [rows, packet_bytes]; a row carries a shard, which is a whole number of blocks; `numel` counts
the valid elements over all rows laid end to end, and what lies beyond it is padding. `block_size` is of the elements
that share their scales: a codec's `scale_block`.

Where float vectors of [rows * shard] are asked for, `encode`, `encode_rounded` and `decode` also take [rows, shard]
whose rows lie apart in memory, all in one layout: `numel` then counts the elements between rows, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compress.kernels.calls import scales, span
from thinwire.compress.kernels.ops import Backend, backends, prepare
from thinwire.compress.packet_layout import (
    BLOCK_MULTIPLE,
    CODE_BITS,
    HEADER_BYTES,
    MAX_BLOCK_SIZE,
    packet_bytes,
)

__all__ = [
    "BLOCK_MULTIPLE",
    "CODE_BITS",
    "HEADER_BYTES",
    "MAX_BLOCK_SIZE",
    "Backend",
    "apply_signs",
    "backends",
    "decode",
    "decode_mean",
    "encode",
    "encode_rounded",
    "momentum_payload",
    "packet_bytes",
    "prepare",
    "scales",
    "span",
]


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    """Encode u = payload + residual into `packets`, and leave what the codec lost in `payload`.

    payload: float32 [rows * shard]; becomes u - decoded(u), 0 on the padding. residual: the same shape, only
    read; None means zeros. packets: uint8 [rows, packet_bytes(codec, shard, block_size)], overwritten except
    for the headers. numel: valid elements, from 0 to rows * shard. Padding never enters a scale.

    A NaN or infinity anywhere in a block makes its scales, and so all it decodes to, non-finite, as does, where scales
    are means, a sum of |u| beyond the float32 range; other blocks are untouched. Codes are 0 where a largest magnitude
    is so small that the scale is 0. Raises TypeError or ValueError for arguments that do not fit together.
    """
    _operator(codec, "encode")(payload, residual, packets, numel, block_size)


def encode_rounded(
    codec: str,
    payload: Tensor,
    residual: Tensor | None,
    new_residual: Tensor,
    packets: Tensor,
    numel: int,
    block_size: int,
) -> None:
    """Encode u = payload + residual into `packets` as `encode` does, and leave what the codec lost in bf16.

    payload: float32 [rows * shard], only read. residual: bf16, the same shape, only read; None means zeros.
    new_residual: bf16, the same shape; becomes u - decoded(u) to the nearest, 0 on the padding; may be `residual`
    itself. packets, numel and block_size are those of `encode`, and so are the errors.
    """
    _operator(codec, "encode_rounded")(payload, residual, new_residual, packets, numel, block_size)


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


def momentum_payload(
    packets: Tensor,
    gradient: Tensor | None,
    codes: Tensor,
    table: Tensor,
    payload: Tensor,
    first: int,
    shard: int,
    block_size: int,
    beta1: float,
    loss_scale: float,
) -> None:
    """Write the next preconditioned momentum of n elements to `payload`, from the last one's sign1 packets.

        payload_i = beta1 · u_e + ((1 - beta1) · (gradient_i / loss_scale)) · table[codes_i],  e = first + i

    with u_e what `packets` decodes to for element e of the bucket: place e mod shard of row e // shard. Where the
    code is 0 the coordinate does not move, and the payload is 0, or NaN if gradient_i / loss_scale is not finite.

    packets: uint8 [rows, packet_bytes("sign1", shard, block_size)]. gradient: fp32, bf16 or fp16 [n]; None counts
    as zeros. codes: uint8 [n]. table: fp32 [256]; entry 0 is not looked at. payload: fp32 [n], overwritten. All is
    calculated in fp32, each operation rounded by itself, so that every backend gives the same bits. n may be 0, and
    `first` anything that keeps first + n within rows * shard. Raises TypeError or ValueError for arguments that do
    not fit together.
    """
    torch.ops.thinwire.momentum_payload(
        packets, gradient, codes, table, payload, first, shard, block_size, beta1, loss_scale
    )


def apply_signs(
    weights: Tensor,
    packets: Tensor,
    codes: Tensor,
    first: int,
    shard: int,
    block_size: int,
    lr: float,
    decay: float,
    seed: int,
) -> None:
    """Update n weights in place by the momentum that sign1 packets carry: w = decay · w - lr · u_e, e = first + i.

    u_e is 0 where the code is 0. weights: fp32, bf16 or fp16 [n]. packets, codes, first, shard and block_size are
    those of `momentum_payload`. lr: the step size, bias correction included. decay: a factor, 1 for none.

    Calculated in fp32. bf16 and fp16 weights are rounded at random to one of their two neighbours, the nearer the
    likelier, so that the mean is kept: by 16 bits for bf16 and 13 for fp16, which depend on `seed` (an int64) and e
    only; see `noise.random_bits`. Equal arguments give equal bits on every rank, device and backend. Give every step
    and every bucket a seed of its own. Infinities and NaN stay; values beyond the largest finite one round to it or
    to infinity. fp16 below 2^-14 are rounded as finely, from the nearest multiple of 2^-37.

    Raises TypeError or ValueError for arguments that do not fit together.
    """
    torch.ops.thinwire.apply_signs(weights, packets, codes, first, shard, block_size, lr, decay, seed)


def _operator(codec: str, operation: str) -> Callable[..., None]:
    if codec not in CODE_BITS:
        raise ValueError(f"no kernels for codec {codec!r}: choose one of {', '.join(CODE_BITS)}")
    operator: Callable[..., None] = getattr(torch.ops.thinwire, f"{codec}_{operation}")
    return operator
