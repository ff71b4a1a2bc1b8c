"""deepspeed.ops.adagrad: torch's Adagrad."""

from __future__ import annotations

from torch.optim import Adagrad as DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
