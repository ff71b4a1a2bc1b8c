"""deepspeed.monitor.csv_monitor."""

from __future__ import annotations

from thinwire.engine.monitoring.section_monitors import CsvMonitor as csvMonitor

__all__ = ["csvMonitor"]
