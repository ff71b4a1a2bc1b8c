"""deepspeed.monitor.comet."""

from __future__ import annotations

from thinwire.engine.monitoring.section_monitors import CometMonitor

__all__ = ["CometMonitor"]
