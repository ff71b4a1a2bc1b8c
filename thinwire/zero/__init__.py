"""Floor 3, the sharded core: which parameter lies where in which flat bucket, which rank owns which part of it, and
ZeRO stages 0 to 2 for any elementwise torch optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = [
    "LARGEST_BUCKET_BYTES",
    "Averaging",
    "BucketLayout",
    "OwnSlices",
    "ReplicaDriftError",
    "SavedSlice",
    "ShardedOptimizer",
    "SliceSource",
    "Slot",
    "StepResult",
    "bucket_numel",
    "partition",
]

# A plan reads the sizes of buckets and shards where there is no torch yet.
if TYPE_CHECKING:
    from thinwire.zero.bucket_layout import (
        LARGEST_BUCKET_BYTES,
        BucketLayout,
        Slot,
        bucket_numel,
        partition,
    )
    from thinwire.zero.home import StepResult
    from thinwire.zero.optimizer import ShardedOptimizer
    from thinwire.zero.placement import Averaging
    from thinwire.zero.rank_checks import ReplicaDriftError
    from thinwire.zero.saved_state import OwnSlices, SavedSlice, SliceSource
else:
    __getattr__, __dir__ = lazy_exports(__name__)
