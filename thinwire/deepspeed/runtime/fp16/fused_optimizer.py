"""deepspeed.runtime.fp16.fused_optimizer, whose place the engine's own optimizer takes."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["FP16_Optimizer"]

FP16_Optimizer = not_offered(
    "runtime.fp16.fused_optimizer.FP16_Optimizer",
    'precision is the engine\'s: "fp16" and "bf16" in the configuration; its optimizer is a thinwire.ShardedOptimizer',
)
