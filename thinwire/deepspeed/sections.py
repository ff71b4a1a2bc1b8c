"""The configuration and its sections as objects, by DeepSpeed's names and defaults, for scripts that build or read one.
`initialize` takes a dict or a file, and says which of its keys have no effect."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from thinwire.deepspeed.errors import DeepSpeedUsageError
from thinwire.engine import ConfigError as DeepSpeedConfigError
from thinwire.engine import EngineConfig, load_config
from thinwire.engine.config.loading import complete_batch_sizes, read_json_object
from thinwire.engine.config.models import Bf16Config, Fp16Config, LeafModuleConfig
from thinwire.engine.config.sections import refusal_of

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "lamb"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "onebitlamb", "zerooneadam"
ADAGRAD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "adagrad", "lion", "muon"

MIN_SWAPPABLE_BYTES = 1 << 20  # the smallest size that DeepSpeed swaps to NVMe; here all state goes
INITIAL_LOSS_SCALE, SCALE_WINDOW, MIN_LOSS_SCALE = "init_scale", "scale_window", "min_scale"
DELAYED_SHIFT, CONSECUTIVE_HYSTERESIS = "delayed_shift", "consecutive_hysteresis"
partitioned_param_data_shape = [0]  # what a parameter that zero.Init has cut shows
ZeRORuntimeException = RuntimeError

# Mixtures of experts in transformers
DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{module}.modeling_{module}.{name}"
    for module, name in (
        ("mixtral", "MixtralSparseMoeBlock"),
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock"),
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    )
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []

_TEN_MILLION, _HUNDRED_MILLION, _BILLION = 10**7, 10**8, 10**9


class DeepSpeedConfig:
    """A configuration, checked and complete: what `thinwire.engine.load_config` returns, by DeepSpeed's call.

    `config`: the path of a file, or a dict, for as many ranks as the job has. Attributes are the keys.

    Raises DeepSpeedConfigError, with every problem in one message.
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any], mpu: Any = None) -> None:
        given = config if isinstance(config, Mapping) else read_json_object(Path(config))
        self._param_dict = dict(given)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.settings = load_config(config, self.world_size)
        self.train_batch_size: int | None = self.settings.train_batch_size
        self.train_micro_batch_size_per_gpu: int | None = self.settings.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps: int | None = self.settings.gradient_accumulation_steps

    @property
    def monitor_config(self) -> EngineConfig:
        """What MonitorMaster and its parts are made of."""
        return self.settings

    def __getattr__(self, name: str) -> Any:
        if name == "settings":  # not there yet: do not look for it in itself
            raise AttributeError(name)
        return getattr(self.settings, name)

    def _configure_train_batch_size(self) -> None:
        """Complete the three sizes from those that are not None; DeepSpeedUsageError where they do not fit."""
        sizes = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        try:
            sizes = complete_batch_sizes(*sizes, self.world_size)
        except DeepSpeedConfigError as error:
            raise DeepSpeedUsageError(str(error)) from error
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes


class DeepSpeedConfigModel(BaseModel):
    """A section of a configuration: unknown keys are errors, and fields are known by name and alias.

    A field whose `json_schema_extra` has "deprecated": True gives its value to the field "new_param", through the
    function "new_param_fn" where there is one.

    Raises pydantic's ValidationError, a ValueError; DeepSpeedUsageError where an old and its new field are both given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, **given: Any) -> None:
        super().__init__(**self._without_deprecated(given))

    @classmethod
    def _without_deprecated(cls, given: dict[str, Any]) -> dict[str, Any]:
        """`given`, the values of deprecated fields handed over to those that took their places."""
        given = dict(given)
        for old, field in cls.model_fields.items():
            about = field.json_schema_extra
            new = about.get("new_param") if isinstance(about, dict) and about.get("deprecated") else None
            if old not in given or not isinstance(about, dict) or not isinstance(new, str):
                continue
            if new in given:
                raise DeepSpeedUsageError(f"both {old!r}, which is deprecated, and {new!r} are given: remove {old!r}")
            change: Any = about.get("new_param_fn", lambda value: value)
            given[new] = change(given[old])
        return given


class OffloadDeviceEnum(StrEnum):
    """Where state is offloaded to."""

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


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state that `engine.offload_states` is asked to move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


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
    adaptive_prefetch_bucket_size: bool = _stage_3("adaptive_prefetch_bucket_size", False)
    adaptive_prefetch_min_size: int = _stage_3("adaptive_prefetch_min_size", _TEN_MILLION)
    adaptive_prefetch_max_size: int = _stage_3("adaptive_prefetch_max_size", 5 * _HUNDRED_MILLION)
    gather_16bit_weights_on_model_save: bool = Field(
        False,
        validation_alias=AliasChoices(
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
        ),
    )
    leaf_module: LeafModuleConfig = Field(
        default_factory=lambda: LeafModuleConfig(
            classes=DEFAULT_LEAF_MODULE_CLASSES,
            names=DEFAULT_LEAF_MODULE_NAMES,
            name_suffixes=DEFAULT_LEAF_MODULE_NAME_SUFFIXES,
        )
    )
    pipeline_loading_checkpoint: bool = False
    memory_efficient_linear: bool = True

    @model_validator(mode="after")
    def _overlap_at_stage_3(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.__dict__["overlap_comm"] = self.stage == ZeroStageEnum.weights
        return self


class DeepSpeedFP16Config(Fp16Config):
    """The keys of "fp16", whose numbers may be text. Raises pydantic's ValidationError, a ValueError."""

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _number(cls, value: Any) -> int | float:
        try:
            number = float(value) if isinstance(value, str) or type(value) in (int, float) else None
        except ValueError:
            number = None
        if number is None:
            raise ValueError(f"must be a number, got {value!r}")
        return int(number) if number.is_integer() else number


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16Config:
    """The "bf16" section of a configuration, which may be spelled "bfloat16"."""
    return Bf16Config.model_validate(param_dict.get("bf16", param_dict.get("bfloat16", {})))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The "fp16" section of a configuration."""
    return DeepSpeedFP16Config.model_validate(param_dict.get("fp16", {}))


GRADIENT_CLIPPING_DEFAULT = 0.0  # none, as in DeepSpeed until June 2026


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """What a configuration clips the gradient's norm to; 0 for no clipping."""
    return float(param_dict.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT))


LOG_LEVEL_DEFAULT = None  # as it is


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """What a configuration sets the logger's level to; None to leave it."""
    level: str | None = param_dict.get("log_level", LOG_LEVEL_DEFAULT)
    return level


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether thinwire can shard this optimizer's class, which is so of every elementwise one."""
    kind = type(optimizer)
    return not kind.__module__.startswith("torch.optim") or refusal_of(kind.__name__) is None
