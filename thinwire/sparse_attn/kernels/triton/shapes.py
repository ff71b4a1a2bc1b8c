"""How large tiles are and how many warps share them, so that sums stay in registers and rows in shared memory.

What every choice costs in registers is in docs/measurements: `python -m experiments.benchmarks.triton_resources`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Kernel", "Shape", "shape"]

Kernel = Literal["forward", "queries", "keys"]

_WIDE_PRODUCTS = 9
"""The major capability whose tensor cores read both factors from shared memory: a tile may be wide at once."""


@dataclass(frozen=True)
class Shape:
    """Tokens of a tile, how many of them are taken at a time, warps of a program, stages of its loads."""

    tile: int
    step: int
    warps: int
    stages: int = 2


def shape(kernel: Kernel, dtype: torch.dtype, block: int, padded: int, capability: tuple[int, int]) -> Shape:
    """For rows of `padded` elements, a power of two, and blocks of `block` tokens.

    Tensor cores before sm_90 read factors from registers, where every warp holds the whole of one: fewer tokens at a
    time make that smaller. In float32 each factor is held twice, as what tf32 keeps of it and what it loses, on every
    GPU: Triton 3.7 fails to compile these products of 64 tokens for sm_90.
    """
    wide = capability[0] == _WIDE_PRODUCTS
    if dtype == torch.float32:
        tile = 16 if kernel == "keys" else max(16, min(32, 32 * 64 // padded))
        return Shape(tile, 16, 4)
    if capability[0] > _WIDE_PRODUCTS:
        return Shape(32, 32, 4)  # Triton 3.7 fails to compile tiles of 64 for sm_100
    if wide and kernel != "keys":
        tile = 128 if kernel == "forward" and block >= 128 and padded <= 64 else 64
        return Shape(tile, tile, 8 if tile * padded > 64 * 64 else 4)
    step = 16 if kernel == "keys" and not wide else 32
    return Shape(64, step, 4 if padded <= 64 else 8)
