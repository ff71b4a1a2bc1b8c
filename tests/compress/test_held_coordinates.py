"""Coordinates that are held at zero: few or many, of a whole vector or of a part of it."""

from __future__ import annotations

import pytest
import torch

from thinwire.compress.exchange import held_coordinates, zero_held


@pytest.mark.parametrize("part", [0.0, 0.001, 1 / 16, 0.5, 1.0])
@pytest.mark.parametrize("numel", [0, 1, 1000, 4099])
def test_zeros_are_where_the_mask_is(numel: int, part: float) -> None:
    mask = torch.rand(numel) < part
    held = held_coordinates(mask)
    few = 16 * int(mask.sum()) <= numel
    assert held.dtype == (torch.int64 if few else torch.bool)
    for begin, end in ((0, numel), (numel // 3, numel // 2), (numel, numel)):
        values = torch.randn(end - begin) + 5
        wanted = values.masked_fill(mask[begin:end], 0.0)
        zero_held(values, held, slice(begin, end))
        assert torch.equal(values, wanted)
