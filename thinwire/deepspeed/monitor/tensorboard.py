"""deepspeed.monitor.tensorboard."""

from __future__ import annotations

from thinwire.engine.monitoring.section_monitors import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
