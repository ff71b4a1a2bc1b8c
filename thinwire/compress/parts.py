"""Parts of a bucket's shards, cut so that encoding, sending and decoding of a large bucket overlap: how large one
should be, and what an exchange's two legs bring of it. Beside them the coordinates of a vector that are held at
zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Work
from thinwire.compress.codecs import Codec
from thinwire.compress.packet import Headers

__all__ = [
    "Arrived",
    "Leg",
    "Outcome",
    "cut_shard",
    "held_coordinates",
    "least_part",
    "zero_held",
]

_LEAST_ELEMENTS = 1 << 17  # under this the call of a kernel is felt beside its work
_LEAST_BYTES = 64 << 10  # of a message to one peer: 0.5 ms at 1 Gb/s, where a collective's latency is about 50 µs


_WHOLE = 1 << 62
_WITHOUT_PARTS = ("nccl",)
"""Backends on which a part costs more than it hides: launches on a GPU, for a transfer that takes microseconds."""


def least_part(codec: Codec, backend: str) -> int:
    """Elements of a shard in the smallest part worth its own two collectives over a communicator of this `backend`: a
    whole number of blocks, or more than any shard has.

    It counts what goes to one peer, whatever the number of ranks: each message has its own latency. So many ranks have
    small shards, and then no parts.
    """
    if backend in _WITHOUT_PARTS:
        return _WHOLE
    block_bytes = codec.packet_bytes(codec.block_size) - codec.packet_bytes(0)
    return max(-(-_LEAST_ELEMENTS // codec.block_size), -(-_LEAST_BYTES // block_bytes)) * codec.block_size


def cut_shard(shard: int, block_size: int, least: int) -> Sequence[slice]:
    """Places in a shard of `shard` elements of as many equal parts, but for blocks, as hold at least `least` elements.

    One at least; every rank must give the same `least`.
    """
    blocks = shard // block_size
    parts = min(blocks, max(1, shard // least))
    edges = [blocks * part // parts * block_size for part in range(parts + 1)]
    return [slice(edges[part], edges[part + 1]) for part in range(parts)]


@dataclass(frozen=True)
class Outcome:
    """What the headers of one exchange said, the same on every rank.

    `finite`: every owner's average was finite. `incomplete`: some rank had no gradient for some parameter. `unplaced`:
    some rank has a trainable parameter that lies in no bucket yet. `meet`: some rank knows of a worker that waits.
    """

    finite: bool
    incomplete: bool
    unplaced: bool
    meet: bool = False


@dataclass(frozen=True)
class Leg:
    """One part's packets under way, uint8 [packets, packet_bytes]; both tensors are in use until `work` is over."""

    sent: Tensor
    received: Tensor
    work: Work


@dataclass(frozen=True)
class Arrived:
    """Where an exchange that was captured in a graph has its results, whenever that is replayed."""

    headers: Sequence[Headers]
    legs: Sequence[Leg]
    average: Tensor


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
