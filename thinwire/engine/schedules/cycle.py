"""Schedules that explore the rate: the range test, and the one cycle whose bounds it finds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.engine.schedules.closed_form import ClosedFormSchedule, one_each, require

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
    Both are one rate for all parameter groups, or a list of one for each.

    The rate rises over `cycle_first_step_size` steps and falls over `cycle_second_step_size` (None: as many), in
    stairs where a stair count is above 0. Afterwards it is min_lr / (1 + decay_lr_rate · t' / decay_step_size), with
    t' the steps since the cycle. With `cycle_momentum`, the groups' β₁, or SGD's momentum, falls from `cycle_max_mom`
    to `cycle_min_mom` while the rate rises, and afterwards grows by `decay_mom_rate` in place of shrinking, at most to
    0.9999. β₂ stays as it is, where DeepSpeed sets it to 0.99.
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
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.sizes = (cycle_first_step_size, second_size)
        self.stairs = (cycle_first_stair_count, second_stairs)
        lows = one_each(optimizer, cycle_min_lr, "cycle_min_lr")
        self.lr_ranges = list(zip(lows, one_each(optimizer, cycle_max_lr, "cycle_max_lr"), strict=True))
        self.momentum_range = (cycle_min_mom, cycle_max_mom)
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

    def rates(self, step: int) -> list[float]:
        """The cycle's rate, of each group between its own bounds."""
        if step <= sum(self.sizes):
            height = self._height(step)
            return [low + (high - low) * height for low, high in self.lr_ranges]
        decay = 1 + self.decay_rates[0] * self._decay_intervals(step)
        return [low / decay for low, _ in self.lr_ranges]

    def momentum(self, step: int) -> float:
        """β₁, or SGD's momentum, at `step`."""
        low, high = self.momentum_range
        if step <= sum(self.sizes):
            return high - (high - low) * self._height(step)
        return max(high, min(high * (1 + self.decay_rates[1] * self._decay_intervals(step)), _LARGEST_MOMENTUM))

    def get_lr(self) -> list[float | Tensor]:
        """The rate of every group at the present step; moves the groups' momentum there too."""
        if self.cycle_momentum:
            momentum = self.momentum(self.last_epoch)
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum
        return super().get_lr()

    def _check_shape(self) -> None:
        for name, size, stairs in zip(("first", "second"), self.sizes, self.stairs, strict=True):
            require(size >= 1, f"cycle_{name}_step_size", "at least 1 step", size)
            require(stairs >= 0, f"cycle_{name}_stair_count", "at least 0", stairs)
        for name, rate in zip(("decay_lr_rate", "decay_mom_rate"), self.decay_rates, strict=True):
            require(rate >= 0, name, "at least 0", rate)
        least = 1 if any(self.decay_rates) else 0
        require(self.decay_step_size >= least, "decay_step_size", f"at least {least}", self.decay_step_size)

    def _check_ranges(self) -> None:
        low_momentum, high_momentum = self.momentum_range
        for low, high in self.lr_ranges:
            require(low <= high, "cycle_min_lr", f"from 0 to cycle_max_lr {high}", low)
        require(0 <= high_momentum < 1, "cycle_max_mom", "from 0 up to, not including, 1", high_momentum)
        require(0 <= low_momentum <= high_momentum, "cycle_min_mom", f"from 0 to {high_momentum}", low_momentum)

    def _height(self, step: int) -> float:
        """0 at both ends of the cycle, 1 at its top."""
        first, second = self.sizes
        side = 0 if step <= first else 1
        climbed = step if side == 0 else first + second - step
        if stairs := self.stairs[side]:
            return climbed * stairs // self.sizes[side] / stairs
        return climbed / self.sizes[side]

    def _decay_intervals(self, step: int) -> float:
        return (step - sum(self.sizes)) / self.decay_step_size if self.decay_step_size else 0.0
