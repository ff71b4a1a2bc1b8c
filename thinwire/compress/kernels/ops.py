"""The kernels as torch operators, one schema each, with a fake kernel and a backend a device; and what calls them.

Operators, not bare functions, so that `torch.compile` traces them and `opcheck` can test them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.kernels.calls import CODEC_OPERATIONS, OPERATIONS, Operation
from thinwire.compress.kernels.loading import backend_of
from thinwire.compress.packet_layout import CODE_BITS, check_codec

__all__ = ["apply_signs", "decode", "decode_mean", "encode", "encode_rounded", "momentum_payload", "store_rounded"]


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


def store_rounded(weights: Tensor, values: Tensor, seed: int) -> None:
    """Write `values`, fp32 [n], into `weights`, fp32, bf16 or fp16 [n], contiguous and on the same device.

    16 bits get one of the two neighbours, the nearer the likelier, as in `apply_signs`: by bits that depend on `seed`
    and the element's number only. Equal arguments give equal bits on every rank and device. Infinities and NaN stay.

    Raises TypeError or ValueError for arguments that do not fit together.
    """
    torch.ops.thinwire.store_rounded(weights, values, seed)


def _operator(codec: str, operation: str) -> Callable[..., None]:
    check_codec(codec)
    operator: Callable[..., None] = getattr(torch.ops.thinwire, f"{codec}_{operation}")
    return operator


def _register(name: str, operation: Operation, *codec: str) -> None:
    """Define thinwire::`name`, whose calls are given the codec, if any, before the arguments."""

    def check(*args: Any, **kwargs: Any) -> None:
        operation.call(*codec, *args, **kwargs).check()

    def implementation(device: str) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            call = operation.call(*codec, *args, **kwargs)
            call.check()
            getattr(backend_of(device), call.kernel)(call)

        return run

    torch.library.define(f"thinwire::{name}", operation.schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"thinwire::{name}", check)
    for device in ("cpu", "cuda"):
        torch.library.impl(f"thinwire::{name}", device, implementation(device))


for _codec in CODE_BITS:
    for _name, _operation in CODEC_OPERATIONS.items():
        _register(f"{_codec}_{_name}", _operation, _codec)
for _name, _operation in OPERATIONS.items():
    _register(_name, _operation)
