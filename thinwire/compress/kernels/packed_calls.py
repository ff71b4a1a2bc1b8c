"""What the kernels over a whole bucket of packed state are called with: momentum as sign1 packets, a preconditioner of
8 bits, weights that lie in one run of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.kernels.bucket_calls import (
    Part,
    Segments,
    check_covered,
    check_device,
    check_divisors,
    check_factors,
    check_finite,
    check_flat,
    check_runs,
)

__all__ = ["EncodePackedPayload", "MovePacked", "PackedState"]

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TABLE_ENTRIES = 256


@dataclass(frozen=True, eq=False)
class PackedState:
    """Momentum u and preconditioner of a whole bucket.

    packets: uint8 [rows, packet_bytes("sign1", shard, block_size)], what u_e is decoded from for element e of the
    bucket: place e mod shard of row e // shard. codes: uint8 [padded_numel]; where one is 0 the coordinate does not
    move. numel: elements that are not padding.
    """

    packets: Tensor
    codes: Tensor
    shard: int
    numel: int
    block_size: int

    @property
    def whole(self) -> Part:
        """The part that is all of every shard."""
        return Part(0, self.shard, self.shard, self.numel, self.block_size)

    def check(self, segments: Segments) -> None:
        """Raise TypeError or ValueError unless the tensors fit together."""
        self.whole.check("sign1", self.packets)
        padded = self.shard * self.packets.size(0)
        check_flat("codes", self.codes, padded, self.packets, (torch.uint8,))
        check_covered(segments, self.numel, padded)


@dataclass(eq=False)
class EncodePackedPayload:
    """Arguments of `encode_packed_payload`."""

    kernel: ClassVar = "encode_packed_payload"

    state: PackedState
    segments: Segments
    gradients: Sequence[Tensor | None]
    beta1: Sequence[float]
    divisors: Sequence[float]
    tables: Tensor
    residual: Tensor
    lost: Tensor
    packets: Tensor
    part: Part

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        self.state.check(self.segments)
        check_device("state.packets", self.state.packets, self.packets)
        self.part.check("sign1", self.packets)
        padded = self.part.shard * self.packets.size(0)
        if padded != self.state.codes.numel() or self.part.numel != self.state.numel:
            raise ValueError(f"the part is of a bucket of {padded} elements, the state of {self.state.codes.numel()}")
        kept = (torch.float32, torch.bfloat16)
        check_flat("residual", self.residual, padded, self.packets, kept)
        check_flat("lost", self.lost, padded, self.packets, (self.residual.dtype,))
        check_runs("gradients", self.gradients, self.segments, self.packets, _FLOAT_TYPES)
        check_factors(self.segments, beta1=self.beta1, divisors=self.divisors)
        check_divisors(self.beta1, self.divisors)
        if self.tables.dtype != torch.float32 or self.tables.shape != (len(self.segments), _TABLE_ENTRIES):
            raise ValueError(
                f"tables must be float32 [{len(self.segments)}, {_TABLE_ENTRIES}], got {self.tables.dtype} "
                f"{tuple(self.tables.shape)}"
            )
        check_device("tables", self.tables, self.packets)


@dataclass(eq=False)
class MovePacked:
    """Arguments of `move_packed`."""

    kernel: ClassVar = "move_packed"

    state: PackedState
    segments: Segments
    weights: Tensor
    first: int
    moves: Sequence[bool]
    rates: Sequence[float]
    decays: Sequence[float]
    seed: int

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        self.state.check(self.segments)
        check_flat("weights", self.weights, self.weights.numel(), self.state.packets, _FLOAT_TYPES)
        if self.first < 0 or self.first + self.weights.numel() > self.state.codes.numel():
            raise ValueError(
                f"{self.weights.numel()} weights from element {self.first} on do not lie in a bucket of "
                f"{self.state.codes.numel()}"
            )
        check_factors(self.segments, rates=self.rates, decays=self.decays, moves=self.moves)
        check_finite(rates=self.rates, decays=self.decays)
