"""Learning-rate schedules by name: five by closed forms, and torch's own.

The rate of a closed form depends on the step alone, so that a resumed run continues on the curve. Steps are counted
from -1, hence i = t - 1 in the formulas, and two steps at the lowest rate begin.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

# A decaying cycle lets momentum grow without end; at 1 the optimizer would never forget.
_LARGEST_MOMENTUM = 0.9999

WHY_REFUSED = {
    "ChainedScheduler": "it is made of other schedules",
    "LambdaLR": "it takes a function",
    "MultiplicativeLR": "it takes a function",
    "ReduceLROnPlateau": "its step() needs a metric, and the engine steps the schedule without one",
    "SequentialLR": "it is made of other schedules",
}
"""Schedules of torch that a configuration cannot write down, or the engine cannot step."""


class ClosedFormSchedule(LRScheduler):
    """A schedule whose rates at step t follow from t and the groups' first rates, `base_lrs`.

    Step t counts from 0: building the schedule sets the rates of step 0, and `step()` moves on to the next.
    `last_batch_iteration`: t - 1, from -1.
    """

    @property
    def last_batch_iteration(self) -> int:
        """The batch that was trained last, counted from 0; -1 before the first."""
        return self.last_epoch - 1

    def step(self, batch_iteration: int | None = None) -> None:
        """Move on to the next step; or to the one after the batch `batch_iteration`, which counts from 0.

        Raises ValueError for what is no whole number of at least -1.
        """
        if batch_iteration is None:
            super().step()
            return
        whole = isinstance(batch_iteration, int) and not isinstance(batch_iteration, bool)
        _require(whole and batch_iteration >= -1, "batch_iteration", "a whole number of at least -1", batch_iteration)
        self.load_state_dict({"last_epoch": batch_iteration + 1})

    @abstractmethod
    def rates(self, step: int) -> list[float]:
        """The rate of every parameter group at `step`, counted from 0."""

    def get_lr(self) -> list[float | Tensor]:
        """The rate of every parameter group at the present step, `last_epoch`."""
        return [*self.rates(self.last_epoch)]

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken: all that does not follow from how the schedule was built."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, or a `last_batch_iteration` alone: the optimizer gets the rates of that step.

        Raises ValueError for what has no such step.
        """
        given = state_dict if isinstance(state_dict, Mapping) else {}
        name, least = ("last_epoch", 0) if given.get("last_epoch") is not None else ("last_batch_iteration", -1)
        found = given.get(name)
        whole = isinstance(found, int) and not isinstance(found, bool) and found >= least
        _require(whole, f"{name} of a schedule's state", f"a whole number of at least {least}", found)
        assert isinstance(found, int)
        self.last_epoch = found - least
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class _Warmup:
    """The way from the lowest rate to the highest: its length in steps, and its shape, "log" or "linear"."""

    def _set_warmup(self, num_steps: int, kind: str, total: int | None = None) -> None:
        whole = isinstance(num_steps, int) and num_steps >= 0
        _require(whole, "warmup_num_steps", "a whole number of at least 0", num_steps)
        if total is not None:
            _require(total >= 1, "total_num_steps", "at least 1", total)
            _require(total >= num_steps, "total_num_steps", f"at least warmup_num_steps {num_steps}", total)
        if kind not in ("log", "linear"):
            warnings.warn(
                f"warmup_type must be 'log' or 'linear', got {kind!r}: the rate rises as with 'log'",
                RuntimeWarning,
                stacklevel=4,
            )
            kind = "log"
        # log(1) is 0: a warmup takes at least 2 steps.
        self.warmup_num_steps = max(2, num_steps) if num_steps else 0
        self.warmup_type = kind

    def _is_warm(self, step: int) -> bool:
        return step - 1 >= self.warmup_num_steps if self.warmup_num_steps else True

    def _warmth(self, step: int) -> float:
        """The part of the way that is gone at `step`, before the warmup is over."""
        since, steps = max(0, step - 1), self.warmup_num_steps
        return since / steps if self.warmup_type == "linear" else math.log(since + 1) / math.log(steps)


class WarmupLR(_Warmup, ClosedFormSchedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr` and holds it there.

    With i = t - 1 at step t, and W = `warmup_num_steps` (1 counts as 2; 0 is no warmup), the part of
    the way that is gone at i < W is log(i + 1) / log(W), or i / W where `warmup_type` is "linear"; 0 at step 0.

    `warmup_max_lr` None, or "auto" in a configuration, is each group's own rate. Another `warmup_type` counts as "log",
    with a warning; in a configuration it is an error.
    """

    _total: int | None = None  # of one that ends

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
    ) -> None:
        self._set_warmup(warmup_num_steps, warmup_type, self._total)
        self.min_lrs = _for_each_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self._max_lrs = None if warmup_max_lr is None else _for_each_group(optimizer, warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer)

    @property
    def max_lrs(self) -> list[float]:
        """Each group's rate once it is warm."""
        return [float(base) for base in self.base_lrs] if self._max_lrs is None else self._max_lrs

    def rates(self, step: int) -> list[float]:
        """min_lr + (max_lr - min_lr) · the part of the way that is gone."""
        part = self._part(step) if self._is_warm(step) else self._warmth(step)
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _part(self, step: int) -> float:
        """Once it is warm."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line towards `warmup_min_lr`: the part is (T - i) / (T - W), with T
    `total_num_steps`, and 0 from i = T on."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
    ) -> None:
        self._total = self.total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _part(self, step: int) -> float:
        return max(0.0, (self.total - max(0, step - 1)) / max(1, self.total - self.warmup_num_steps))


class WarmupCosineLR(_Warmup, ClosedFormSchedule):
    """Each group's own rate, times a ratio: from `warmup_min_ratio` to 1 as `WarmupLR` warms up, then half a cosine
    down to `cos_min_ratio`: c + (1 - c) · (1 + cos(π · min(1, (i - W + 1) / (T - W)))) / 2, T = `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: Literal["log", "linear"] = "log",
    ) -> None:
        _require(0 <= warmup_min_ratio <= 1, "warmup_min_ratio", "from 0 to 1", warmup_min_ratio)
        _require(0 <= cos_min_ratio <= 1, "cos_min_ratio", "from 0 to 1", cos_min_ratio)
        self._set_warmup(warmup_num_steps, warmup_type, total_num_steps)
        self.total = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer)

    def get_lr_ratio(self) -> float:
        """The present rate, as a part of the group's own."""
        return self.ratio(self.last_epoch)

    def rates(self, step: int) -> list[float]:
        """Each group's own rate times `ratio(step)`."""
        return [float(base) * self.ratio(step) for base in self.base_lrs]

    def ratio(self, step: int) -> float:
        """The rate at `step`, as a part of the group's own."""
        if not self._is_warm(step):
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._warmth(step)
        progress = (step - self.warmup_num_steps) / max(1, self.total - self.warmup_num_steps)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


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
        _require(lr_range_test_step_size >= 1, "lr_range_test_step_size", "at least 1 step", lr_range_test_step_size)
        _require(lr_range_test_step_rate >= 0, "lr_range_test_step_rate", "at least 0", lr_range_test_step_rate)
        self.min_lrs = _for_each_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
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
        self.min_lrs = _for_each_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _for_each_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_momenta = _for_each_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_momenta = _for_each_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self.decay_step_size = decay_step_size
        self.decay_rates = (decay_lr_rate, decay_mom_rate)
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not all("betas" in group or "momentum" in group for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__} has neither betas nor momentum to cycle: pass cycle_momentum=False"
            )
        self._check()
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
        bounds = zip(self.min_momenta, self.max_momenta, strict=True)
        if step <= self._cycle:
            return [high - (high - low) * self._height(step) for low, high in bounds]
        growth = 1 + self.decay_rates[1] * self._decay_intervals(step)
        return [max(high, min(high * growth, _LARGEST_MOMENTUM)) for _, high in bounds]

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

    def _check(self) -> None:
        _require(self.first_step_size >= 1, "cycle_first_step_size", "at least 1 step", self.first_step_size)
        not_negative = {
            "cycle_second_step_size": self.second_step_size,
            "cycle_first_stair_count": self.first_stair_count,
            "cycle_second_stair_count": self.second_stair_count,
            "decay_lr_rate": self.decay_rates[0],
            "decay_mom_rate": self.decay_rates[1],
        }
        for name, value in not_negative.items():
            _require(value >= 0, name, "at least 0", value)
        least = 1 if any(self.decay_rates) else 0
        _require(self.decay_step_size >= least, "decay_step_size", f"at least {least}", self.decay_step_size)
        for low, high in zip(self.min_lrs, self.max_lrs, strict=True):
            _require(low <= high, "cycle_min_lr", f"from 0 to cycle_max_lr {high}", low)
        for low, high in zip(self.min_momenta, self.max_momenta, strict=True):
            _require(high < 1, "cycle_max_mom", "from 0 up to, not including, 1", high)
            _require(low <= high, "cycle_min_mom", f"from 0 to {high}", low)

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


def _require(holds: bool, name: str, expected: str, given: Any) -> None:
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {given}")


def _for_each_group(optimizer: torch.optim.Optimizer, value: float | Sequence[float], name: str) -> list[float]:
    """`value`, at least 0, for every parameter group; a list must hold one for each."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * groups
    if len(values) != groups:
        raise ValueError(f"{name} must be one number, or one for each of the {groups} parameter groups, got {values}")
    _require(all(one >= 0 for one in values), name, "at least 0", value)
    return [float(one) for one in values]


def schedule_names() -> dict[str, type[LRScheduler]]:
    """Every schedule that a configuration can name."""
    own = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
    classes: dict[str, type[LRScheduler]] = {schedule.__name__: schedule for schedule in own}
    for name, found in vars(torch.optim.lr_scheduler).items():
        is_schedule = isinstance(found, type) and issubclass(found, LRScheduler) and found is not LRScheduler
        if is_schedule and not name.startswith("_") and name not in WHY_REFUSED:
            classes.setdefault(name, found)
    return classes


def build_schedule(name: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule of that name, one of `schedule_names`, which sets `optimizer`'s rates for step 0.

    Raises ValueError where it does not fit the optimizer: a list of rates for another number of groups, say.
    """
    build: Any = schedule_names()[name]
    schedule: LRScheduler = build(optimizer, **params)
    return schedule
