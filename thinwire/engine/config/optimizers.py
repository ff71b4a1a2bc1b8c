"""Keyword arguments of optimizers that send gradients exactly, and of DiLoCo: a model for each class.

Compressed optimizers have theirs in `optim/settings.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from thinwire.compress.codecs import CodecName, make_codec
from thinwire.optim.settings import (
    Backend,
    Betas,
    BlockSize,
    Count,
    NotNegative,
    OptionModel,
    Share,
    WholeNumber,
    as_tuple,
    only,
    unset,
    without_exponent,
)

__all__ = ["LOCAL_UPDATES", "OPTIMIZERS", "LocalUpdatesOptions"]

LOCAL_UPDATES = "DiLoCo"
"""The type of a section whose optimizer steps inside each worker; its own is in "inner"."""


class TorchOptions(OptionModel):
    """Arguments of all of torch's elementwise classes."""

    lr: NotNegative = 1e-3
    foreach: bool | None = None
    maximize: bool = False
    differentiable: Literal[False] = only(False, "a sharded step cannot be differentiated")

    @model_validator(mode="after")
    def _one_kernel(self) -> Self:
        if self.foreach and getattr(self, "fused", None):
            raise ValueError("`fused` and `foreach` cannot be true together: keep one of them")
        return self


class AdamWOptions(TorchOptions):
    """Arguments of AdamW. `weight_decay` is 0 where none is given: torch's own default is 0.01."""

    always: ClassVar[tuple[str, ...]] = ("weight_decay",)

    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    amsgrad: bool = False
    bias_correction: bool = True
    capturable: bool = False
    fused: bool | None = None


class AdamOptions(TorchOptions):
    """Arguments of Adam, whose weight decay is decoupled unless the file says otherwise."""

    always: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay",)

    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    decoupled_weight_decay: bool = True
    amsgrad: bool = False
    bias_correction: bool = True
    capturable: bool = False
    fused: bool | None = None


class AdadeltaOptions(TorchOptions):
    """Arguments of Adadelta."""

    lr: NotNegative = 1.0
    rho: Annotated[float, Field(ge=0, le=1)] = 0.9
    eps: NotNegative = 1e-6
    weight_decay: NotNegative = 0.0
    capturable: bool = False


class AdagradOptions(TorchOptions):
    """Arguments of Adagrad."""

    lr: NotNegative = 1e-2
    lr_decay: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    initial_accumulator_value: NotNegative = 0.0
    eps: NotNegative = 1e-10
    fused: bool | None = None


class AdamaxOptions(TorchOptions):
    """Arguments of Adamax."""

    lr: NotNegative = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    capturable: bool = False


class ASGDOptions(TorchOptions):
    """Arguments of ASGD."""

    lr: NotNegative = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: NotNegative = 0.0
    capturable: bool = False


class NAdamOptions(TorchOptions):
    """Arguments of NAdam."""

    lr: NotNegative = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    momentum_decay: NotNegative = 4e-3
    decoupled_weight_decay: bool = False
    capturable: bool = False


class RAdamOptions(TorchOptions):
    """Arguments of RAdam."""

    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    decoupled_weight_decay: bool = False
    capturable: bool = False


class RMSpropOptions(TorchOptions):
    """Arguments of RMSprop."""

    lr: NotNegative = 1e-2
    alpha: NotNegative = 0.99
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.0
    momentum: NotNegative = 0.0
    centered: bool = False
    capturable: bool = False


class RpropOptions(TorchOptions):
    """Arguments of Rprop, which decays no weights."""

    lr: NotNegative = 1e-2
    etas: Annotated[
        tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=1)]], BeforeValidator(as_tuple)
    ] = (0.5, 1.2)
    step_sizes: Annotated[tuple[float, float], BeforeValidator(as_tuple)] = (1e-6, 50.0)
    capturable: bool = False


class SGDOptions(TorchOptions):
    """Arguments of SGD."""

    momentum: NotNegative = 0.0
    dampening: float = 0.0
    weight_decay: NotNegative = 0.0
    nesterov: bool = False
    fused: bool | None = None

    @model_validator(mode="after")
    def _nesterov(self) -> Self:
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        return self


class LambOptions(OptionModel):
    """Arguments of Lamb."""

    lr: NotNegative = 1e-3
    bias_correction: bool = True
    betas: Betas = (0.9, 0.999)
    eps: NotNegative = 1e-8
    eps_inside_sqrt: bool = False
    weight_decay: NotNegative = 0.0
    max_coeff: float = 10.0
    min_coeff: NotNegative = 0.01

    @model_validator(mode="after")
    def _coefficients(self) -> Self:
        if self.min_coeff > self.max_coeff:
            raise ValueError(f"max_coeff must be at least min_coeff, {self.min_coeff}, got {self.max_coeff}")
        return self


class LionOptions(OptionModel):
    """Arguments of Lion."""

    lr: NotNegative = 1e-4
    betas: Betas = (0.9, 0.99)
    weight_decay: NotNegative = 0.0


class MuonOptions(OptionModel):
    """Arguments of Muon."""

    lr: NotNegative | None = None
    momentum: NotNegative = 0.95
    weight_decay: NotNegative = 0.0
    muon_lr: NotNegative | None = None
    adam_lr: NotNegative | None = None
    betas: Betas = (0.9, 0.95)
    eps: NotNegative = 1e-10
    nesterov: bool = True
    ns_steps: Annotated[WholeNumber, Field(ge=1, lt=100)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None


class LocalUpdatesOptions(OptionModel):
    """Arguments of DiLoCo, its "inner" apart."""

    every: Count = 30
    outer_lr: NotNegative | None = None
    outer_momentum: Share = 0.9
    fragments: Count | Literal["auto"] = "auto"
    overlap: Annotated[WholeNumber, Field(ge=0)] | None = None
    mix: Share | None = None
    codec: CodecName = "int4"
    block_size: BlockSize = 2048
    nodes: list[Annotated[WholeNumber, Field(ge=0)]] | Literal["auto", "flat"] = "auto"
    comm_backend_name: Backend = unset()
    stage: Literal[None] = only(None, 'it is "zero_optimization.stage", inside a worker of several ranks')
    max_norm: Annotated[Literal[0] | None, BeforeValidator(without_exponent)] = only(0, 'use "gradient_clipping"')
    param_dtype: Literal[None] = only(None, 'use "bf16" or "fp16"')
    elastic: Literal[None] = only(
        None,
        "the engine counts steps, gives out data and names checkpoints as if its ranks stayed. Train workers that come "
        "and go in a loop of your own, with thinwire.DiLoCo(..., elastic=thinwire.Elastic(...))",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.overlap is not None and self.overlap >= self.every:
            raise ValueError(
                f"overlap must be a number of steps from 0 up to, not including, every={self.every}, got "
                f"{self.overlap}: a fragment has to be back before it leaves again"
            )
        make_codec(self.codec, self.block_size)
        return self


OPTIMIZERS: Mapping[str, type[OptionModel]] = {
    "Adadelta": AdadeltaOptions,
    "Adagrad": AdagradOptions,
    "Adam": AdamOptions,
    "AdamW": AdamWOptions,
    "Adamax": AdamaxOptions,
    "ASGD": ASGDOptions,
    "NAdam": NAdamOptions,
    "RAdam": RAdamOptions,
    "RMSprop": RMSpropOptions,
    "Rprop": RpropOptions,
    "SGD": SGDOptions,
    "Lamb": LambOptions,
    "Lion": LionOptions,
    "Muon": MuonOptions,
}
"""Classes that send gradients exactly: torch's elementwise ones, whose shards step as they would inside the whole
tensor, and ours."""
