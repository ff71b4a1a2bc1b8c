"""Sharded and packed state in a checkpoint: each rank's share as slices of named parameters, its own residual apart,
and another number of ranks', or another home's, in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.compress.codecs import Codec
from thinwire.compress.packet_layout import HEADER_BYTES
from thinwire.optim.checkpoint import (
    load_owner_residual,
    load_worker_residual,
    owner_residual_slices,
    worker_residual_tensors,
)
from thinwire.optim.preconditioner import (
    PACKED_MOMENTUM,
    PACKED_PRECONDITIONER,
    PRECONDITIONER_HIGH,
    PRECONDITIONER_LOW,
    as_packed,
)
from thinwire.optim.sharded.packed_bucket import PackedBucket
from thinwire.optim.sharded.packing import FrozenState
from thinwire.zero.master_weights import FlatBucket, MasterWeights
from thinwire.zero.saved_state import SavedSlice, SliceSource

__all__ = ["load", "load_warmup", "rank_tensors", "read_states", "slices", "warmup_slices"]


def warmup_slices(
    masters: Sequence[MasterWeights], state: Sequence[Mapping[str, Tensor]], names: Sequence[str]
) -> list[SavedSlice]:
    """The moments of this rank's shards."""
    return [
        SavedSlice(kind, names[run.parameter], run.start, values[run.place])
        for one, of_bucket in zip(masters, state, strict=True)
        for kind, values in of_bucket.items()
        for run in one.runs
    ]


def load_warmup(
    masters: Sequence[MasterWeights], state: Sequence[Mapping[str, Tensor]], names: Sequence[str], source: SliceSource
) -> None:
    """Take the moments of this rank's shards over; those of a parameter that was not saved are zero."""
    for one, of_bucket in zip(masters, state, strict=True):
        for kind, values in of_bucket.items():
            for run in one.runs if kind in source.kinds() else ():
                values[run.place].copy_(source.read(kind, names[run.parameter], run.start, run.numel))


def slices(packed: Sequence[PackedBucket], names: Sequence[str]) -> list[SavedSlice]:
    """What this rank owns of u, of the preconditioner and its ranges, of the owners' residual and of further state."""
    found: list[SavedSlice] = []
    for one in packed:
        bucket, residual = one.bucket, one.exchange.owner_residual
        assert residual is not None
        own = {PACKED_MOMENTUM: one.own_momentum(), PACKED_PRECONDITIONER: bucket.shard_of(one.codes), **one.extra}
        number_of = {slot.parameter: number for number, slot in enumerate(bucket.layout.slots)}
        for run in bucket.own_runs:
            name = names[run.parameter]
            found += [SavedSlice(kind, name, run.start, shard[run.place]) for kind, shard in own.items()]
            if run.start == 0:
                low, high = one.ranges[number_of[run.parameter]].view(2, 1)
                found += [SavedSlice(PRECONDITIONER_LOW, name, 0, low), SavedSlice(PRECONDITIONER_HIGH, name, 0, high)]
        found += owner_residual_slices(bucket.layout, one.exchange.owner_place, residual, names)
    return found


def rank_tensors(packed: Sequence[PackedBucket], names: Sequence[str]) -> dict[str, Tensor]:
    """The residual of this rank, by parameter."""
    found: dict[str, Tensor] = {}
    for one in packed:
        residual = one.exchange.worker_residual
        assert residual is not None
        found |= worker_residual_tensors(one.layout, one.exchange.worker_place, residual, names)
    return found


def read_states(
    buckets: Sequence[FlatBucket], names: Sequence[str], source: SliceSource, codec: Codec, extra: Sequence[str]
) -> list[FrozenState]:
    """Each bucket's frozen state for this number of ranks, without residuals and with zeros for `extra`; KeyError where
    something was not saved."""
    return [_read_state(bucket, names, as_packed(source), codec, extra) for bucket in buckets]


def load(
    packed: Sequence[PackedBucket], names: Sequence[str], source: SliceSource, ranks: Sequence[int] | None
) -> None:
    """Take over further state, and the residuals: the mean of those of `ranks`, none where that is None."""
    for one in packed:
        for kind, shard in one.extra.items():
            for run in one.bucket.own_runs:
                shard[run.place].copy_(source.read(kind, names[run.parameter], run.start, run.numel))
        if ranks is not None:
            worker, owner = one.exchange.worker_residual, one.exchange.owner_residual
            assert worker is not None
            assert owner is not None
            load_worker_residual(one.layout, one.exchange.worker_place, worker, names, source, ranks)
            saved = torch.zeros_like(owner)
            load_owner_residual(one.layout, one.exchange.owner_place, saved, names, source)
            owner.add_(saved)


def _read_state(
    bucket: FlatBucket, names: Sequence[str], source: SliceSource, codec: Codec, extra: Sequence[str]
) -> FrozenState:
    layout, device = bucket.layout, bucket.flat.device
    codes = torch.zeros(layout.padded_numel, dtype=torch.uint8, device=device)
    u = torch.zeros(layout.padded_numel, device=device)
    ranges = torch.ones(len(layout.slots), 2, device=device)
    for number, slot in enumerate(layout.slots):
        if not slot.numel:  # nothing of it was saved
            continue
        name = names[slot.parameter]
        place = slice(slot.offset, slot.offset + slot.numel)
        codes[place].copy_(source.read(PACKED_PRECONDITIONER, name, 0, slot.numel))
        u[place].copy_(source.read(PACKED_MOMENTUM, name, 0, slot.numel))
        low, high = (source.read(kind, name, 0, 1) for kind in (PRECONDITIONER_LOW, PRECONDITIONER_HIGH))
        ranges[number] = torch.cat([low, high]).to(device)
    momentum, lost = _pack(u, layout.numel, codec, layout.world_size)
    zeros = {name: torch.zeros(layout.shard, device=device) for name in extra}
    return FrozenState(codes, ranges, momentum, bucket.shard_of(lost).clone(), zeros)


def _pack(u: Tensor, numel: int, codec: Codec, ranks: int) -> tuple[Tensor, Tensor]:
    """Packets that decode to `u` to the last bit where blocks are cut as they were; and what is lost where not."""
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
    return packets, u
