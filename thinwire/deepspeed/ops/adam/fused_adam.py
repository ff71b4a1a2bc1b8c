"""deepspeed.ops.adam.fused_adam."""

from __future__ import annotations

from thinwire.deepspeed.ops.adam.optimizers import FusedAdam

__all__ = ["FusedAdam"]
