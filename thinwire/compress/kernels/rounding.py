"""fp32 values put into weights of 16 bits, rounded at random, alike on every rank: for weights that move by less than
their last bit."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["store_rounded"]


def store_rounded(weights: Tensor, values: Tensor, seed: int) -> None:
    """Write `values`, fp32 [n], into `weights`, fp32, bf16 or fp16 [n], contiguous and on the same device.

    16 bits get one of the two neighbours, the nearer the likelier, as in `apply_signs`: by bits that depend on `seed`
    and the element's number only. Equal arguments give equal bits on every rank and device. Infinities and NaN stay.

    Raises TypeError or ValueError for arguments that do not fit together.
    """
    torch.ops.thinwire.store_rounded(weights, values, seed)
