"""Keyword arguments that a file can give optimizers that send gradients exactly, DiLoCo and schedules: a model a class.

Names and defaults are the class's own; what a value may be follows from its name. Compressed optimizers have theirs in
`optim/settings.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, create_model, model_validator

from thinwire.comm.elastic import Elastic
from thinwire.compress.codecs import make_codec
from thinwire.compress.packet_layout import CodecName
from thinwire.engine.schedules import schedule_names
from thinwire.optim.registry import exact
from thinwire.optim.settings import (
    Backend,
    Betas,
    BlockSize,
    Count,
    ElasticOptions,
    NotNegative,
    OptionModel,
    Positive,
    Share,
    WholeNumber,
    as_tuple,
    only,
    unset,
    without_exponent,
)

LOCAL_UPDATES = "DiLoCo"
"""The type of a section whose optimizer steps inside each worker; its own is in "inner"."""

_Etas = Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=1)]], BeforeValidator(as_tuple)]
_StepSizes = Annotated[tuple[float, float], BeforeValidator(as_tuple)]
_Unit = Annotated[float, Field(ge=0, le=1)]
_Steps = Annotated[WholeNumber, Field(ge=0)]

# As many groups a file can give a rate each: an optimizer takes the square of their number to check them.
_MOST_GROUPS = 1024
_Rates = NotNegative | Annotated[list[NotNegative], Field(min_length=1, max_length=_MOST_GROUPS)]
_Numbers = float | Annotated[list[float], Field(min_length=1, max_length=_MOST_GROUPS)]
_Momenta = Share | Annotated[list[Share], Field(min_length=1, max_length=_MOST_GROUPS)]

_NAMES_OF: tuple[tuple[Any, str], ...] = (
    (NotNegative, "lr lr_decay eps weight_decay momentum momentum_decay initial_accumulator_value min_coeff"),
    (NotNegative, "lr_range_test_step_rate decay_lr_rate decay_mom_rate"),
    (NotNegative | None, "muon_lr adam_lr"),
    (bool, "amsgrad bias_correction capturable centered decoupled_weight_decay eps_inside_sqrt nesterov"),
    (bool, "lr_range_test_staircase cycle_momentum three_phase"),
    (bool | None, "fused"),
    (float, "dampening lambd t0 alpha max_coeff gamma power eta_min div_factor final_div_factor"),
    (float, "base_momentum max_momentum"),
    (Betas, "betas"),
    (_Etas, "etas"),
    (_StepSizes, "step_sizes"),
    (_Unit, "omega rho warmup_min_ratio cos_min_ratio factor end_factor pct_start"),
    (Annotated[float, Field(gt=0, le=1)], "start_factor"),
    (_Rates, "lr_range_test_min_lr cycle_min_lr cycle_max_lr warmup_min_lr"),
    (_Rates | None, "warmup_max_lr"),
    (_Numbers, "base_lr max_lr"),
    (_Momenta, "cycle_min_mom cycle_max_mom"),
    (Count, "lr_range_test_step_size cycle_first_step_size total_num_steps step_size T_max step_size_up T_0 T_mult"),
    (Count | None, "step_size_down total_steps epochs steps_per_epoch"),
    (_Steps, "cycle_first_stair_count decay_step_size warmup_num_steps"),
    (_Steps | None, "cycle_second_step_size cycle_second_stair_count"),
    (WholeNumber, "total_iters"),
    (list[WholeNumber], "milestones"),
    (Annotated[WholeNumber, Field(ge=1, lt=100)], "ns_steps"),
    (Literal["original", "match_rms_adamw"] | None, "adjust_lr_fn"),
    (Literal["fp32", "bf16"] | None, "ns_dtype"),
    (Literal["log", "linear"], "warmup_type"),
    (Literal["triangular", "triangular2", "exp_range"], "mode"),
    (Literal["cycle", "iterations"], "scale_mode"),
    (Literal["cos", "linear"], "anneal_strategy"),
)
_KINDS: Mapping[str, Any] = {name: kind for kind, names in _NAMES_OF for name in names.split()}


def _arguments(
    owner: type[Any], base: type[OptionModel], defaults: Mapping[str, Any] | None = None, **kinds: Any
) -> type[OptionModel]:
    """A model of the arguments of a class whose names say what they may be, or `kinds` do, with its own defaults, where
    `defaults` has none. Where it has another than the class, that is handed on. An optimizer's takes `elastic` too."""
    own = {name: one.default for name, one in inspect.signature(owner).parameters.items()} | dict(defaults or {})
    fields: Any = {
        name: (kind, ... if default is inspect.Parameter.empty else default)
        for name, default in own.items()
        if (kind := kinds.get(name, _KINDS.get(name))) is not None
    }
    if issubclass(owner, torch.optim.Optimizer):
        fields["elastic"] = ElasticOptions | None, None
    made = create_model(f"{owner.__name__}Options", __base__=base, **fields)
    parameters = inspect.signature(owner).parameters
    made.always = tuple(name for name in defaults or () if name in parameters and parameters[name].default != own[name])
    return made


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


class _SGD(_OfTorch):
    @model_validator(mode="after")
    def _nesterov(self) -> Self:
        given: Any = self
        if given.nesterov and (given.momentum <= 0 or given.dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        return self


class _Lamb(OptionModel):
    @model_validator(mode="after")
    def _coefficients(self) -> Self:
        given: Any = self
        if given.min_coeff > given.max_coeff:
            raise ValueError(f"max_coeff must be at least min_coeff, {given.min_coeff}, got {given.max_coeff}")
        return self


class LocalUpdatesOptions(OptionModel):
    """Arguments of DiLoCo, its "inner" apart."""

    every: Count = 30
    outer_lr: NotNegative | Literal["auto"] | None = None
    outer_momentum: Share = 0.9
    fragments: Count | Literal["auto"] = "auto"
    overlap: Annotated[WholeNumber, Field(ge=0)] | None = None
    mix: Share | Literal["carry"] | None = None
    codec: CodecName = "int4"
    block_size: BlockSize = 2048
    nodes: list[Annotated[WholeNumber, Field(ge=0)]] | Literal["auto", "flat"] = "auto"
    share: dict[str, Count] | None = None
    touch: Annotated[Positive, Field(le=1)] | None = None
    guard: Positive | None = None
    tokens: Positive | None = None
    comm_backend_name: Backend = unset()
    stage: Literal[None] = only(None, 'it is "zero_optimization.stage", inside a worker of several ranks')
    max_norm: Annotated[Literal[0] | None, BeforeValidator(without_exponent)] = only(0, 'use "gradient_clipping"')
    param_dtype: Literal[None] = only(None, 'use "bf16" or "fp16"')
    elastic: ElasticOptions | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.overlap is not None and self.overlap >= self.every:
            raise ValueError(
                f"overlap must be a number of steps from 0 up to, not including, every={self.every}, got "
                f"{self.overlap}: a fragment has to be back before it leaves again"
            )
        if self.mix == "carry" and (self.overlap == 0 or self.every == 1 or self.elastic is not None):
            raise ValueError('mix "carry" wants an overlap of 1 or more, and does not go with elastic')
        if self.outer_lr == "auto" and (self.every == 1 or self.codec in ("stat2", "sign1")):
            raise ValueError(
                'outer_lr "auto" follows the correlation of what workers do in successive intervals: set a rate for '
                'single steps, "every" 1, and for codecs too coarse to find it, "stat2" and "sign1"'
            )
        make_codec(self.codec, self.block_size)
        if self.elastic is not None:
            Elastic(**self.elastic.model_dump())
        return self


OPTIMIZERS: Mapping[str, type[OptionModel]] = {
    "Adadelta": _arguments(torch.optim.Adadelta, _OfTorch),
    "Adagrad": _arguments(torch.optim.Adagrad, _OfTorch),
    "Adam": _arguments(torch.optim.Adam, _OfTorch, {"decoupled_weight_decay": True, "bias_correction": True}),
    "AdamW": _arguments(torch.optim.AdamW, _OfTorch, {"weight_decay": 0.0, "bias_correction": True}),
    "Adamax": _arguments(torch.optim.Adamax, _OfTorch),
    "ASGD": _arguments(torch.optim.ASGD, _OfTorch),
    "NAdam": _arguments(torch.optim.NAdam, _OfTorch),
    "RAdam": _arguments(torch.optim.RAdam, _OfTorch),
    "RMSprop": _arguments(torch.optim.RMSprop, _OfTorch, alpha=NotNegative),
    "Rprop": _arguments(torch.optim.Rprop, _OfTorch),
    "SGD": _arguments(torch.optim.SGD, _SGD),
    "Lamb": _arguments(exact("Lamb"), _Lamb),
    "Lion": _arguments(exact("Lion"), OptionModel),
    "Muon": _arguments(exact("Muon"), OptionModel, lr=NotNegative | None),
    "QHAdamW": _arguments(exact("QHAdamW"), OptionModel),
}
"""Classes that send gradients exactly: torch's elementwise ones, whose shards step as they would inside the whole
tensor, and ours."""


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


_OF_SCHEDULES: Mapping[str, type[OptionModel]] = {
    "LRRangeTest": ScheduleOptions,
    "OneCycle": _OneCycle,
    "WarmupLR": ScheduleOptions,
    **dict.fromkeys(("WarmupDecayLR", "WarmupCosineLR"), _WithTotal),
    **dict.fromkeys(("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR"), ScheduleOptions),
    **dict.fromkeys(("PolynomialLR", "CosineAnnealingLR"), ScheduleOptions),
    "CyclicLR": _CyclicLR,
    "CosineAnnealingWarmRestarts": ScheduleOptions,
    "OneCycleLR": _OneCycleLR,
}
_CLASSES = schedule_names()
_OWN_KINDS: Mapping[str, dict[str, Any]] = {"OneCycleLR": {"base_momentum": _Numbers, "max_momentum": _Numbers}}

SCHEDULES: Mapping[str, type[OptionModel]] = {
    name: _arguments(_CLASSES[name], base, **_OWN_KINDS.get(name, {})) for name, base in _OF_SCHEDULES.items()
}
"""Ours, and those of torch.optim.lr_scheduler that a file can describe."""
