"""deepspeed.ops.transformer, which thinwire has no counterpart of."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]

_INSTEAD = "torch.nn.functional.scaled_dot_product_attention and torch.compile are as fast; use the model's own layers"

DeepSpeedTransformerLayer = not_offered("ops.transformer.DeepSpeedTransformerLayer", _INSTEAD)
DeepSpeedTransformerConfig = not_offered("ops.transformer.DeepSpeedTransformerConfig", _INSTEAD)
