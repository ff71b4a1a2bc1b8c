"""deepspeed.runtime.zero.tiling, which thinwire has no counterpart of."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["TiledLinear", "TiledLinearReturnBias"]

_INSTEAD = "use torch.nn.Linear; stage 3 gathers one layer at a time, and offload_param keeps the others in host memory"

TiledLinear = not_offered("zero.TiledLinear", _INSTEAD)
TiledLinearReturnBias = not_offered("zero.TiledLinearReturnBias", _INSTEAD)
