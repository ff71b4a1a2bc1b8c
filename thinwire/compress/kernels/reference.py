"""The kernels in plain torch: slow, readable, on any device. This file, with `code_reference`, is the specification.

float64 payloads are accepted too, so that a test can hold the fast backends against exact arithmetic;
scales are rounded to float32 in any case, because that is what the wire carries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.kernels.calls import ApplySigns, Decode, Encode, MomentumPayload, StoreRounded
from thinwire.compress.kernels.code_reference import decode_blocks, encode_blocks, like
from thinwire.compress.kernels.header_reference import check_headers, write_headers
from thinwire.compress.kernels.noise import random_bits
from thinwire.compress.packet_layout import CODE_BITS, HEADER_BYTES, codes_offset

__all__ = [
    "apply_signs",
    "check_headers",
    "decode",
    "encode",
    "momentum_payload",
    "store_rounded",
    "write_headers",
]

_AT_ONCE = 1 << 20  # elements whose random bits, 8 bytes each, are in memory


def encode(call: Encode) -> None:
    """Encode u = payload + residual into `packets`, and leave u - decoded(u) in `payload`, or rounded to nearest in
    `new_residual`."""
    for run in call.runs():
        lost = _encode_run(run)
        (run.payload if run.new_residual is None else run.new_residual).copy_(lost)


def _encode_run(run: Encode) -> Tensor:
    corrected = run.payload if run.residual is None else run.payload + run.residual.to(run.payload.dtype)
    blocks = corrected.view(-1, run.block_size)
    valid = _valid(blocks, run.numel)
    blocks = torch.where(valid, blocks, 0.0)
    scales, codes = encode_blocks(run.codec, blocks, valid)
    decoded = decode_blocks(run.codec, scales, codes, blocks.dtype)
    rows = run.packets.size(0)
    split = codes_offset(run.codec, run.shard, run.block_size)
    run.packets[:, HEADER_BYTES:split] = scales.reshape(-1).view(torch.uint8).view(rows, -1)
    run.packets[:, split:] = codes.reshape(rows, -1)
    return torch.where(valid, blocks - decoded, 0.0).view(-1)


def decode(call: Decode) -> None:
    """Write what `packets` carry to `output`, row after row, or its mean over the rows; and 0 on the padding."""
    for run in call.runs():
        values = _values(run)
        if run.mean:
            total = values[0]
            for row in values[1:]:
                total = total + row
            values = total / like(run.packets.size(0), total)
        blocks = values.view(-1, run.block_size)
        run.output.copy_(torch.where(_valid(blocks, run.numel), blocks, 0.0).view(-1))


def momentum_payload(call: MomentumPayload) -> None:
    """Write beta1 · u + ((1 - beta1) · (gradient / loss_scale)) · table[codes] to `payload`, in float32."""
    moving, payload = call.codes != 0, call.payload
    kept = _signed_scales(call, _numbers(payload, call.first)) * _single(call.beta1, payload)
    preconditioner = torch.where(moving, call.table[call.codes.long()], 0.0)
    change = torch.zeros_like(payload)
    if call.gradient is not None:
        change = call.gradient.float() / _single(call.loss_scale, payload)
    payload.copy_(torch.where(moving, kept, 0.0) + (change * _single(1.0 - call.beta1, payload)) * preconditioner)


def apply_signs(call: ApplySigns) -> None:
    """Leave decay · w - lr · u in `weights`, calculated in float32, with u = 0 where the code is 0."""
    weights = call.weights
    step = _signed_scales(call, _numbers(weights, call.first)) * _single(call.lr, weights)
    values = weights.float() * _single(call.decay, weights) - torch.where(call.codes != 0, step, 0.0)
    _store(weights, values, call.seed, call.first)


def store_rounded(call: StoreRounded) -> None:
    """Write `values` into `weights`, in pieces."""
    for first in range(0, call.weights.numel(), _AT_ONCE):
        piece = slice(first, first + _AT_ONCE)
        _store(call.weights[piece], call.values[piece], call.seed, first)


def _store(weights: Tensor, values: Tensor, seed: int, first: int) -> None:
    """Write float32 `values` into `weights`, of any width; 16 bits get one of the two neighbours at random, with the
    probability that keeps the mean, the same for the same seed and element number. `weights` begin at `first`."""
    if weights.dtype == torch.bfloat16:
        values = _round_bfloat16(values, random_bits(seed, _numbers(weights, first)))
    elif weights.dtype == torch.float16:
        values = _round_float16(values, random_bits(seed, _numbers(weights, first)))
    weights.copy_(values)


def _single(value: float, like: Tensor) -> Tensor:
    """A float32 scalar tensor on the device of `like`."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _numbers(vector: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + vector.numel(), device=vector.device)


def _signed_scales(call: MomentumPayload | ApplySigns, numbers: Tensor) -> Tensor:
    """What the packets carry for the elements with these numbers, counted over all rows laid end to end."""
    packets, shard = call.packets, call.shard
    row_bytes, split = packets.size(1), codes_offset(call.codec, shard, call.block_size)
    scales = packets[:, HEADER_BYTES:split].clone().view(-1).view(torch.float32)[numbers // call.block_size]
    rows, places = numbers // max(shard, 1), numbers % max(shard, 1)
    codes = packets.view(-1)[rows * row_bytes + split + places // 8]
    return torch.where((codes >> (places % 8)) & 1 == 1, scales, -scales)


def _round_bfloat16(values: Tensor, random: Tensor) -> Tensor:
    """Neighbouring bfloat16 of float32 values, the upper one with the probability that keeps the mean.

    The noise is below the last bit kept: what is representable, infinities among it, stays as it is, and beyond
    the largest finite value the neighbour is infinity.
    """
    rounded = values.view(torch.int32).long() + random >> 16 << 16
    return torch.where(values.isnan(), values, _floats_of(rounded))


def _round_float16(values: Tensor, random: Tensor) -> Tensor:
    """The same for float16, with 13 random bits, as many as float32 has more.

    Below 2^-14 the spacing of float16 stays what it is just above: there, 2^-14 is added while rounding, which
    first brings the value, to nearest, to a multiple of 2^-37. What reaches 65536 is infinity.
    """
    magnitudes = values.abs()
    lift = (magnitudes < 2.0**-14).float() * 2.0**-14
    rounded = (magnitudes + lift).view(torch.int32).long() + (random >> 3) >> 13 << 13
    rounded_values = (_floats_of(rounded) - lift).copysign(values)
    return torch.where(values.isfinite(), rounded_values, values)


def _floats_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _valid(blocks: Tensor, numel: int) -> Tensor:
    """Mask of the elements that are not padding, in the shape of `blocks`."""
    return torch.arange(blocks.numel(), device=blocks.device).view(blocks.shape) < numel


def _values(run: Decode) -> Tensor:
    """What the packet rows decode to, padding not yet cleared: [rows, shard] in the dtype of `output`."""
    split = codes_offset(run.codec, run.shard, run.block_size)
    scale_bytes = run.packets[:, HEADER_BYTES:split].clone()  # a copy is aligned, whatever the offset of the row
    codes = run.packets[:, split:].reshape(-1, run.block_size * CODE_BITS[run.codec] // 8)
    values = decode_blocks(run.codec, scale_bytes.view(-1).view(torch.float32), codes, run.output.dtype)
    return values.view(run.packets.size(0), run.shard)
