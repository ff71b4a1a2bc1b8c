"""The kernels in plain torch: slow, readable, on any device. This file is the specification.

float64 payloads are accepted too, so that a test can hold the fast backends against exact arithmetic;
scales are rounded to float32 in any case, because that is what the wire carries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.kernels.noise import random_bits
from thinwire.compress.kernels.packet_layout import HEADER_BYTES, codes_offset, runs

__all__ = ["apply_signs", "decode", "decode_mean", "encode", "encode_rounded", "momentum_payload", "store_rounded"]


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    """Encode u = payload + residual into `packets`, and leave u - decoded(u) in `payload`."""
    for of_run, valid, values, before in runs(packets, numel, payload, residual):
        _encode_run(codec, values, before, of_run, valid, block_size)


def _encode_run(
    codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int
) -> None:
    corrected = payload if residual is None else payload + residual
    blocks = corrected.view(-1, block_size)
    valid = _valid(blocks, numel)
    blocks = torch.where(valid, blocks, 0.0)
    if codec == "sign1":
        counts = valid.sum(dim=1).clamp(min=1)
        scales = (blocks.abs().sum(dim=1) / counts).to(torch.float32)
        signs = (blocks >= 0) & valid
        codes = _pack(signs)
        decoded = _sign_values(signs, scales.to(blocks.dtype))
    else:
        scales = (blocks.abs().amax(dim=1) / 127.0).to(torch.float32)
        levels = _levels(blocks, scales.to(blocks.dtype))
        codes = levels.view(torch.uint8)
        decoded = _level_values(levels, scales.to(blocks.dtype))
    payload.copy_(torch.where(valid, blocks - decoded, 0.0).view(-1))
    rows = packets.size(0)
    shard = payload.numel() // rows
    split = codes_offset(shard, block_size)
    packets[:, HEADER_BYTES:split] = scales.view(torch.uint8).view(rows, -1)
    packets[:, split:] = codes.view(rows, -1)


def encode_rounded(
    codec: str,
    payload: Tensor,
    residual: Tensor | None,
    new_residual: Tensor,
    packets: Tensor,
    numel: int,
    block_size: int,
) -> None:
    """Encode payload + residual into `packets`, and leave u - decoded(u), rounded to nearest, in `new_residual`."""
    for of_run, valid, values, before, after in runs(packets, numel, payload, residual, new_residual):
        lost = values.clone()
        _encode_run(codec, lost, None if before is None else before.to(lost.dtype), of_run, valid, block_size)
        after.copy_(lost)


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Write the values that `packets` carries to `output`, row after row, and 0 on the padding."""
    for of_run, valid, values in runs(packets, numel, output):
        blocks = _values(codec, of_run, values, values.numel() // of_run.size(0), block_size)
        blocks = blocks.view(-1, block_size)
        values.copy_(torch.where(_valid(blocks, valid), blocks, 0.0).view(-1))


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Write the mean over the rows of `packets` to `output`, and 0 on the padding."""
    rows = _values(codec, packets, output, output.numel(), block_size)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    blocks = (total / packets.size(0)).view(-1, block_size)
    output.copy_(torch.where(_valid(blocks, numel), blocks, 0.0).view(-1))


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
    """Write beta1 · u + ((1 - beta1) · (gradient / loss_scale)) · table[codes] to `payload`, in float32."""
    moving = codes != 0
    kept = _signed_scales(packets, _numbers(payload, first), shard, block_size) * _single(beta1, payload)
    preconditioner = torch.where(moving, table[codes.long()], 0.0)
    change = torch.zeros_like(payload) if gradient is None else gradient.float() / _single(loss_scale, payload)
    payload.copy_(torch.where(moving, kept, 0.0) + (change * _single(1.0 - beta1, payload)) * preconditioner)


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
    """Leave decay · w - lr · u in `weights`, calculated in float32, with u = 0 where the code is 0."""
    numbers = _numbers(weights, first)
    step = _signed_scales(packets, numbers, shard, block_size) * _single(lr, weights)
    values = weights.float() * _single(decay, weights) - torch.where(codes != 0, step, 0.0)
    store_rounded(weights, values, seed, first)


def store_rounded(weights: Tensor, values: Tensor, seed: int, first: int) -> None:
    """Write float32 `values` into `weights`, of any width; 16 bits get one of the two neighbours at random, with the
    probability that keeps the mean, the same for the same seed and element number. `weights` begin at `first`."""
    if weights.dtype == torch.bfloat16:
        values = _round_bfloat16(values, random_bits(seed, _numbers(weights, first)))
    elif weights.dtype == torch.float16:
        values = _round_float16(values, random_bits(seed, _numbers(weights, first)))
    weights.copy_(values)


def _single(value: float, like: Tensor) -> Tensor:
    """A float32 scalar tensor: a number would be divided by in other ways on some devices."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _numbers(vector: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + vector.numel(), device=vector.device)


def _signed_scales(packets: Tensor, numbers: Tensor, shard: int, block_size: int) -> Tensor:
    """What sign1 packets carry for the elements with these numbers, counted over all rows laid end to end."""
    row_bytes, split = packets.size(1), codes_offset(shard, block_size)
    scales = packets[:, HEADER_BYTES:split].clone().view(-1).view(torch.float32)[numbers // block_size]
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


def _pack(signs: Tensor) -> Tensor:
    """Bits of a boolean tensor, least significant first, as a flat uint8 tensor."""
    weights = 2 ** torch.arange(8, device=signs.device)
    return (signs.view(-1, 8) * weights).sum(dim=1).to(torch.uint8)


def _unpack(codes: Tensor) -> Tensor:
    """Inverse of `_pack`."""
    shifts = torch.arange(8, device=codes.device, dtype=torch.uint8)
    return ((codes.reshape(-1, 1) >> shifts) & 1).view(-1).to(torch.bool)


def _levels(blocks: Tensor, scales: Tensor) -> Tensor:
    """Nearest integers (ties to even) to u / scale; 0 where the scale is 0 or not finite."""
    scales = scales.unsqueeze(1)
    usable = (scales > 0) & torch.isfinite(scales)
    return torch.where(usable, (blocks / scales).round().clamp(-127, 127), 0.0).to(torch.int8)


def _sign_values(signs: Tensor, scales: Tensor) -> Tensor:
    return torch.where(signs, scales.unsqueeze(1), -scales.unsqueeze(1))


def _level_values(levels: Tensor, scales: Tensor) -> Tensor:
    return levels.to(scales.dtype) * scales.unsqueeze(1)


def _values(codec: str, packets: Tensor, output: Tensor, shard: int, block_size: int) -> Tensor:
    """What the packet rows decode to, padding not yet cleared: [rows, shard] in the dtype of `output`."""
    split = codes_offset(shard, block_size)
    scale_bytes = packets[:, HEADER_BYTES:split].clone()  # a copy is aligned, whatever the offset of the row
    scales = scale_bytes.view(-1).view(torch.float32).to(output.dtype)
    codes = packets[:, split:].clone()
    if codec == "sign1":
        values = _sign_values(_unpack(codes).view(-1, block_size), scales)
    else:
        values = _level_values(codes.view(-1, block_size).view(torch.int8), scales)
    return values.view(packets.size(0), shard)
