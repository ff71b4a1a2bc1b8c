"""deepspeed.runtime.zero.config."""

from __future__ import annotations

from enum import IntEnum

from thinwire.engine.config.models import OffloadConfig as DeepSpeedZeroOffloadOptimizerConfig
from thinwire.engine.config.models import OffloadConfig as DeepSpeedZeroOffloadParamConfig
from thinwire.engine.config.models import ZeroConfig as DeepSpeedZeroConfig

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "ZeroStageEnum",
]


class ZeroStageEnum(IntEnum):
    """The stages of ZeRO: what is sharded, each with what stands above it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
