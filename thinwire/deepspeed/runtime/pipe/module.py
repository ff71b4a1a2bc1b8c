"""deepspeed.runtime.pipe.module, which thinwire has no counterpart of."""

from __future__ import annotations

from thinwire.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
