"""Packets and vectors as tensors: the scales inside a packet, and how far a vector reaches."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.packet_layout import BLOCK_SCALES, CODE_BITS, HEADER_BYTES, SCALE_BYTES

__all__ = ["scales", "span"]


def scales(codec: str, packets: Tensor, block_size: int) -> Tensor:
    """The scales in `packets`, uint8 [rows, packet_bytes]: fp32 [rows, blocks · scales a block], a view."""
    scale_bytes = SCALE_BYTES * BLOCK_SCALES[codec]
    blocks = (packets.shape[1] - HEADER_BYTES) // (scale_bytes + block_size * CODE_BITS[codec] // 8)
    return packets[:, HEADER_BYTES : HEADER_BYTES + scale_bytes * blocks].view(torch.float32)


def span(vector: Tensor) -> int:
    """Elements from the first of a vector, or of [rows, shard], to its last, what lies between rows included."""
    if vector.dim() < 2 or not vector.numel():
        return vector.numel()
    return (vector.size(0) - 1) * vector.stride(0) + vector.size(1)
