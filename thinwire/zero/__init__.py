"""Floor 2, the sharded core: which parameter lies where in which flat bucket, and which rank owns which
part of it. Pure arithmetic, so that every floor above shares one answer."""

from __future__ import annotations

from thinwire.zero.layout import BucketLayout, Slot, partition, shard_numel, valid_in_shard

__all__ = ["BucketLayout", "Slot", "partition", "shard_numel", "valid_in_shard"]
