"""Builds the schedule that a configuration names: one of DeepSpeed's five, or torch's own but for those that a file
cannot describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from thinwire.engine.schedules.cycle import LRRangeTest, OneCycle
from thinwire.engine.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "build_schedule",
    "schedule_names",
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
