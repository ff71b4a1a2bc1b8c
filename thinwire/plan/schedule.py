"""How often which kind of step comes in a run: warmups, and 0/1 Adam's growing intervals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from thinwire.plan.errors import PlanError, require_whole
from thinwire.plan.outer_schedule import OuterSchedule

__all__ = ["Schedule", "ZeroOneSteps"]


@dataclass(frozen=True)
class ZeroOneSteps:
    """Steps of one run of 0/1 Adam: `exact` averages of gradients, 1-bit averages of `gradients` in between, then 1-bit
    averages of `updates`, and `local` steps that send nothing."""

    exact: int
    gradients: int
    updates: int
    local: int


@dataclass(frozen=True)
class Schedule:
    """A run of `steps`.

    Args:
        steps: of the run.
        warmup: part of the steps before 1-bit Adam freezes, from 0 to 1.
        warmup_wire: what is sent while gradients are averaged exactly.
        powersgd_start: steps that PowerSGD averages exactly first.
        var_freeze_step: the step after which 0/1 Adam makes local steps; None: `warmup` of all.
        var_update_scaler: updates of the variance after which their interval doubles.
        local_step_scaler: steps after which the interval between exchanges of updates doubles.
        local_step_clipper: the longest such interval.
        resync_interval: steps between gathers of sharded 1-bit Adam's weights.
        bucket_bytes: gradients that leave together, in thinwire's optimizers, by default as theirs; DDP has 25 MiB.
        outer: DiLoCo's outer steps.
    """

    steps: int = 100_000
    warmup: float = 0.15
    warmup_wire: Literal["fp32", "bf16"] = "fp32"
    powersgd_start: int = 10
    var_freeze_step: int | None = None
    var_update_scaler: int = 16
    local_step_scaler: int = 32678
    local_step_clipper: int = 16
    resync_interval: int = 100
    bucket_bytes: int | None = None
    outer: OuterSchedule = field(default_factory=OuterSchedule)

    def __post_init__(self) -> None:
        scalers = ("var_update_scaler", "local_step_scaler", "local_step_clipper")
        for name in ("steps", *scalers, "resync_interval"):
            require_whole(name, getattr(self, name))
        if self.bucket_bytes is not None:
            require_whole("bucket_bytes", self.bucket_bytes)
        if not 0 <= self.warmup <= 1:
            raise PlanError(f"warmup is the part of the steps before the freeze, from 0 to 1, got {self.warmup!r}")
        if self.warmup_wire not in ("fp32", "bf16"):
            raise PlanError(f"warmup_wire must be 'fp32' or 'bf16', got {self.warmup_wire!r}")
        for name in ("powersgd_start", "var_freeze_step"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise PlanError(f"{name} must be a whole number of steps, at least 0, got {value!r}")

    @property
    def freeze_step(self) -> int:
        """The last step of the warmup."""
        return self.var_freeze_step if self.var_freeze_step is not None else round(self.warmup * self.steps)

    def zero_one_steps(self) -> ZeroOneSteps:
        """Count the steps of 0/1 Adam (Lu et al. 2022, arXiv 2202.06009, §4) by kind, without walking the run."""
        first_phase = min(self.freeze_step, self.steps)
        exact = self._variance_updates(first_phase)
        updates = self._synchronisations(first_phase)
        return ZeroOneSteps(exact, first_phase - exact, updates, self.steps - first_phase - updates)

    def _variance_updates(self, steps: int) -> int:
        """Of steps 1 to `steps`: those divisible by an interval that doubles every `var_update_scaler` updates."""
        updates, reached, interval = 0, 0, 1
        while (reached // interval + 1) * interval <= steps:
            first = (reached // interval + 1) * interval
            here = min(self.var_update_scaler, (steps - first) // interval + 1)
            updates += here
            reached = first + (here - 1) * interval
            interval *= 2
        return updates

    def _synchronisations(self, frozen_at: int) -> int:
        """Of the steps after `frozen_at`: those divisible by an interval that doubles every `local_step_scaler` steps,
        up to `local_step_clipper`."""
        synchronised, reached, interval = 0, frozen_at, 1
        while reached < self.steps:
            grows = interval < self.local_step_clipper
            end = min(self.steps, reached + self.local_step_scaler) if grows else self.steps
            synchronised += end // interval - reached // interval
            reached = end
            interval = min(2 * interval, self.local_step_clipper)
        return synchronised
