"""The kernels in plain torch: slow, readable, on any device. This file is the specification.

float64 payloads are accepted too, so that a test can hold the fast backends against exact arithmetic;
scales are rounded to float32 in any case, because that is what the wire carries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.kernels.layout import HEADER_BYTES, codes_offset

__all__ = ["decode", "decode_mean", "encode"]


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    """Encode u = payload + residual into `packets`, and leave u - decoded(u) in `payload`."""
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


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Write the values that `packets` carries to `output`, row after row, and 0 on the padding."""
    blocks = _values(codec, packets, output, output.numel() // packets.size(0), block_size)
    blocks = blocks.view(-1, block_size)
    output.copy_(torch.where(_valid(blocks, numel), blocks, 0.0).view(-1))


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Write the mean over the rows of `packets` to `output`, and 0 on the padding."""
    rows = _values(codec, packets, output, output.numel(), block_size)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    blocks = (total / packets.size(0)).view(-1, block_size)
    output.copy_(torch.where(_valid(blocks, numel), blocks, 0.0).view(-1))


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
