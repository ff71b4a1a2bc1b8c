"""The kernels as torch operators, one schema each, with a fake kernel and a backend a device; and what calls them.

Operators, not bare functions, so that `torch.compile` traces them and `opcheck` can test them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.compress.kernels.buckets import KernelCall
from thinwire.compress.kernels.calls import Decode, Encode, StoreRounded
from thinwire.compress.kernels.headers import CheckHeaders, WriteHeaders
from thinwire.compress.kernels.loading import backend_of
from thinwire.compress.packet_layout import CODE_BITS, check_codec

__all__ = ["CODEC_OPERATIONS", "OPERATIONS", "decode", "decode_mean", "encode", "encode_rounded", "store_rounded"]


class Operation(NamedTuple):
    """What an op takes, after the codec where there is one for each, and the call that it makes of it."""

    schema: str
    call: Callable[..., KernelCall]


CODEC_OPERATIONS = {
    "encode": Operation(
        "(Tensor(a!) payload, Tensor? residual, Tensor(b!) packets, int numel, int block_size) -> ()", Encode
    ),
    "encode_rounded": Operation(
        "(Tensor payload, Tensor? residual, Tensor(a!) new_residual, Tensor(b!) packets, int numel, int block_size) "
        "-> ()",
        lambda codec, payload, residual, new_residual, packets, numel, block_size: Encode(
            codec, payload, residual, packets, numel, block_size, new_residual
        ),
    ),
    "decode": Operation(
        "(Tensor packets, Tensor(a!) output, int numel, int block_size) -> ()", partial(Decode, mean=False)
    ),
    "decode_mean": Operation(
        "(Tensor packets, Tensor(a!) output, int numel, int block_size) -> ()", partial(Decode, mean=True)
    ),
}
OPERATIONS = {
    "store_rounded": Operation("(Tensor(a!) weights, Tensor values, int seed) -> ()", StoreRounded),
    "write_headers": Operation(
        "(Tensor(a!) packets, int first, int second, int scales, Tensor? condition, int flag) -> ()", WriteHeaders
    ),
    "check_headers": Operation(
        "(Tensor headers, int first, int second, int known, Tensor(a!) report) -> ()", CheckHeaders
    ),
}


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


def store_rounded(weights: Tensor, values: Tensor, seed: int) -> None:
    """Write `values`, fp32 [n], into `weights`, fp32, bf16 or fp16 [n], contiguous and on the same device.

    16 bits get one of the two neighbours, the nearer the likelier, as in `packed.MovePacked`, by bits that depend on
    `seed` and the element's number only. Equal arguments give equal bits on every rank and device. Infinities and NaN
    stay.

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
