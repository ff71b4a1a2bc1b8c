"""deepspeed.runtime.zero.offload_config."""

from __future__ import annotations

from enum import StrEnum

from thinwire.engine.config.models import OffloadConfig as DeepSpeedZeroOffloadOptimizerConfig
from thinwire.engine.config.models import OffloadConfig as DeepSpeedZeroOffloadParamConfig

__all__ = ["DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum"]


class OffloadDeviceEnum(StrEnum):
    """Where state is offloaded to; thinwire has no NVMe."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
