"""Schedules that explore the rate: the range test, and the one cycle whose bounds it finds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.engine.schedules.warmup import ClosedFormSchedule, for_each_group, one_each, require

__all__ = ["LRRangeTest", "OneCycle"]

# A decaying cycle lets momentum grow without end; at 1 the optimizer would never forget.
_LARGEST_MOMENTUM = 0.9999


class LRRangeTest(ClosedFormSchedule):
    """Raises the rate without end, to see where training diverges (Smith 2018, arXiv 1803.09820):
    min_lr · (1 + step_rate · t / step_size), by whole intervals where `lr_range_test_staircase`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        require(lr_range_test_step_size >= 1, "lr_range_test_step_size", "at least 1 step", lr_range_test_step_size)
        require(lr_range_test_step_rate >= 0, "lr_range_test_step_rate", "at least 0", lr_range_test_step_rate)
        self.min_lrs = one_each(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def rates(self, step: int) -> list[float]:
        """min_lr · (1 + step_rate · intervals since step 0)."""
        intervals = step // self.step_size if self.staircase else step / self.step_size
        return [low * (1 + self.step_rate * intervals) for low in self.min_lrs]


class OneCycle(ClosedFormSchedule):
    """One cycle of the rate from `cycle_min_lr` to `cycle_max_lr` and back, then decay (Smith 2018, arXiv 1803.09820).
    Bounds of rates and momenta are one number for all parameter groups, or a list of one for each.

    The rate rises over `cycle_first_step_size` steps and falls over `cycle_second_step_size` (None: as many; 0: at
    once), in stairs where a stair count is above 0. Afterwards it is min_lr / (1 + decay_lr_rate · t' /
    decay_step_size), with t' the steps since the cycle. With `cycle_momentum`, the groups' β₁, or SGD's momentum, falls
    from `cycle_max_mom` to `cycle_min_mom` while the rate rises, and afterwards grows by `decay_mom_rate` in place of
    shrinking, at most to 0.9999; the very first step is taken with `cycle_min_mom`. β₂ stays as it is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_step_size, self.second_step_size = cycle_first_step_size, second_size
        self.first_stair_count, self.second_stair_count = cycle_first_stair_count, second_stairs
        self.min_lrs = one_each(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = one_each(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_momenta = for_each_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_momenta = for_each_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self.decay_step_size = decay_step_size
        self.decay_rates = (decay_lr_rate, decay_mom_rate)
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not all("betas" in group or "momentum" in group for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__} has neither betas nor momentum to cycle: pass cycle_momentum=False"
            )
        self._check_shape()
        self._check_ranges()
        super().__init__(optimizer)

    @property
    def step_ratio(self) -> float:
        """The rising half's part of the cycle."""
        return self.first_step_size / self._cycle

    def rates(self, step: int) -> list[float]:
        """The cycle's rate, of each group between its own bounds."""
        if step <= self._cycle:
            height = self._height(step)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        decay = 1 + self.decay_rates[0] * self._decay_intervals(step)
        return [low / decay for low in self.min_lrs]

    def momenta(self, step: int) -> list[float]:
        """Each group's β₁, or SGD's momentum, at `step`."""
        return [self._momentum(step, *bounds) for bounds in zip(self.min_momenta, self.max_momenta, strict=True)]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Each group's betas at the present step, of SGD (momentum,); None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        groups = self.optimizer.param_groups
        others = [tuple(group["betas"][1:]) if "betas" in group else () for group in groups]
        return [(momentum, *rest) for momentum, rest in zip(self.momenta(self.last_epoch), others, strict=True)]

    def get_lr(self) -> list[float | Tensor]:
        """The rate of every group at the present step; moves the groups' momentum there too."""
        if self.cycle_momentum:
            momenta = self.momenta(self.last_epoch) if self.last_epoch > 0 else self.min_momenta
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum
        return super().get_lr()

    @property
    def _cycle(self) -> int:
        """Its length in steps."""
        return self.first_step_size + self.second_step_size

    def _check_shape(self) -> None:
        require(self.first_step_size >= 1, "cycle_first_step_size", "at least 1 step", self.first_step_size)
        require(self.second_step_size >= 0, "cycle_second_step_size", "at least 0", self.second_step_size)
        for name, stairs in (("first", self.first_stair_count), ("second", self.second_stair_count)):
            require(stairs >= 0, f"cycle_{name}_stair_count", "at least 0", stairs)
        for name, rate in zip(("decay_lr_rate", "decay_mom_rate"), self.decay_rates, strict=True):
            require(rate >= 0, name, "at least 0", rate)
        least = 1 if any(self.decay_rates) else 0
        require(self.decay_step_size >= least, "decay_step_size", f"at least {least}", self.decay_step_size)

    def _check_ranges(self) -> None:
        for low, high in zip(self.min_lrs, self.max_lrs, strict=True):
            require(low <= high, "cycle_min_lr", f"from 0 to cycle_max_lr {high}", low)
        for low, high in zip(self.min_momenta, self.max_momenta, strict=True):
            require(0 <= high < 1, "cycle_max_mom", "from 0 up to, not including, 1", high)
            require(0 <= low <= high, "cycle_min_mom", f"from 0 to {high}", low)

    def _momentum(self, step: int, low: float, high: float) -> float:
        if step <= self._cycle:
            return high - (high - low) * self._height(step)
        return max(high, min(high * (1 + self.decay_rates[1] * self._decay_intervals(step)), _LARGEST_MOMENTUM))

    def _height(self, step: int) -> float:
        """0 at both ends of the cycle, 1 at its top."""
        rising = step <= self.first_step_size
        size, stairs, climbed = (
            (self.first_step_size, self.first_stair_count, step)
            if rising
            else (self.second_step_size, self.second_stair_count, self._cycle - step)
        )
        return climbed * stairs // size / stairs if stairs else climbed / size

    def _decay_intervals(self, step: int) -> float:
        return (step - self._cycle) / self.decay_step_size if self.decay_step_size else 0.0
