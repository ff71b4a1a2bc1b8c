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
    "partitioned_param_data_shape",
    "register_external_parameter",
    "unregister_external_parameter",
]

partitioned_param_data_shape = [0]  # what a parameter that zero.Init has cut shows
