"""deepspeed.runtime.bf16_optimizer: what the engine steps in bf16."""

from __future__ import annotations

from thinwire.zero import ShardedOptimizer as BF16_Optimizer

__all__ = ["BF16_Optimizer"]
