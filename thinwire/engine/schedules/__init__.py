"""Learning-rate schedules by name: five by closed forms, and torch's own."""

from __future__ import annotations

from thinwire.engine.schedules.building import (
    build_schedule,
    load_schedule_state,
    schedule_names,
    schedule_state,
    why_refused,
)
from thinwire.engine.schedules.cycle import LRRangeTest, OneCycle
from thinwire.engine.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_schedule",
    "load_schedule_state",
    "schedule_names",
    "schedule_state",
    "why_refused",
]
