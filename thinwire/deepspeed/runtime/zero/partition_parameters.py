"""deepspeed.runtime.zero.partition_parameters: models built shard by shard, and their parameters whole for a while."""

from __future__ import annotations

from thinwire.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]
