"""deepspeed.runtime.precision_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.engine.config.models import Bf16Config as DeepSpeedBF16Config
from thinwire.engine.config.models import Fp16Config as DeepSpeedFP16Config

__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"]


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The "bf16" section of a configuration, which may be spelled "bfloat16"."""
    return DeepSpeedBF16Config.model_validate(param_dict.get("bf16", param_dict.get("bfloat16", {})))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The "fp16" section of a configuration."""
    return DeepSpeedFP16Config.model_validate(param_dict.get("fp16", {}))
