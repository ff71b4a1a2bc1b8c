"""Layouts, inputs and a relative error that several tests of sparse attention share."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.sparse_attn import BigBird, BSLongformer, Custom, Dense, Fixed, Layout, LocalSlidingWindow, Variable

HEADS = 2
BLOCKS = 5


def layouts(block: int) -> dict[str, Layout]:
    """One of each kind, for HEADS heads and BLOCKS blocks, a last short one included."""
    generator = torch.Generator().manual_seed(block)
    custom = torch.rand(HEADS, BLOCKS, BLOCKS, generator=generator) < 0.4
    custom[0, 1] = False
    return {
        "dense": Dense(HEADS, block),
        "fixed": Fixed(HEADS, block, num_local_blocks=2, horizontal_global_attention=True),
        "fixed_causal": Fixed(HEADS, block, num_local_blocks=2, attention="unidirectional"),
        "variable": Variable(HEADS, block, True, num_random_blocks=1, local_window_blocks=(1, 2)),
        "bigbird": BigBird(HEADS, block, True),
        "bigbird_causal": BigBird(HEADS, block, attention="unidirectional"),
        "longformer": BSLongformer(HEADS, block),
        "local": LocalSlidingWindow(HEADS, block),
        "custom": Custom(custom, block),
    }


def qkv(length: int, head_size: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> list[Tensor]:
    """Random q, k, v in the memory order that a model's projections give."""
    return [
        torch.randn(batch, length, HEADS, head_size, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    ]


def doubles(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, Euclidean, or the difference itself where nothing is expected."""
    expected = expected.detach().double()
    scale = float(expected.norm())
    difference = float((actual.detach().double() - expected).norm())
    return difference / scale if scale > 0 else difference
