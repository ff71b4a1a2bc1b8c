"""deepspeed.runtime.fp16.unfused_optimizer, whose place the engine's own optimizer takes."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["FP16_UnfusedOptimizer"]

FP16_UnfusedOptimizer = not_offered(
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
    'precision is the engine\'s: "fp16" and "bf16" in the configuration; its optimizer is a thinwire.ShardedOptimizer',
)
