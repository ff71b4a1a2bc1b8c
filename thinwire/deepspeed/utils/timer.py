"""deepspeed.utils.timer."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer"]

_INSTEAD = 'set "wall_clock_breakdown": true in the configuration, or use torch.profiler'

SynchronizedWallClockTimer = not_offered("utils.timer.SynchronizedWallClockTimer", _INSTEAD)
ThroughputTimer = not_offered("utils.timer.ThroughputTimer", _INSTEAD)
