"""Floor 3, models that lie on several ranks: stages of pipelines whose activations travel in packets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = ["CompressedStage"]

if TYPE_CHECKING:
    from thinwire.parallel.compressed_stage import CompressedStage
else:
    __getattr__, __dir__ = lazy_exports(__name__)
