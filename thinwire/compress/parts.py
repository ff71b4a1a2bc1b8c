"""How the shards of a bucket are cut into parts, so that encoding, sending and decoding of a large bucket overlap: the
one place that knows how large a part should be."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.compress.codecs import Codec

__all__ = ["cut_shard", "least_part"]

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
