"""Denominators of the frozen stage, and their inverses in 8 bits an element, so that every worker can hold all of them
although the variance is sharded; and saved state that crosses between homes: packed as plain, plain as packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.zero.saved_state import SliceSource

SMALLEST_OF_MEAN = 0.01
"""The least frozen denominator of a parameter, as a part of their mean."""

LEVELS = 256
"""Code 0 stands for 0, a coordinate that does not move; codes 1 to 255 are evenly spaced logarithms."""


def table(low: Tensor, high: Tensor) -> Tensor:
    """The values of all codes for each row's range: fp32 [rows, 256] from `low` and `high`, [rows], both above 0.

    The relative step is (high/low)^(1/254): 3.7% for a range of ten thousand, so that a value is off by 1.9% at most.
    """
    low, high = low.double(), high.double()
    fraction = torch.arange(LEVELS - 1, dtype=torch.float64, device=low.device) / (LEVELS - 2)
    logarithms = low.log()[:, None] + fraction * (high / low).log()[:, None]
    return torch.cat([torch.zeros_like(low)[:, None], logarithms.exp()], dim=1).float()


def quantize(values: Tensor, low: float, high: float) -> Tensor:
    """The codes, uint8, of `values`, fp32, which are 0 or lie from `low` to `high`; the nearest logarithm."""
    scale = (LEVELS - 2) / max(torch.tensor(high / low, dtype=torch.float64).log().item(), 1e-12)
    steps = (values / low).clamp_(min=1e-30).log_().mul_(scale).round_().clamp_(0, LEVELS - 2)
    return torch.where(values > 0, steps + 1, 0.0).to(torch.uint8)


def raise_smallest(denominators: list[Tensor]) -> None:
    """Raise each tensor's denominators, in place, to a hundredth of their mean; those that are infinite do not count.

    A frozen variance next to nothing, of a unit that was asleep until the freeze, would otherwise turn the first
    gradient after it into an update a million times the others', and with it the scale of its whole block.
    """
    for denominator in denominators:
        finite = torch.isfinite(denominator)
        mean = torch.where(finite, denominator, 0.0).sum() / finite.sum().clamp(min=1)
        denominator.clamp_(min=SMALLEST_OF_MEAN * mean)


def hold_masked(values: list[Tensor], mask: Tensor | None, value: float = float("inf")) -> None:
    """Fill denominators, in place, where a group's `exp_avg_mask` is zero: with infinity, so that coordinates stay."""
    if mask is not None:
        for one in values:
            one.masked_fill_(shaped_mask(mask, one.shape).to(one.device) == 0, value)


def shaped_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """`mask` in a parameter's shape: it broadcasts to it, or is flat."""
    return mask.reshape(shape) if mask.numel() == shape.numel() else mask.expand(shape)


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
        return self._source.world_size

    def counters(self) -> dict[str, Any]:
        return self._source.counters()

    def kinds(self) -> set[str]:
        return self._source.kinds()

    def read_rank(self, key: str, rank: int) -> Tensor:
        return self._source.read_rank(key, rank)


class _Plain(_Converted):
    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
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
        """A preconditioner is asked for whole, before its range."""
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
