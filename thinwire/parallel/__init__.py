"""Floor 3, models that lie on several ranks: pipelines whose activations travel in packets, and tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = ["CompressedStage", "Eager1F1B", "Pipeline", "parallelize"]

if TYPE_CHECKING:
    from thinwire.parallel.compressed_stage import CompressedStage
    from thinwire.parallel.pipeline import Eager1F1B, Pipeline
    from thinwire.parallel.plans import parallelize
else:
    __getattr__, __dir__ = lazy_exports(__name__)
