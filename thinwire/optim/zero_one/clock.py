"""How far a run of 0/1 Adam has come: what every bucket needs to know before a step, and a checkpoint afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thinwire.optim.formulas import AdamSettings
from thinwire.optim.local_progress import LocalProgress
from thinwire.optim.zero_one.schedule import StepKind, ZeroOneSchedule

__all__ = ["GroupSettings", "ZeroOneClock"]


@dataclass
class ZeroOneClock:
    """Where a run is, the same on every rank.

    `steps`: updates applied. `variance_updates`: those of them that updated v. `frozen_at`: the step after which v was
    frozen; None before. `progress`: how far local steps have carried the ranks since they last met.
    """

    schedule: ZeroOneSchedule
    steps: int = 0
    variance_updates: int = 0
    frozen_at: int | None = None
    progress: LocalProgress = field(default_factory=LocalProgress)

    @property
    def next_kind(self) -> StepKind:
        """What the next step sends."""
        return self.schedule.kind(self.steps + 1, self.variance_updates, self.frozen_at)

    @property
    def in_sync(self) -> bool:
        """Whether every rank holds the same weights."""
        return not self.progress

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "steps": self.steps,
            "variance_updates": self.variance_updates,
            "frozen_at": self.frozen_at,
            "progress": {str(group): distance for group, distance in self.progress.state().items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.steps = state["steps"]
        self.variance_updates = state["variance_updates"]
        self.frozen_at = state["frozen_at"]
        self.progress.load(state["progress"])

    def reset(self) -> None:
        """Begin anew."""
        self.steps = self.variance_updates = 0
        self.frozen_at = None
        self.progress.reset()


class GroupSettings:
    """The present hyperparameters of a parameter, by its number."""

    def __init__(self, groups: Sequence[dict[str, Any]], group_of: Sequence[int]) -> None:
        self._groups = groups
        self._group_of = group_of

    def number(self, parameter: int) -> int:
        """Which parameter group it is in."""
        return self._group_of[parameter]

    def of(self, parameter: int) -> AdamSettings:
        """Its group's settings."""
        return self.of_group(self._group_of[parameter])

    def of_group(self, number: int) -> AdamSettings:
        """The settings of a parameter group."""
        return AdamSettings.of_group({"bias_correction": True, "eps_inside_sqrt": False, **self._groups[number]})

    def mask(self, parameter: int) -> Tensor | None:
        """Its group's `exp_avg_mask`, if there is one."""
        mask: Tensor | None = self._groups[self._group_of[parameter]].get("exp_avg_mask")
        return mask
