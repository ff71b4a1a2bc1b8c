"""deepspeed.monitor.monitor."""

from __future__ import annotations

from thinwire.engine import Monitor
from thinwire.engine import Monitor as MonitorMaster

__all__ = ["Monitor", "MonitorMaster"]
