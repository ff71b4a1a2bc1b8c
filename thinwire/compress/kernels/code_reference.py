"""What a codec makes of a block, in plain torch: scales and codes, and what these decode to. With `reference`, this
file is the specification.

Blocks are [blocks, block_size] in float32, or in float64 for tests; scales [blocks, scales a block] in float32, as on
the wire; codes uint8 [blocks, bytes].
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.packet_layout import BLOCK_SCALES

__all__ = ["decode_blocks", "encode_blocks", "like"]

_TOP_LEVEL = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""What a block's largest magnitude becomes; for fp8 the largest number of its format."""
_SPLIT = 0.98
"""Of stat2, in root mean squares. For a Gaussian the best is 0.9816 (Max 1960, Table I)."""
_SUMS = 64


def encode_blocks(codec: str, blocks: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and codes of `blocks`, which hold 0 where not `valid`, bool alike."""
    counts = valid.sum(dim=1).clamp(min=1).to(blocks.dtype)
    if codec == "sign1":
        scales = (blocks.abs().sum(dim=1) / counts).to(torch.float32)
        return scales.unsqueeze(1), _pack((blocks >= 0) & valid)
    if codec == "stat2":
        return _encode_in_two_magnitudes(blocks, valid, counts)
    scales = (blocks.abs().amax(dim=1, keepdim=True) / like(_TOP_LEVEL[codec], blocks)).to(torch.float32)
    values = _in_scales(blocks, scales.to(blocks.dtype), _TOP_LEVEL[codec])
    if codec == "fp8":
        return scales, values.to(torch.float8_e4m3fn).view(torch.uint8)
    levels = values.round().to(torch.int8).view(torch.uint8)
    return scales, levels if codec == "int8" else (levels[:, ::2] & 0xF) | (levels[:, 1::2] << 4)


def decode_blocks(codec: str, scales: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """What `codes`, uint8 [blocks, bytes], say: [blocks, block_size] in `dtype`."""
    values = scales.view(len(codes), BLOCK_SCALES[codec]).to(dtype)
    if codec == "sign1":
        return torch.where(_unpack(codes), values, -values)
    if codec == "stat2":
        positive, large = _unpack(codes).chunk(2, dim=1)
        magnitudes = torch.where(large, values[:, 1:], values[:, :1])
        return torch.where(positive, magnitudes, -magnitudes)
    if codec == "fp8":
        return codes.view(torch.float8_e4m3fn).to(dtype) * values
    if codec == "int4":
        codes = torch.stack([codes << 4, codes & 0xF0], dim=2).flatten(1)
        return (codes.view(torch.int8) >> 4).to(dtype) * values
    return codes.view(torch.int8).to(dtype) * values


def like(value: float, other: Tensor) -> Tensor:
    """A scalar tensor of the same dtype and device: on a GPU, division by a number is a product with its reciprocal."""
    return torch.full((), value, dtype=other.dtype, device=other.device)


def _encode_in_two_magnitudes(blocks: Tensor, valid: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """One step of Lloyd's algorithm from a split at 0.98 root mean squares: mean magnitudes below it, and of the rest.

    Squares are added up in float64, as those of 1e-30 or 1e30 are no float32. Sums are taken in one order, so that
    backends split alike. Where a magnitude is not finite, both are that.
    """
    magnitudes = blocks.abs()
    mean_square = _sum(blocks.double().square()) / counts.double()
    split = (mean_square.sqrt() * _SPLIT).to(torch.float32).to(blocks.dtype)
    large = (magnitudes >= split.unsqueeze(1)) & valid
    small = ~large & valid
    scales = torch.stack([_mean(magnitudes, small), _mean(magnitudes, large)], dim=1).to(torch.float32)
    both = scales.sum(dim=1, keepdim=True)
    return torch.where(both.isfinite(), scales, both), torch.cat([_pack((blocks >= 0) & valid), _pack(large)], dim=1)


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    """Of those of each block; 0 of none."""
    total = _sum(torch.where(which, magnitudes, 0.0))
    return total / which.sum(dim=1).clamp(min=1).to(total.dtype)


def _sum(values: Tensor) -> Tensor:
    """The sum of each row: 64 sums side by side, of every 64th value in order, then of their halves, and so on."""
    sums = torch.zeros_like(values[:, :_SUMS])
    for some in torch.split(values, _SUMS, dim=1):
        sums = sums + some
    while sums.size(1) > 1:
        low, high = sums.chunk(2, dim=1)
        sums = low + high
    return sums.squeeze(1)


def _in_scales(blocks: Tensor, scales: Tensor, top: float) -> Tensor:
    """u / scale, at most `top`; 0 where the scale is 0 or not finite."""
    usable = (scales > 0) & torch.isfinite(scales)
    return torch.where(usable, (blocks / scales).clamp(-top, top), 0.0)


def _pack(bits: Tensor) -> Tensor:
    """Bits of a boolean tensor [blocks, n], least significant first: uint8 [blocks, n / 8]."""
    weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits.view(len(bits), bits.size(1) // 8, 8) * weights).sum(dim=2, dtype=torch.uint8)


def _unpack(codes: Tensor) -> Tensor:
    """Inverse of `_pack`."""
    shifts = torch.arange(8, device=codes.device, dtype=torch.uint8)
    return ((codes.unsqueeze(2) >> shifts) & 1).flatten(1).to(torch.bool)
