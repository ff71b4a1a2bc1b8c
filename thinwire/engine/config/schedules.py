"""Keyword arguments of the schedules that a file can name: a model for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from thinwire.optim.settings import Count, NotNegative, OptionModel, Share, WholeNumber, only

__all__ = ["SCHEDULES"]

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


class LRRangeTestOptions(ScheduleOptions):
    """Arguments of LRRangeTest."""

    lr_range_test_min_lr: _Rates = 1e-3
    lr_range_test_step_size: Count = 2000
    lr_range_test_step_rate: NotNegative = 1.0
    lr_range_test_staircase: bool = False


class OneCycleOptions(ScheduleOptions):
    """Arguments of OneCycle."""

    cycle_min_lr: _Rates
    cycle_max_lr: _Rates
    decay_lr_rate: NotNegative = 0.0
    cycle_first_step_size: Count = 2000
    cycle_second_step_size: _Steps | None = None
    cycle_first_stair_count: _Steps = 0
    cycle_second_stair_count: _Steps | None = None
    decay_step_size: _Steps = 0
    cycle_momentum: bool = True
    cycle_min_mom: _Momenta = 0.8
    cycle_max_mom: _Momenta = 0.9
    decay_mom_rate: NotNegative = 0.0

    @model_validator(mode="after")
    def _shape(self) -> Self:
        if not self.decay_step_size and (self.decay_lr_rate or self.decay_mom_rate):
            raise ValueError("decay_step_size must be at least 1, got 0")
        _in_order(self.cycle_min_lr, self.cycle_max_lr, "cycle_min_lr", "cycle_max_lr")
        _in_order(self.cycle_min_mom, self.cycle_max_mom, "cycle_min_mom", "cycle_max_mom")
        return self


class WarmupLROptions(ScheduleOptions):
    """Arguments of WarmupLR."""

    warmup_min_lr: _Rates = 0.0
    warmup_max_lr: _Rates | None = None
    warmup_num_steps: _Steps = 1000
    warmup_type: Literal["log", "linear"] = "log"


def _check_total(total: int, warmup: int) -> None:
    if total < warmup:
        raise ValueError(f"total_num_steps must be at least warmup_num_steps {warmup}, got {total}")


class WarmupDecayLROptions(ScheduleOptions):
    """Arguments of WarmupDecayLR."""

    total_num_steps: Count
    warmup_min_lr: _Rates = 0.0
    warmup_max_lr: _Rates | None = None
    warmup_num_steps: _Steps = 1000
    warmup_type: Literal["log", "linear"] = "log"

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        _check_total(self.total_num_steps, self.warmup_num_steps)
        return self


class WarmupCosineLROptions(ScheduleOptions):
    """Arguments of WarmupCosineLR."""

    total_num_steps: Count
    warmup_min_ratio: _Unit = 0.0
    warmup_num_steps: _Steps = 1000
    cos_min_ratio: _Unit = 1e-4
    warmup_type: Literal["log", "linear"] = "log"

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        _check_total(self.total_num_steps, self.warmup_num_steps)
        return self


class StepLROptions(ScheduleOptions):
    """Arguments of StepLR."""

    step_size: Count
    gamma: float = 0.1


class MultiStepLROptions(ScheduleOptions):
    """Arguments of MultiStepLR."""

    milestones: list[WholeNumber]
    gamma: float = 0.1


class ConstantLROptions(ScheduleOptions):
    """Arguments of ConstantLR."""

    factor: _Unit = 1 / 3
    total_iters: WholeNumber = 5


class LinearLROptions(ScheduleOptions):
    """Arguments of LinearLR."""

    start_factor: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    end_factor: _Unit = 1.0
    total_iters: WholeNumber = 5


class ExponentialLROptions(ScheduleOptions):
    """Arguments of ExponentialLR."""

    gamma: float


class PolynomialLROptions(ScheduleOptions):
    """Arguments of PolynomialLR."""

    total_iters: WholeNumber = 5
    power: float = 1.0


class CosineAnnealingLROptions(ScheduleOptions):
    """Arguments of CosineAnnealingLR."""

    T_max: Count
    eta_min: float = 0.0


class CyclicLROptions(ScheduleOptions):
    """Arguments of CyclicLR."""

    base_lr: _Numbers
    max_lr: _Numbers
    step_size_up: Count = 2000
    step_size_down: Count | None = None
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    gamma: float = 1.0
    scale_fn: Literal[None] = only(None, "it is a function; pass a schedule of your own to thinwire.initialize")
    scale_mode: Literal["cycle", "iterations"] = "cycle"
    cycle_momentum: bool = True
    base_momentum: float = 0.8
    max_momentum: float = 0.9


class CosineAnnealingWarmRestartsOptions(ScheduleOptions):
    """Arguments of CosineAnnealingWarmRestarts."""

    T_0: Count
    T_mult: Count = 1
    eta_min: float = 0.0


class OneCycleLROptions(ScheduleOptions):
    """Arguments of OneCycleLR."""

    max_lr: _Numbers
    total_steps: Count | None = None
    epochs: Count | None = None
    steps_per_epoch: Count | None = None
    pct_start: _Unit = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    cycle_momentum: bool = True
    base_momentum: _Numbers = 0.85
    max_momentum: _Numbers = 0.95
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    @model_validator(mode="after")
    def _length(self) -> Self:
        if self.total_steps is None and (self.epochs is None or self.steps_per_epoch is None):
            raise ValueError("You must define either total_steps OR both epochs and steps_per_epoch")
        return self


SCHEDULES: Mapping[str, type[ScheduleOptions]] = {
    "LRRangeTest": LRRangeTestOptions,
    "OneCycle": OneCycleOptions,
    "WarmupLR": WarmupLROptions,
    "WarmupDecayLR": WarmupDecayLROptions,
    "WarmupCosineLR": WarmupCosineLROptions,
    "StepLR": StepLROptions,
    "MultiStepLR": MultiStepLROptions,
    "ConstantLR": ConstantLROptions,
    "LinearLR": LinearLROptions,
    "ExponentialLR": ExponentialLROptions,
    "PolynomialLR": PolynomialLROptions,
    "CosineAnnealingLR": CosineAnnealingLROptions,
    "CyclicLR": CyclicLROptions,
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsOptions,
    "OneCycleLR": OneCycleLROptions,
}
"""Ours, and those of torch.optim.lr_scheduler that a file can describe."""
