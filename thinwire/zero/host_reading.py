"""What a step has to know of values on an accelerator, brought to the host with one wait for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["read_together"]


def read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`tensors` on the host, in order: those that are there already themselves, copies of the others.

    Those on an accelerator must be on one; however many there are, of whatever dtypes, the host waits for it once. For
    small tensors: they are put together first.
    """
    away = [one for one in tensors if one.device.type != "cpu"]
    if not away:
        return list(tensors)
    raw = [one.detach().contiguous().view(-1).view(torch.uint8) for one in away]
    pieces = iter(torch.split((raw[0] if len(raw) == 1 else torch.cat(raw)).cpu(), [one.numel() for one in raw]))
    # A copy is aligned, whatever the offset of the piece.
    return [
        one if one.device.type == "cpu" else next(pieces).clone().view(one.dtype).view(one.shape) for one in tensors
    ]
