"""deepspeed.ops.adam: Adam on any device. torch's is fused, on GPU and CPU, and is what steps."""

from __future__ import annotations

from thinwire.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from thinwire.deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
