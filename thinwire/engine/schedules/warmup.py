"""Schedules that raise the rate first, then hold it or let it fall, and what all closed forms share.

The rate is a function of the step alone, so that a resumed run continues on the same curve, also after its
configuration was changed. Steps are counted from -1, hence i = t - 1 in the formulas, and two steps at the lowest
rate begin.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["ClosedFormSchedule", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "for_each_group", "one_each", "require"]


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
        require(whole and batch_iteration >= -1, "batch_iteration", "a whole number of at least -1", batch_iteration)
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
        """Continue from `state_dict`, or a `last_batch_iteration` alone: the optimizer gets the rates of that step."""
        found = state_dict.get("last_epoch")
        self.last_epoch = state_dict["last_batch_iteration"] + 1 if found is None else found
        self._step_count = self.last_epoch + 1
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def one_each(optimizer: torch.optim.Optimizer, value: float | Sequence[float], name: str) -> list[float]:
    """`value` for every parameter group, at least 0; a list must hold one for each. ValueError names `name`."""
    rates = for_each_group(optimizer, value, name)
    require(all(one >= 0 for one in rates), name, "at least 0", value)
    return rates


def for_each_group(optimizer: torch.optim.Optimizer, value: float | Sequence[float], name: str) -> list[float]:
    """`value` for every parameter group; a list must hold one for each. ValueError names `name`."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * groups
    if len(values) != groups:
        raise ValueError(f"{name} must be one number, or one for each of the {groups} parameter groups, got {values}")
    return [float(one) for one in values]


def require(holds: bool, name: str, expected: str, given: Any) -> None:
    """Raise ValueError unless `holds`: `name` must be `expected`, got `given`."""
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {given}")


class WarmupLR(ClosedFormSchedule):
    """Raises the rate from `warmup_min_lr` to `warmup_max_lr` and holds it there.

    With i = t - 1 at step t, and W = `warmup_num_steps` (1 counts as 2; 0 is no warmup), the part of
    the way that is gone at i < W is log(i + 1) / log(W), or i / W where `warmup_type` is "linear"; 0 at step 0.

    `warmup_max_lr` None, or "auto" in a configuration, is each group's own rate. Another `warmup_type` counts as "log",
    with a warning; in a configuration it is an error.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
    ) -> None:
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.min_lrs = one_each(optimizer, warmup_min_lr, "warmup_min_lr")
        self._max_lrs: list[float] | None = None
        if warmup_max_lr is not None:
            self._max_lrs = one_each(optimizer, warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer)

    @property
    def max_lrs(self) -> list[float]:
        """Each group's rate once it is warm."""
        return [float(base) for base in self.base_lrs] if self._max_lrs is None else self._max_lrs

    @property
    def warmup_type(self) -> str:
        """How the rate rises, "log" or "linear"."""
        return self.warmup.kind

    @property
    def warmup_num_steps(self) -> int:
        """Steps of the warmup."""
        return self.warmup.steps

    def rates(self, step: int) -> list[float]:
        """min_lr + (max_lr - min_lr) · the part of the way that is gone."""
        part = self._part(step)
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _part(self, step: int) -> float:
        return 1.0 if self.warmup.over(step) else self.warmup.part(step)


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
        self.total = _total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _part(self, step: int) -> float:
        if not self.warmup.over(step):
            return self.warmup.part(step)
        return max(0.0, (self.total - max(0, step - 1)) / max(1, self.total - self.warmup.steps))


class WarmupCosineLR(ClosedFormSchedule):
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
        require(0 <= warmup_min_ratio <= 1, "warmup_min_ratio", "from 0 to 1", warmup_min_ratio)
        require(0 <= cos_min_ratio <= 1, "cos_min_ratio", "from 0 to 1", cos_min_ratio)
        self.total = _total(total_num_steps, warmup_num_steps)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer)

    @property
    def warmup_type(self) -> str:
        """How the rate rises, "log" or "linear"."""
        return self.warmup.kind

    @property
    def warmup_num_steps(self) -> int:
        """Steps of the warmup."""
        return self.warmup.steps

    def get_lr_ratio(self) -> float:
        """The present rate, as a part of the group's own."""
        return self.ratio(self.last_epoch)

    def rates(self, step: int) -> list[float]:
        """Each group's own rate times `ratio(step)`."""
        return [float(base) * self.ratio(step) for base in self.base_lrs]

    def ratio(self, step: int) -> float:
        """The rate at `step`, as a part of the group's own."""
        if not self.warmup.over(step):
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.warmup.part(step)
        progress = (step - self.warmup.steps) / max(1, self.total - self.warmup.steps)
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


class _Warmup:
    """The way from the lowest rate to the highest, shared by the warmup schedules."""

    def __init__(self, num_steps: int, kind: str) -> None:
        _check_steps(num_steps)
        if kind not in ("log", "linear"):
            warnings.warn(
                f"warmup_type must be 'log' or 'linear', got {kind!r}: the rate rises as with 'log'",
                RuntimeWarning,
                stacklevel=4,
            )
            kind = "log"
        # log(1) is 0: a warmup takes at least 2 steps.
        self.steps = max(2, num_steps) if num_steps else 0
        self.kind = kind

    def over(self, step: int) -> bool:
        """Whether the highest rate is reached at `step`."""
        return step - 1 >= self.steps if self.steps else True

    def part(self, step: int) -> float:
        """The part of the way that is gone at `step`, before the warmup is over."""
        since = max(0, step - 1)
        return since / self.steps if self.kind == "linear" else math.log(since + 1) / math.log(self.steps)


def _check_steps(warmup_num_steps: object) -> None:
    whole = isinstance(warmup_num_steps, int) and warmup_num_steps >= 0
    require(whole, "warmup_num_steps", "a whole number of at least 0", warmup_num_steps)


def _total(total_num_steps: int, warmup_num_steps: int) -> int:
    _check_steps(warmup_num_steps)
    require(total_num_steps >= 1, "total_num_steps", "at least 1", total_num_steps)
    require(
        total_num_steps >= warmup_num_steps,
        "total_num_steps",
        f"at least warmup_num_steps {warmup_num_steps}",
        total_num_steps,
    )
    return total_num_steps
