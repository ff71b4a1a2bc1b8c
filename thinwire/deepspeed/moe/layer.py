"""deepspeed.moe.layer, which thinwire has no counterpart of."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["MoE"]

MoE = not_offered("moe.layer.MoE", "it has no expert parallelism; use a mixture of experts of the model's own library")
