"""deepspeed.runtime.zero.offload_config: the offloading sections as objects, by DeepSpeed's names and defaults."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from thinwire.deepspeed.runtime.config_utils import DeepSpeedConfigModel

__all__ = ["DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum"]


class OffloadDeviceEnum(StrEnum):
    """Where state is offloaded to; thinwire has no NVMe."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class _Offload(DeepSpeedConfigModel):
    """What both sections have."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: str | None = None
    buffer_count: int = Field(5, ge=0)
    pin_memory: bool = False


class DeepSpeedZeroOffloadParamConfig(_Offload):
    """The keys of "offload_param"."""

    buffer_size: int = Field(10**8, ge=0)
    max_in_cpu: int = Field(10**9, ge=0)


class DeepSpeedZeroOffloadOptimizerConfig(_Offload):
    """The keys of "offload_optimizer"."""

    buffer_count: int = Field(4, ge=0)
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing overlaps the step."""
        return self.pipeline_read or self.pipeline_write
