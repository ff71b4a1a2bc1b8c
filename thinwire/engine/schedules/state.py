"""What of a schedule's state a checkpoint's JSON can hold, and how a schedule goes on from it."""

from __future__ import annotations

import json
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["load_schedule_state", "schedule_state"]


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """The part of `schedule.state_dict()` that JSON keeps as it is; the rest follows from how it was built."""
    return {name: value for name, value in schedule.state_dict().items() if _survives_json(value)}


def load_schedule_state(schedule: LRScheduler, state: dict[str, Any]) -> None:
    """Continue from `schedule_state`, the optimizer's rates included: some of torch's schedules start from those."""
    schedule.load_state_dict(dict(state))
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
