"""deepspeed.ops.adam.cpu_adam."""

from __future__ import annotations

from thinwire.deepspeed.ops.adam.optimizers import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
