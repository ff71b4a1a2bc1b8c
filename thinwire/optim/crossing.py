"""State that was saved packed, as signs and 8-bit preconditioners, read as plain momenta and denominators, and the
other way round: what lets a checkpoint cross homes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.optim.sharded.preconditioner import quantize, table
from thinwire.zero.saved_slices import SliceSource

__all__ = [
    "PACKED_MOMENTUM",
    "PACKED_PRECONDITIONER",
    "PRECONDITIONER_HIGH",
    "PRECONDITIONER_LOW",
    "as_packed",
    "as_plain",
]

PACKED_MOMENTUM, PACKED_PRECONDITIONER = "momentum", "preconditioner"
PRECONDITIONER_LOW, PRECONDITIONER_HIGH = "scalar.preconditioner_low", "scalar.preconditioner_high"


def as_plain(source: SliceSource) -> SliceSource:
    """`source` with `exp_avg` and `denominator` where it has packed ones."""
    return _Plain(source) if PACKED_PRECONDITIONER in source.kinds() else source


def as_packed(source: SliceSource) -> SliceSource:
    """`source` with packed momentum and preconditioner where it has plain ones."""
    return source if PACKED_PRECONDITIONER in source.kinds() else _Packed(source)


class _Converted:
    """A source that answers for some kinds from others."""

    def __init__(self, source: SliceSource) -> None:
        self._source = source

    @property
    def world_size(self) -> int:
        """See SliceSource."""
        return self._source.world_size

    def counters(self) -> dict[str, Any]:
        """See SliceSource."""
        return self._source.counters()

    def kinds(self) -> set[str]:
        """See SliceSource."""
        return self._source.kinds()

    def read_rank(self, key: str, rank: int) -> Tensor:
        """See SliceSource."""
        return self._source.read_rank(key, rank)


class _Plain(_Converted):
    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """See SliceSource."""
        if kind == "exp_avg":
            return self._source.read(PACKED_MOMENTUM, name, start, numel)
        if kind == "denominator":
            codes = self._source.read(PACKED_PRECONDITIONER, name, start, numel)
            low, high = (self._source.read(one, name, 0, 1) for one in (PRECONDITIONER_LOW, PRECONDITIONER_HIGH))
            return table(low, high)[0][codes.int()].reciprocal_()
        return self._source.read(kind, name, start, numel)


class _Packed(_Converted):
    def __init__(self, source: SliceSource) -> None:
        super().__init__(source)
        self._ranges: dict[str, tuple[float, float]] = {}

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """See SliceSource; a preconditioner is asked for whole, before its range."""
        if kind == PACKED_MOMENTUM:
            return self._source.read("exp_avg", name, start, numel)
        if kind == PACKED_PRECONDITIONER:
            inverse = 1 / self._source.read("denominator", name, start, numel)
            moving = inverse[inverse > 0]
            low, high = (float(moving.min()), float(moving.max())) if len(moving) else (1.0, 1.0)
            self._ranges[name] = low, high
            return quantize(inverse, low, high)
        if kind in (PRECONDITIONER_LOW, PRECONDITIONER_HIGH):
            return torch.tensor([self._ranges[name][kind == PRECONDITIONER_HIGH]])
        return self._source.read(kind, name, start, numel)
