"""Learning-rate schedules by name: built, and their state as a checkpoint's JSON keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from thinwire.engine.schedules.cycle import LRRangeTest, OneCycle
from thinwire.engine.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "build_schedule",
    "load_schedule_state",
    "schedule_names",
    "schedule_state",
    "why_refused",
]

_OWN = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)

# What a configuration cannot write down, or the engine cannot step.
_REFUSED = {
    "ChainedScheduler": "it is made of other schedules",
    "LambdaLR": "it takes a function",
    "MultiplicativeLR": "it takes a function",
    "ReduceLROnPlateau": "its step() needs a metric, and the engine steps the schedule without one",
    "SequentialLR": "it is made of other schedules",
}


def schedule_names() -> dict[str, type[LRScheduler]]:
    """Every schedule that a configuration can name."""
    classes: dict[str, type[LRScheduler]] = {schedule.__name__: schedule for schedule in _OWN}
    for name, found in vars(torch.optim.lr_scheduler).items():
        is_schedule = isinstance(found, type) and issubclass(found, LRScheduler) and found is not LRScheduler
        if is_schedule and not name.startswith("_") and name not in _REFUSED:
            classes.setdefault(name, found)
    return classes


def why_refused(name: str) -> str | None:
    """Why torch's schedule `name` cannot be named in a configuration; None for every other name."""
    return _REFUSED.get(name)


def build_schedule(name: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The schedule of that name, one of `schedule_names`, which sets `optimizer`'s rates for step 0.

    Raises ValueError where it does not fit the optimizer: a list of rates for another number of groups, say.
    """
    build: Any = schedule_names()[name]
    schedule: LRScheduler = build(optimizer, **params)
    return schedule


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
