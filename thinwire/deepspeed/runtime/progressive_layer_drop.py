"""deepspeed.runtime.progressive_layer_drop."""

from __future__ import annotations

from thinwire.pld import ProgressiveLayerDrop

__all__ = ["ProgressiveLayerDrop"]
