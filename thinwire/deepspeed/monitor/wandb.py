"""deepspeed.monitor.wandb."""

from __future__ import annotations

from thinwire.engine.monitoring.section_monitors import WandbMonitor

__all__ = ["WandbMonitor"]
