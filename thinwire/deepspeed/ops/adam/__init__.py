"""deepspeed.ops.adam: Adam on any device. torch's is fused, on GPU and CPU, and is what steps."""

from __future__ import annotations

from thinwire.deepspeed.ops.adam.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
