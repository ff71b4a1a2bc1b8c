"""The frozen stage's part of a checkpoint: what each rank owns of it as pieces of parameters, its own residual apart,
and how another number of ranks takes them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.compress.codecs import Codec
from thinwire.compress.kernels import HEADER_BYTES
from thinwire.optim.sharded.packing import FrozenState
from thinwire.zero import Piece, PieceSource
from thinwire.zero.flat_bucket import FlatBucket

if TYPE_CHECKING:
    from thinwire.optim.sharded.packed_bucket import FrozenBucket

__all__ = ["load_frozen", "load_worker_residual", "save_frozen", "worker_residuals"]

_MOMENTUM, _CODES, _OWNER_RESIDUAL = "momentum", "preconditioner", "owner_residual"
_LOW, _HIGH = "scalar.preconditioner_low", "scalar.preconditioner_high"
_WORKER_RESIDUAL = "worker_residual."


def save_frozen(frozen: Sequence[FrozenBucket], names: Sequence[str]) -> list[Piece]:
    """What this rank owns of u, of the preconditioner and its ranges, and of the owners' residual."""
    pieces = []
    for one in frozen:
        bucket = one.bucket
        own = {
            _MOMENTUM: one.own_momentum(),
            _CODES: bucket.shard_of(one.codes),
            _OWNER_RESIDUAL: one.exchange.owner_residual,
        }
        number_of = {slot.parameter: number for number, slot in enumerate(bucket.layout.slots)}
        for run in bucket.own_runs:
            name = names[run.parameter]
            for kind, shard in own.items():
                assert shard is not None
                pieces.append(Piece(kind, name, run.start, shard[run.place]))
            if run.start == 0:
                low, high = one.ranges[number_of[run.parameter]].view(2, 1)
                pieces += [Piece(_LOW, name, 0, low), Piece(_HIGH, name, 0, high)]
    return pieces


def worker_residuals(frozen: Sequence[FrozenBucket], names: Sequence[str]) -> dict[str, Tensor]:
    """The residual of this rank, by parameter."""
    residuals = {}
    for one in frozen:
        residual = one.exchange.worker_residual
        assert residual is not None
        for slot in one.layout.slots:
            key = _WORKER_RESIDUAL + names[slot.parameter]
            residuals[key] = residual[slot.offset : slot.offset + slot.numel]
    return residuals


def load_frozen(
    buckets: Sequence[FlatBucket], names: Sequence[str], source: PieceSource, codec: Codec
) -> list[FrozenState]:
    """Each bucket's frozen state for this number of ranks; raises KeyError where something was not saved."""
    return [_load_bucket(bucket, names, source, codec) for bucket in buckets]


def load_worker_residual(one: FrozenBucket, names: Sequence[str], source: PieceSource, rank: int, size: int) -> None:
    """The residual that this rank saved or, from another number of ranks, the mean of all saved ones.

    The average over ranks of payload + residual, which is what everybody receives, is then what it would have been.
    """
    residual = one.exchange.worker_residual
    assert residual is not None
    saved_ranks = [rank] if source.world_size == size else range(source.world_size)
    for slot in one.layout.slots:
        key = _WORKER_RESIDUAL + names[slot.parameter]
        total = torch.zeros(slot.numel)
        for saved_rank in saved_ranks:
            total += source.read_rank(key, saved_rank).float()
        residual[slot.offset : slot.offset + slot.numel].copy_(total.div_(len(saved_ranks)))


def _load_bucket(bucket: FlatBucket, names: Sequence[str], source: PieceSource, codec: Codec) -> FrozenState:
    layout, device = bucket.layout, bucket.flat.device
    codes = torch.zeros(layout.padded_numel, dtype=torch.uint8, device=device)
    u = torch.zeros(layout.padded_numel, device=device)
    ranges = torch.ones(len(layout.slots), 2, device=device)
    for number, slot in enumerate(layout.slots):
        if not slot.numel:  # nothing of it was saved
            continue
        name = names[slot.parameter]
        place = slice(slot.offset, slot.offset + slot.numel)
        codes[place].copy_(source.read(_CODES, name, 0, slot.numel))
        u[place].copy_(source.read(_MOMENTUM, name, 0, slot.numel))
        ranges[number] = torch.cat([source.read(kind, name, 0, 1) for kind in (_LOW, _HIGH)]).to(device)
    owner_residual = torch.zeros(layout.shard, device=device)
    for run in bucket.own_runs:
        owner_residual[run.place].copy_(source.read(_OWNER_RESIDUAL, names[run.parameter], run.start, run.numel))
    momentum, lost = _pack(u, layout.numel, codec, layout.world_size)
    owner_residual += bucket.shard_of(lost)
    return FrozenState(codes, ranges, momentum, owner_residual)


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
