"""deepspeed.zero, which is deepspeed.runtime.zero."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    ("config", "offload_config", "partition_parameters", "stage3", "stage_1_and_2", "tiling", "utils"),
    {
        "runtime.zero.partition_parameters": (
            "GatheredParameters",
            "Init",
            "ZeroParamStatus",
            "register_external_parameter",
            "unregister_external_parameter",
        ),
        "runtime.zero.tiling": ("TiledLinear", "TiledLinearReturnBias"),
    },
)
