"""deepspeed.runtime.zero.config: the "zero_optimization" section as an object, by DeepSpeed's names and defaults, for
scripts that build or read one. `initialize` takes the section as a dict, and says which of its keys have no effect."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from pydantic import AliasChoices, Field, model_validator

from thinwire.deepspeed.runtime.config_utils import DeepSpeedConfigModel
from thinwire.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "ZeroStageEnum",
]

_TEN_MILLION, _HUNDRED_MILLION, _BILLION = 10**7, 10**8, 10**9


class ZeroStageEnum(IntEnum):
    """The stages of ZeRO: what is sharded, each with what stands above it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _stage_3(name: str, default: Any) -> Any:
    return Field(default, validation_alias=AliasChoices(f"stage3_{name}", name))


def _in_place_of(name: str, section: type[DeepSpeedConfigModel]) -> Any:
    """An old switch whose true is the section that took its place, offloading to the CPU."""
    about: Any = {
        "deprecated": True,
        "new_param": name,
        "new_param_fn": lambda on: section(device="cpu") if on else None,
    }
    return Field(None, json_schema_extra=about)


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The keys of "zero_optimization". Raises pydantic's ValidationError, a ValueError, for what none of them takes."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(5 * _HUNDRED_MILLION, gt=0)
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(5 * _HUNDRED_MILLION, gt=0)
    overlap_comm: bool | None = None
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    round_robin_gradients: bool = False
    ignore_unused_parameters: bool = True
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    cpu_offload_param: bool | None = _in_place_of("offload_param", DeepSpeedZeroOffloadParamConfig)
    cpu_offload: bool | None = _in_place_of("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig)
    cpu_offload_use_pin_memory: bool | None = None
    sub_group_size: int = Field(_BILLION, ge=0)
    prefetch_bucket_size: int = _stage_3("prefetch_bucket_size", 5 * _TEN_MILLION)
    param_persistence_threshold: int = _stage_3("param_persistence_threshold", 10**5)
    model_persistence_threshold: int = _stage_3("model_persistence_threshold", 2**63 - 1)
    max_live_parameters: int = _stage_3("max_live_parameters", _BILLION)
    max_reuse_distance: int = _stage_3("max_reuse_distance", _BILLION)
    gather_16bit_weights_on_model_save: bool = Field(
        False,
        validation_alias=AliasChoices(
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
        ),
    )
    pipeline_loading_checkpoint: bool = False
    memory_efficient_linear: bool = True

    @model_validator(mode="after")
    def _overlap_at_stage_3(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.__dict__["overlap_comm"] = self.stage == ZeroStageEnum.weights
        return self
