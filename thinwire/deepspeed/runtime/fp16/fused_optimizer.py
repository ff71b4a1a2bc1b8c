"""deepspeed.runtime.fp16.fused_optimizer: what the engine steps in fp16."""

from __future__ import annotations

from thinwire.zero import ShardedOptimizer as FP16_Optimizer

__all__ = ["FP16_Optimizer"]
