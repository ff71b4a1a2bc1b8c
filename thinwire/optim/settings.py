"""Values that a configuration can hold for each optimizer: a model an optimizer, with its defaults and bounds.

Torch-free: plans, experiments and a configuration read them before a class is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from thinwire.compress.packet_layout import LOW_RANK, BlockCodecName, CodecName

LARGEST_NUMBER = 2**63
"""Bound of whole numbers, and of its negative: they become machine numbers."""


def without_exponent(value: Any) -> Any:
    """A whole float as an int."""
    # People write 5e8 for a number of elements, which JSON reads as a float.
    whole = isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_NUMBER
    return int(value) if whole else value


def as_tuple(value: Any) -> Any:
    """A list as the tuple that a class takes."""
    return tuple(value) if isinstance(value, list) else value


WholeNumber = Annotated[int, BeforeValidator(without_exponent)]
Count = Annotated[WholeNumber, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Share, Share], BeforeValidator(as_tuple)]
BlockSize = Annotated[WholeNumber, Field(ge=64, le=65536, multiple_of=64)]
Backend = Literal["nccl", "gloo", "mpi"]
WarmupWire = Literal["fp32", "bf16", "fp16", "int8", "int4"]


def only(value: Any, instead: str) -> Any:
    """A field that can only be `value`, and is not handed on; `instead`: what to do for another."""
    return Field(default=value, exclude=True, description=instead)


def unset() -> Any:
    """A field that has no value of a file's where none is given: the class finds one."""
    return Field(default=None)


class OptionModel(BaseModel):
    """Keyword arguments as a file can hold them: no others, of these types, finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    always: ClassVar[tuple[str, ...]] = ()
    """Fields that are handed on where they are not given, since the class has another default."""

    def given(self) -> dict[str, Any]:
        """The fields that were given, as the class takes them."""
        return {**{name: getattr(self, name) for name in self.always}, **self.model_dump(exclude_unset=True)}


class ElasticOptions(OptionModel):
    """Arguments of thinwire.Elastic."""

    workers: Count
    min_workers: Count = 1
    address: str | None = None
    job: str = "job"
    timeout: Positive = 300.0
    join_timeout: Positive = 1800.0
    silence: Positive = 10.0


_UPDATE = "every stage has it; the class takes the momentum too at stage 0"


class OneBitOptions(OptionModel):
    """Arguments of all compressed optimizers. `comm_backend_name`: of a communicator of the optimizer's own."""

    lr: NotNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    weight_decay: NotNegative = 0.0
    block_size: BlockSize = 2048
    comm_backend_name: Backend = unset()
    codec: CodecName = "sign1"
    elastic: ElasticOptions | None = None


class OneBitAdamOptions(OneBitOptions):
    """Arguments of OneBitAdam."""

    eps: Positive = 1e-8
    bias_correction: bool = True
    compress: Literal["update"] = only("update", _UPDATE)
    freeze_step: Count | Literal["auto"] = "auto"
    warmup_wire: WarmupWire = "fp32"


class OneBitLambOptions(OneBitOptions):
    """Arguments of OneBitLamb."""

    eps: Positive = 1e-8
    bias_correction: bool = True
    compress: Literal["update"] = only("update", _UPDATE)
    freeze_step: Count | Literal["auto"] = 100_000
    warmup_wire: WarmupWire = "fp32"
    max_coeff: Positive = 10.0
    min_coeff: Positive = 0.01
    coeff_beta: Share = 0.9
    factor_max: Annotated[float, Field(ge=1)] = 4.0
    factor_min: Annotated[float, Field(gt=0, le=1)] = 0.5
    factor_threshold: Share = 0.1

    @model_validator(mode="after")
    def _coefficients(self) -> Self:
        if self.min_coeff > self.max_coeff:
            raise ValueError(
                f"min_coeff must be above 0 and at most max_coeff, got {self.min_coeff} and {self.max_coeff}"
            )
        return self


class ZeroOneAdamOptions(OneBitOptions):
    """Arguments of ZeroOneAdam."""

    eps: Positive = 1e-8
    bias_correction: bool = True
    compress: Literal["update"] = only("update", _UPDATE)
    var_freeze_step: Count = 100_000
    warmup_wire: WarmupWire = "fp32"
    var_update_scaler: Count = 16
    local_step_scaler: Count = 32_678
    local_step_clipper: Count = 16


class OneBitLionOptions(OneBitOptions):
    """Arguments of OneBitLion."""

    lr: NotNegative = 1e-4
    betas: Betas = (0.9, 0.99)


_Codecs = BlockCodecName | Annotated[tuple[BlockCodecName, BlockCodecName], BeforeValidator(as_tuple)]


class OneBitMuonOptions(OptionModel):
    """Arguments of OneBitMuon."""

    lr: NotNegative = 1e-3
    momentum: Share = 0.95
    weight_decay: NotNegative = 0.0
    codec: _Codecs = "sign1"
    rest_codec: _Codecs = "stat2"
    low_rank: Annotated[WholeNumber, Field(ge=0)] = LOW_RANK
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = "match_rms_adamw"
    nesterov: bool = False
    ns_steps: Annotated[WholeNumber, Field(ge=1, lt=100)] = 5
    ns_dtype: Literal["fp32", "bf16"] | None = None
    betas: Betas = (0.9, 0.95)
    eps: NotNegative = 1e-10
    muon_lr: NotNegative | None = None
    adam_lr: NotNegative | None = None
    block_size: BlockSize = 2048
    comm_backend_name: Backend = unset()
    elastic: ElasticOptions | None = None

    @model_validator(mode="after")
    def _rest_is_averaged(self) -> Self:
        if self.elastic is not None and isinstance(self.rest_codec, tuple) and len(set(self.rest_codec)) > 1:
            raise ValueError(f"rest_codec must be one codec with elastic, got {list(self.rest_codec)}")
        return self


OPTIONS: Mapping[str, type[OptionModel]] = {
    "OneBitAdam": OneBitAdamOptions,
    "OneBitLamb": OneBitLambOptions,
    "ZeroOneAdam": ZeroOneAdamOptions,
    "OneBitLion": OneBitLionOptions,
    "OneBitMuon": OneBitMuonOptions,
}
"""By the names of the registry."""
