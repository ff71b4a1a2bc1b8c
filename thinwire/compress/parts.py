"""Parts of a bucket's shards, cut so that encoding, sending and decoding of a large bucket overlap: how large one
should be, and what an exchange's two legs bring of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.comm import Work
from thinwire.compress.codecs import Codec
from thinwire.compress.packet import Headers

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
    """One part's packets in flight, uint8 [packets, packet_bytes]; both tensors are in use until `work` is over."""

    sent: Tensor
    received: Tensor
    work: Work


@dataclass(frozen=True)
class Arrived:
    """Where an exchange that was captured in a graph has its results, whenever that is replayed."""

    headers: Sequence[Headers]
    legs: Sequence[Leg]
    average: Tensor
