"""What the closed-form schedules share: the rate is a function of the step alone, so that a resumed run continues on
the same curve, also after its configuration was changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["ClosedFormSchedule", "for_each_group", "one_each", "require"]


class ClosedFormSchedule(LRScheduler):
    """A schedule whose rates at step t follow from t and the groups' first rates, `base_lrs`.

    Step t counts from 0: building the schedule sets the rates of step 0, and `step()` moves on to the next.
    `last_batch_iteration`: DeepSpeed's count, t - 1, from -1.
    """

    @property
    def last_batch_iteration(self) -> int:
        """The batch that was trained last, counted from 0; -1 before the first."""
        return self.last_epoch - 1

    def step(self, batch_iteration: int | None = None) -> None:
        """Move on to the next step; or, as in DeepSpeed, to the one after the batch `batch_iteration`, which counts
        from 0. Raises ValueError for what is no whole number of at least -1."""
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
        """Continue from `state_dict`, DeepSpeed's `last_batch_iteration` included: the optimizer gets the rates of that
        step."""
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
