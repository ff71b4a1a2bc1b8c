"""Keyword arguments that a file can give optimizers that send gradients exactly, DiLoCo and schedules: a model a class.

Names and defaults are the class's own; what a value may be follows from its name. Compressed optimizers have theirs in
`optim/settings.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, create_model, model_validator

from thinwire.compress.codecs import make_codec
from thinwire.compress.packet_layout import CodecName
from thinwire.engine.schedules import schedule_names
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

LOCAL_UPDATES = "DiLoCo"
"""The type of a section whose optimizer steps inside each worker; its own is in "inner"."""

_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("lr", "lr_decay", "eps", "weight_decay", "momentum", "momentum_decay"), NotNegative),
    "initial_accumulator_value": NotNegative,
    **dict.fromkeys(("amsgrad", "bias_correction", "capturable", "centered", "decoupled_weight_decay"), bool),
    "nesterov": bool,
    **dict.fromkeys(("dampening", "lambd", "t0"), float),
    "betas": Betas,
    "fused": bool | None,
}


def _arguments(
    owner: type[Any], base: type[OptionModel], kinds: Mapping[str, Any], defaults: Mapping[str, Any]
) -> type[OptionModel]:
    """A model of the arguments in `kinds` of a class, with its own defaults where `defaults` has none."""
    own = {name: one.default for name, one in inspect.signature(owner).parameters.items()} | dict(defaults)
    fields: Any = {
        name: (kind, ... if own[name] is inspect.Parameter.empty else own[name]) for name, kind in kinds.items()
    }
    return create_model(f"{owner.__name__}Options", __base__=base, **fields)


class _OfTorch(OptionModel):
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


class _AdamW(_OfTorch):
    """torch's own default of `weight_decay` is 0.01."""

    always: ClassVar[tuple[str, ...]] = ("weight_decay",)


class _Adam(_OfTorch):
    """Weight decay is decoupled unless the file says otherwise."""

    always: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay",)


class _SGD(_OfTorch):
    @model_validator(mode="after")
    def _nesterov(self) -> Self:
        given: Any = self
        if given.nesterov and (given.momentum <= 0 or given.dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        return self


def _of_torch(
    name: str, names: str, base: type[OptionModel] = _OfTorch, defaults: Mapping[str, Any] | None = None, **kinds: Any
) -> type[OptionModel]:
    kinds = {one: kinds.get(one, _KINDS.get(one)) for one in ("lr", *names.split())}
    return _arguments(getattr(torch.optim, name), base, kinds, defaults or {})


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


_Etas = Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=1)]], BeforeValidator(as_tuple)]
_StepSizes = Annotated[tuple[float, float], BeforeValidator(as_tuple)]

OPTIMIZERS: Mapping[str, type[OptionModel]] = {
    "Adadelta": _of_torch("Adadelta", "rho eps weight_decay capturable", rho=Annotated[float, Field(ge=0, le=1)]),
    "Adagrad": _of_torch("Adagrad", "lr_decay weight_decay initial_accumulator_value eps fused"),
    "Adam": _of_torch(
        "Adam",
        "betas eps weight_decay decoupled_weight_decay amsgrad bias_correction capturable fused",
        _Adam,
        {"decoupled_weight_decay": True, "bias_correction": True},
    ),
    "AdamW": _of_torch(
        "AdamW",
        "betas eps weight_decay amsgrad bias_correction capturable fused",
        _AdamW,
        {"weight_decay": 0.0, "bias_correction": True},
    ),
    "Adamax": _of_torch("Adamax", "betas eps weight_decay capturable"),
    "ASGD": _of_torch("ASGD", "lambd alpha t0 weight_decay capturable", alpha=float),
    "NAdam": _of_torch("NAdam", "betas eps weight_decay momentum_decay decoupled_weight_decay capturable"),
    "RAdam": _of_torch("RAdam", "betas eps weight_decay decoupled_weight_decay capturable"),
    "RMSprop": _of_torch("RMSprop", "alpha eps weight_decay momentum centered capturable", alpha=NotNegative),
    "Rprop": _of_torch("Rprop", "etas step_sizes capturable", etas=_Etas, step_sizes=_StepSizes),
    "SGD": _of_torch("SGD", "momentum dampening weight_decay nesterov fused", _SGD),
    "Lamb": LambOptions,
    "Lion": LionOptions,
    "Muon": MuonOptions,
}
"""Classes that send gradients exactly: torch's elementwise ones, whose shards step as they would inside the whole
tensor, and ours."""

# As many groups a file can give a rate each: an optimizer takes the square of their number to check them.
_MOST_GROUPS = 1024

_Steps = Annotated[WholeNumber, Field(ge=0)]
_Unit = Annotated[float, Field(ge=0, le=1)]
_Rates = NotNegative | Annotated[list[NotNegative], Field(min_length=1, max_length=_MOST_GROUPS)]
_Numbers = float | Annotated[list[float], Field(min_length=1, max_length=_MOST_GROUPS)]
_Momenta = Share | Annotated[list[Share], Field(min_length=1, max_length=_MOST_GROUPS)]


class ScheduleOptions(OptionModel):
    """Arguments of a schedule. Lists hold one value for each parameter group, and are of one length."""

    last_epoch: Literal[-1] = only(-1, "a checkpoint says where to resume")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        lengths = {
            name: len(value) for name, value in self if isinstance(value, list) and ("lr" in name or "mom" in name)
        }
        if len(set(lengths.values())) > 1:
            shortest, longest = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
            raise ValueError(
                f"{shortest} must be one number, or one for each of the {lengths[longest]} parameter groups that "
                f"{longest} has, got {lengths[shortest]}"
            )
        return self


def _in_order(low: float | list[float], high: float | list[float], low_name: str, high_name: str) -> None:
    """Raise ValueError if a value of `low` is above its counterpart in `high`."""
    groups = max(len(one) if isinstance(one, list) else 1 for one in (low, high))
    lows, highs = ((one if isinstance(one, list) else [one] * groups) for one in (low, high))
    for least, most in zip(lows, highs, strict=False):
        if least > most:
            raise ValueError(f"{low_name} must be from 0 to {high_name} {most}, got {least}")


class _OneCycle(ScheduleOptions):
    @model_validator(mode="after")
    def _shape(self) -> Self:
        given: Any = self
        if not given.decay_step_size and (given.decay_lr_rate or given.decay_mom_rate):
            raise ValueError("decay_step_size must be at least 1, got 0")
        _in_order(given.cycle_min_lr, given.cycle_max_lr, "cycle_min_lr", "cycle_max_lr")
        _in_order(given.cycle_min_mom, given.cycle_max_mom, "cycle_min_mom", "cycle_max_mom")
        return self


class _WithTotal(ScheduleOptions):
    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        given: Any = self
        if given.total_num_steps < given.warmup_num_steps:
            raise ValueError(
                f"total_num_steps must be at least warmup_num_steps {given.warmup_num_steps}, got "
                f"{given.total_num_steps}"
            )
        return self


class _CyclicLR(ScheduleOptions):
    scale_fn: Literal[None] = only(None, "it is a function; pass a schedule of your own to thinwire.initialize")


class _OneCycleLR(ScheduleOptions):
    @model_validator(mode="after")
    def _length(self) -> Self:
        given: Any = self
        if given.total_steps is None and (given.epochs is None or given.steps_per_epoch is None):
            raise ValueError("You must define either total_steps OR both epochs and steps_per_epoch")
        return self


_SCHEDULE_CLASSES = schedule_names()
_WARMUP: Mapping[str, Any] = {
    "warmup_min_lr": _Rates,
    "warmup_max_lr": _Rates | None,
    "warmup_num_steps": _Steps,
    "warmup_type": Literal["log", "linear"],
}


def _schedule(name: str, base: type[OptionModel] = ScheduleOptions, **kinds: Any) -> type[OptionModel]:
    return _arguments(_SCHEDULE_CLASSES[name], base, kinds, {})


SCHEDULES: Mapping[str, type[OptionModel]] = {
    "LRRangeTest": _schedule(
        "LRRangeTest",
        lr_range_test_min_lr=_Rates,
        lr_range_test_step_size=Count,
        lr_range_test_step_rate=NotNegative,
        lr_range_test_staircase=bool,
    ),
    "OneCycle": _schedule(
        "OneCycle",
        _OneCycle,
        cycle_min_lr=_Rates,
        cycle_max_lr=_Rates,
        decay_lr_rate=NotNegative,
        cycle_first_step_size=Count,
        cycle_second_step_size=_Steps | None,
        cycle_first_stair_count=_Steps,
        cycle_second_stair_count=_Steps | None,
        decay_step_size=_Steps,
        cycle_momentum=bool,
        cycle_min_mom=_Momenta,
        cycle_max_mom=_Momenta,
        decay_mom_rate=NotNegative,
    ),
    "WarmupLR": _schedule("WarmupLR", **_WARMUP),
    "WarmupDecayLR": _schedule("WarmupDecayLR", _WithTotal, total_num_steps=Count, **_WARMUP),
    "WarmupCosineLR": _schedule(
        "WarmupCosineLR",
        _WithTotal,
        total_num_steps=Count,
        warmup_min_ratio=_Unit,
        warmup_num_steps=_Steps,
        cos_min_ratio=_Unit,
        warmup_type=Literal["log", "linear"],
    ),
    "StepLR": _schedule("StepLR", step_size=Count, gamma=float),
    "MultiStepLR": _schedule("MultiStepLR", milestones=list[WholeNumber], gamma=float),
    "ConstantLR": _schedule("ConstantLR", factor=_Unit, total_iters=WholeNumber),
    "LinearLR": _schedule(
        "LinearLR", start_factor=Annotated[float, Field(gt=0, le=1)], end_factor=_Unit, total_iters=WholeNumber
    ),
    "ExponentialLR": _schedule("ExponentialLR", gamma=float),
    "PolynomialLR": _schedule("PolynomialLR", total_iters=WholeNumber, power=float),
    "CosineAnnealingLR": _schedule("CosineAnnealingLR", T_max=Count, eta_min=float),
    "CyclicLR": _schedule(
        "CyclicLR",
        _CyclicLR,
        base_lr=_Numbers,
        max_lr=_Numbers,
        step_size_up=Count,
        step_size_down=Count | None,
        mode=Literal["triangular", "triangular2", "exp_range"],
        gamma=float,
        scale_mode=Literal["cycle", "iterations"],
        cycle_momentum=bool,
        base_momentum=float,
        max_momentum=float,
    ),
    "CosineAnnealingWarmRestarts": _schedule("CosineAnnealingWarmRestarts", T_0=Count, T_mult=Count, eta_min=float),
    "OneCycleLR": _schedule(
        "OneCycleLR",
        _OneCycleLR,
        max_lr=_Numbers,
        total_steps=Count | None,
        epochs=Count | None,
        steps_per_epoch=Count | None,
        pct_start=_Unit,
        anneal_strategy=Literal["cos", "linear"],
        cycle_momentum=bool,
        base_momentum=_Numbers,
        max_momentum=_Numbers,
        div_factor=float,
        final_div_factor=float,
        three_phase=bool,
    ),
}
"""Ours, and those of torch.optim.lr_scheduler that a file can describe."""
