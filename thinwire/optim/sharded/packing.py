"""Packed state of one bucket as the freeze makes it and as a checkpoint holds it: momentum as packets, and in 8 bits
the preconditioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec
from thinwire.compress.packet_layout import HEADER_BYTES
from thinwire.optim.bucket import place_of
from thinwire.optim.preconditioner import (
    PACKED_MOMENTUM,
    PACKED_PRECONDITIONER,
    PRECONDITIONER_HIGH,
    PRECONDITIONER_LOW,
    SMALLEST_OF_MEAN,
)
from thinwire.zero.master_weights import FlatBucket
from thinwire.zero.saved_state import SliceSource


@dataclass(frozen=True)
class FrozenState:
    """Momentum u divided by √v̂ + ε, and the preconditioner, of one bucket, as every rank keeps them.

    `momentum`: u as packets, uint8 [ranks, packet_bytes]. `codes`: the preconditioner, uint8 [padded_numel]. `ranges`:
    its least and greatest value in each parameter, fp32 [parameters, 2]. `lost`: what packing lost of the own shard,
    fp32 [shard].
    """

    momentum: Tensor
    codes: Tensor
    ranges: Tensor
    lost: Tensor


class OwnPackets:
    """The owner's own packets of every step, on the host, for master weights there, and the preconditioner's codes,
    uint8 [shard], which never change."""

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes.cpu()
        self._parts: list[Tensor] = []

    def bring(self, parts: Sequence[Tensor]) -> None:
        """Start copying the own packets of each part, uint8 [1, bytes], into page-locked memory.

        They are there when the host has waited for anything that the device does later, as for the step's headers.
        """
        self._copy(parts, non_blocking=True)

    def take(self, parts: Sequence[Tensor]) -> None:
        """Copy them, and wait until they are there."""
        self._copy(parts, non_blocking=False)

    def packets(self, join: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Put together what was brought, uint8 [1, packet_bytes]."""
        return self._parts[0] if len(self._parts) == 1 else join(self._parts)

    def _copy(self, parts: Sequence[Tensor], *, non_blocking: bool) -> None:
        if [one.shape for one in parts] != [one.shape for one in self._parts]:
            self._parts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in parts]
        for held, part in zip(self._parts, parts, strict=True):
            held.copy_(part, non_blocking=non_blocking)


def ranges_of(comm: Communicator, cuts: Sequence[tuple[int, Tensor]], count: int, device: torch.device) -> Tensor:
    """Raise the smallest denominators, of all ranks' `cuts` by parameter, to a hundredth of their parameter's mean, and
    return each of `count` parameters' range of their inverses: fp32 [parameters, 2]. Collective."""
    sums = torch.zeros(count, 2, dtype=torch.float64, device=device)
    for parameter, denominators in cuts:
        finite = torch.isfinite(denominators)
        sums[parameter, 0] += torch.where(finite, denominators, 0.0).sum(dtype=torch.float64)
        sums[parameter, 1] += finite.sum()
    comm.all_reduce(sums)
    smallest = SMALLEST_OF_MEAN * sums[:, 0] / sums[:, 1].clamp(min=1)
    highest = torch.zeros(count, dtype=torch.float64, device=device)
    for parameter, denominators in cuts:
        denominators.clamp_(min=float(smallest[parameter]))
        finite = torch.where(torch.isfinite(denominators), denominators, 0.0)
        highest[parameter] = torch.maximum(highest[parameter], finite.max().double())
    lowest = torch.full_like(highest, -float("inf"))
    for parameter, denominators in cuts:
        lowest[parameter] = torch.maximum(lowest[parameter], -denominators.min().double())
    comm.all_reduce(highest, "max")
    comm.all_reduce(lowest, "max")
    # A parameter that stays altogether has no range; any will do, as none of its codes is used.
    moving = highest > 0
    low = torch.where(moving, 1 / highest, 1.0)
    high = torch.where(moving, -1 / lowest, 1.0)
    return torch.stack([low, high], dim=1).float()


def publish(bucket: FlatBucket, codec: Codec, u: Tensor, own_codes: Tensor, ranges: Tensor) -> FrozenState:
    """Give the own shard of u, fp32 [shard], and of the codes to all ranks; what u's packets lost is left in it."""
    layout = bucket.layout
    codes = torch.empty(layout.padded_numel, dtype=torch.uint8, device=u.device)
    bucket.comm.all_gather(codes, own_codes)
    own = torch.zeros(1, codec.packet_bytes(layout.shard), dtype=torch.uint8, device=u.device)
    first, last = bucket.own_range
    codec.encode(u, None, own, last - first)
    u.masked_fill_(own_codes == 0, 0.0)
    momentum = torch.empty(layout.world_size, own.shape[1], dtype=torch.uint8, device=u.device)
    bucket.comm.all_gather(momentum.view(-1), own.view(-1))
    return FrozenState(momentum, codes, ranges[[slot.parameter for slot in layout.slots]], u)


def read_packed(bucket: FlatBucket, codec: Codec, names: Sequence[str], source: SliceSource) -> FrozenState:
    """Read packed state for this number of ranks; KeyError if something was not saved."""
    layout, device = bucket.layout, bucket.flat.device
    codes = torch.zeros(layout.padded_numel, dtype=torch.uint8, device=device)
    u = torch.zeros(layout.padded_numel, device=device)
    ranges = torch.ones(len(layout.slots), 2, device=device)
    for number, slot in enumerate(layout.slots):
        if not slot.numel:  # nothing of it was saved
            continue
        name = names[slot.parameter]
        codes[place_of(slot)].copy_(source.read(PACKED_PRECONDITIONER, name, 0, slot.numel))
        u[place_of(slot)].copy_(source.read(PACKED_MOMENTUM, name, 0, slot.numel))
        low, high = (source.read(kind, name, 0, 1) for kind in (PRECONDITIONER_LOW, PRECONDITIONER_HIGH))
        ranges[number] = torch.cat([low, high]).to(device)
    momentum = _pack(u, layout.numel, codec, layout.world_size)
    return FrozenState(momentum, codes, ranges, bucket.shard_of(u).clone())


def _pack(u: Tensor, numel: int, codec: Codec, ranks: int) -> Tensor:
    """Packets that decode to `u` to the last bit where blocks are cut as they were; what is lost where not is left."""
    packets = torch.zeros(ranks, codec.packet_bytes(u.numel() // ranks), dtype=torch.uint8, device=u.device)
    valid = torch.arange(u.numel(), device=u.device) < numel
    magnitudes = u.abs().view(-1, codec.block_size)
    largest = magnitudes.amax(dim=1)
    whole = ((magnitudes == largest[:, None]) | ~valid.view_as(magnitudes)).all(dim=1)
    codec.encode(u, None, packets, numel)
    # The mean of equal magnitudes may round; the scale of a block that was whole must not.
    scales = packets[:, HEADER_BYTES : HEADER_BYTES + largest.nbytes // ranks]
    means = scales.clone().view(torch.float32).view(-1)
    scales.copy_(torch.where(whole, largest, means).view(ranks, -1).view(torch.uint8))
    u.view_as(magnitudes)[whole] = 0.0
    return packets
