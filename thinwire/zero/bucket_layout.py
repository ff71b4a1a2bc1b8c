"""Where each parameter lies in which bucket, and which rank owns which shard of it.
Kept apart from tensors so that the arithmetic can be tested exhaustively."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "LARGEST_BUCKET_BYTES",
    "BucketLayout",
    "Slot",
    "bucket_numel",
    "partition",
    "shard_numel",
    "valid_in_shard",
]

_BUCKETS = 8
_SMALLEST_BUCKET_BYTES = 1 << 20
LARGEST_BUCKET_BYTES = 16 << 20
"""Of the buckets that are cut by default: all of a sharded model's."""


def shard_numel(numel: int, world_size: int, multiple: int) -> int:
    """Elements in each of `world_size` equal shards that together hold `numel`, a whole number of `multiple`s.

    At least one multiple, so that an empty bucket still has a shard to send.
    """
    if numel < 0 or world_size < 1 or multiple < 1:
        raise ValueError(
            f"shard_numel needs numel >= 0, world_size >= 1 and multiple >= 1, "
            f"got numel={numel}, world_size={world_size}, multiple={multiple}"
        )
    blocks = -(-numel // multiple)
    return max(1, -(-blocks // world_size)) * multiple


def valid_in_shard(numel: int, shard: int, owner: int) -> int:
    """How many of the elements of `owner`'s shard are real; the rest, at its end, is padding."""
    return min(max(numel - owner * shard, 0), shard)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket: elements `offset` to `offset + numel`."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """A flat run of whole parameters, padded so that each of `world_size` shards is whole blocks."""

    slots: tuple[Slot, ...]
    world_size: int
    block_size: int

    @cached_property
    def numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def shard(self) -> int:
        """Elements of one rank's shard, padding included."""
        return shard_numel(self.numel, self.world_size, self.block_size)

    @property
    def padded_numel(self) -> int:
        """Elements of the whole bucket, padding included."""
        return self.shard * self.world_size


def bucket_numel(bucket_bytes: int | None, numel: int, itemsize: int) -> int:
    """Elements of a bucket of `bucket_bytes`, of a model with `numel` in all, each of `itemsize` bytes.

    None is an eighth of the model, from 1 to 16 MiB: one bucket in eight is left when backward ends, with nothing to
    hide behind, and large models' buckets are large enough that latency does not count.
    """
    if bucket_bytes is None:
        bucket_bytes = min(LARGEST_BUCKET_BYTES, max(_SMALLEST_BUCKET_BYTES, -(-numel // _BUCKETS) * itemsize))
    return max(1, bucket_bytes // itemsize)


def partition(
    numels: Sequence[int],
    order: Sequence[int],
    *,
    world_size: int,
    block_size: int,
    bucket_numel: int,
) -> list[BucketLayout]:
    """Cut the parameters `order` (indices into `numels`) into buckets of about `bucket_numel` elements.

    A parameter is never split: one larger than `bucket_numel` makes a bucket of its own size. Every parameter
    of `order` lies in exactly one bucket, in the given order, without gaps.
    """
    if bucket_numel < 1:
        raise ValueError(f"bucket_numel must be at least 1, got {bucket_numel}")
    layouts: list[BucketLayout] = []
    slots: list[Slot] = []
    offset = 0
    for parameter in order:
        if slots and offset + numels[parameter] > bucket_numel:
            layouts.append(BucketLayout(tuple(slots), world_size, block_size))
            slots, offset = [], 0
        slots.append(Slot(parameter, offset, numels[parameter]))
        offset += numels[parameter]
    if slots:
        layouts.append(BucketLayout(tuple(slots), world_size, block_size))
    return layouts
