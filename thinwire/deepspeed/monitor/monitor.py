"""deepspeed.monitor.monitor."""

from __future__ import annotations

from thinwire.engine import Monitor
from thinwire.engine.monitoring.section_monitors import CometMonitor, MonitorMaster, TensorBoardMonitor, WandbMonitor
from thinwire.engine.monitoring.section_monitors import CsvMonitor as csvMonitor

__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
