"""What of a schedule's state a checkpoint's JSON can hold, and how a schedule goes on from it."""

from __future__ import annotations

import json
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["load_schedule_state", "schedule_state"]


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """The part of `schedule.state_dict()` that JSON keeps as it is; the rest follows from how it was built."""
    kept: dict[str, Any] = _kept(schedule.state_dict())
    return kept


def load_schedule_state(schedule: LRScheduler, state: dict[str, Any]) -> None:
    """Continue from `schedule_state`, the optimizer's rates included: some of torch's schedules start from those.

    What `state` lacks stays as it is; with nothing in it, only the optimizer's rates are the schedule's again.
    """
    schedule.load_state_dict({**schedule.state_dict(), **state})
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def _kept(value: Any) -> Any:
    """`value` without the entries of dicts, however deep, that JSON would change."""
    if isinstance(value, dict):
        return {name: _kept(one) for name, one in value.items() if isinstance(name, str) and _holds_something(one)}
    return [_kept(one) for one in value] if isinstance(value, list) else value


def _holds_something(value: Any) -> bool:
    """Whether JSON keeps `value`, or entries of the dicts in it."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value)
    if isinstance(value, list):
        return all(_holds_something(one) for one in value)
    return _survives_json(value)


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
