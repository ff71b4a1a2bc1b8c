"""deepspeed.pipe, which thinwire has no counterpart of."""

from __future__ import annotations

from thinwire.deepspeed.lazy_names import not_offered

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

_INSTEAD = "it has no pipeline parallelism; shard the model with zero_optimization stage 3"

PipelineModule = not_offered("pipe.PipelineModule", _INSTEAD)
LayerSpec = not_offered("pipe.LayerSpec", _INSTEAD)
TiedLayerSpec = not_offered("pipe.TiedLayerSpec", _INSTEAD)
