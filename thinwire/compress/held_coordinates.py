"""Coordinates of a vector that are held at zero: a mask of all, or the numbers of a few, so that to zero those again in
every step takes no pass over the vector."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["held_coordinates", "zero_held"]

_FEW = 16
"""One in so many: numbers of 8 bytes then take less memory than a mask, and less time than a pass over it."""


def held_coordinates(mask: Tensor) -> Tensor:
    """What `zero_held` takes, of a bool mask [numel]: on a CPU the numbers of the coordinates, ascending, int64, where
    they are few; else the mask."""
    if mask.device.type != "cpu" or _FEW * int(mask.count_nonzero()) > mask.numel():
        return mask
    return mask.nonzero().view(-1)


def zero_held(values: Tensor, held: Tensor, place: slice) -> None:
    """Zero, in place, the coordinates of `values` that are held; they are the elements `place` of the vector."""
    if held.dtype == torch.bool:
        values.masked_fill_(held[place], 0.0)
        return
    first, last = torch.searchsorted(held, torch.tensor([place.start, place.stop])).tolist()
    values.index_fill_(0, held[first:last] - place.start, 0.0)
