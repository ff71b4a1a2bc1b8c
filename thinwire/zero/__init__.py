"""Floor 2, the sharded core: which parameter lies where in which flat bucket, which rank owns which part of it, and
ZeRO stages 0 to 2 for any elementwise torch optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = [
    "LARGEST_BUCKET_BYTES",
    "Averaging",
    "BucketLayout",
    "GatheredParameters",
    "Init",
    "OwnSlices",
    "ReplicaDriftError",
    "SavedSlice",
    "ShardedOptimizer",
    "SliceSource",
    "Slot",
    "StepResult",
    "ZeroParamStatus",
    "bucket_numel",
    "partition",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "shard_numel",
    "unregister_external_parameter",
    "valid_in_shard",
]

# A plan reads the sizes of buckets and shards where there is no torch yet.
if TYPE_CHECKING:
    from thinwire.zero.bucket_layout import (
        LARGEST_BUCKET_BYTES,
        BucketLayout,
        Slot,
        bucket_numel,
        partition,
        shard_numel,
        valid_in_shard,
    )
    from thinwire.zero.external import register_external_parameter, unregister_external_parameter
    from thinwire.zero.fragments import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )
    from thinwire.zero.gathering import GatheredParameters
    from thinwire.zero.gradients import Averaging
    from thinwire.zero.home import StepResult
    from thinwire.zero.init import Init
    from thinwire.zero.optimizer import ShardedOptimizer
    from thinwire.zero.parameter_shard import ZeroParamStatus
    from thinwire.zero.rank_checks import ReplicaDriftError
    from thinwire.zero.saved_state import OwnSlices, SavedSlice, SliceSource
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "gradients": ("Averaging",),
            "bucket_layout": (
                "LARGEST_BUCKET_BYTES",
                "BucketLayout",
                "Slot",
                "bucket_numel",
                "partition",
                "shard_numel",
                "valid_in_shard",
            ),
            "fragments": (
                "safe_get_full_fp32_param",
                "safe_get_full_grad",
                "safe_get_full_optimizer_state",
                "safe_get_local_fp32_param",
                "safe_get_local_grad",
                "safe_get_local_optimizer_state",
                "safe_set_full_fp32_param",
                "safe_set_full_grad",
                "safe_set_full_optimizer_state",
                "safe_set_local_fp32_param",
                "safe_set_local_grad",
                "safe_set_local_optimizer_state",
                "safe_update_full_grad_vectorized",
            ),
            "home": ("StepResult",),
            "optimizer": ("ShardedOptimizer",),
            "external": (
                "register_external_parameter",
                "unregister_external_parameter",
            ),
            "gathering": ("GatheredParameters",),
            "init": ("Init",),
            "parameter_shard": ("ZeroParamStatus",),
            "rank_checks": ("ReplicaDriftError",),
            "saved_state": ("OwnSlices", "SavedSlice", "SliceSource"),
        },
    )
