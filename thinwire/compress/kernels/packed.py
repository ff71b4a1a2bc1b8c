"""Fused kernels over a whole bucket of packed state: momentum as sign1 packets, a preconditioner of 8 bits, weights
that lie in one run of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.buckets import (
    FLOAT_TYPES,
    KernelCall,
    Part,
    Segments,
    check_device,
    check_divisors,
    check_factors,
    check_vector,
)

_TABLE_ENTRIES = 256


@dataclass(frozen=True, eq=False)
class PackedState:
    """Momentum u, as sign1 packets, and a preconditioner of 8 bits, of a whole bucket.

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

    def check(self, segments: Segments, **factors: Sequence[object]) -> None:
        """Raise TypeError or ValueError unless the tensors fit together, and there are `factors` for each run."""
        self.whole.check("sign1", self.packets)
        padded = self.shard * self.packets.size(0)
        check_vector("codes", self.codes, self.packets, (torch.uint8,), padded)
        segments.check(self.numel, padded, **factors)


@dataclass(eq=False)
class EncodePackedPayload(KernelCall):
    """Encode the next preconditioned momentum, plus `residual`, as sign1 packets, and leave in `lost` what was lost.

        payload_e = beta1_k · u_e + ((1 - beta1_k) · (gradient_k / divisor_k)) · tables[k][codes_e]

    for the elements e of run k, each operation rounded to fp32 by itself: 0, or NaN where the quotient is not finite,
    where the code is 0. Then what `encode` does, or `encode_rounded`.

    gradients: fp32, bf16 or fp16, contiguous, of any shape; None counts as zeros. tables: fp32 [runs, 256]; entry 0 is
    not looked at. residual, lost: fp32 or bf16 [padded_numel], both alike; lost is overwritten where the part lies, to
    the nearest, and may be the residual itself. packets: uint8 [rows, packet_bytes], overwritten, but for the
    headers where the part has none.
    """

    kernel = "encode_packed_payload"

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

    @override
    def check(self) -> None:
        self.state.check(self.segments, gradients=self.gradients, beta1=self.beta1, divisors=self.divisors)
        check_device("state.packets", self.state.packets, self.packets)
        self.part.check("sign1", self.packets)
        padded = self.part.shard * self.packets.size(0)
        if padded != self.state.codes.numel() or self.part.numel != self.state.numel:
            raise ValueError(f"the part is of a bucket of {padded} elements, the state of {self.state.codes.numel()}")
        check_vector("residual", self.residual, self.packets, (torch.float32, torch.bfloat16), padded)
        check_vector("lost", self.lost, self.packets, (self.residual.dtype,), padded)
        self.segments.check_tensors("gradients", self.gradients, self.packets.device, FLOAT_TYPES)
        check_divisors(self.beta1, self.divisors)
        if self.tables.dtype != torch.float32 or self.tables.shape != (len(self.segments), _TABLE_ENTRIES):
            raise ValueError(
                f"tables must be float32 [{len(self.segments)}, {_TABLE_ENTRIES}], got {self.tables.dtype} "
                f"{tuple(self.tables.shape)}"
            )
        check_device("tables", self.tables, self.packets)


@dataclass(eq=False)
class MovePacked(KernelCall):
    """Move the weights of a bucket in place by u: w_e = decay_k · w_e - rate_k · u_e for the elements e of run k.

    u_e is 0 where the code is 0. weights: fp32, bf16 or fp16 [n], elements `first` to `first` + n of the bucket. moves:
    whether a run's weights move.

    Calculated in fp32. 16 bits are rounded at random to one of their two neighbours, the nearer the likelier, so that
    the mean is kept: by 16 bits for bf16 and 13 for fp16, which depend on `seed` (an int64) and e only
    (`reference.random_bits`). Equal arguments give equal bits on every rank, device and backend. Give every step and
    every bucket a seed of its own. Infinities and NaN stay; values beyond the largest finite one round to it or to
    infinity.
    fp16 below 2^-14 are rounded as finely, from the nearest multiple of 2^-37.
    """

    kernel = "move_packed"
    beside = "weights"

    state: PackedState
    segments: Segments
    weights: Tensor
    first: int
    moves: Sequence[bool]
    rates: Sequence[float]
    decays: Sequence[float]
    seed: int

    @override
    def check(self) -> None:
        self.state.check(self.segments, rates=self.rates, decays=self.decays, moves=self.moves)
        check_vector("weights", self.weights, self.state.packets, FLOAT_TYPES)
        if self.first < 0 or self.first + self.weights.numel() > self.state.codes.numel():
            raise ValueError(
                f"{self.weights.numel()} weights from element {self.first} on do not lie in a bucket of "
                f"{self.state.codes.numel()}"
            )
        check_factors(rates=self.rates, decays=self.decays)


def keys(seed: int) -> tuple[int, int]:
    """Two 32-bit keys from a seed modulo 2^64, by SplitMix64: seeds that differ in one bit give unrelated keys."""
    wide = 0xFFFFFFFFFFFFFFFF
    mixed = (seed + 0x9E3779B97F4A7C15) & wide
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & wide
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & wide
    mixed ^= mixed >> 31
    return mixed & 0xFFFFFFFF, mixed >> 32
