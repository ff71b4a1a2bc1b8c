"""deepspeed.runtime.fp16.unfused_optimizer: what the engine steps in 16 bits."""

from __future__ import annotations

from thinwire.zero import ShardedOptimizer as FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
