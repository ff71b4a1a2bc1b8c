"""Checkpoints that survive a kill at any moment: safetensors files with a manifest of checksums, published whole,
verified before use, and read by any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "LoadedCheckpoint",
    "ModelDescription",
    "Snapshot",
    "export_weights",
]

# `thinwire checkpoint --help` needs no torch.
if TYPE_CHECKING:
    from thinwire.engine.checkpoint.exporting import export_weights
    from thinwire.engine.checkpoint.files import CheckpointError
    from thinwire.engine.checkpoint.manifest import ModelDescription
    from thinwire.engine.checkpoint.reading import LoadedCheckpoint
    from thinwire.engine.checkpoint.store import CheckpointStore
    from thinwire.engine.checkpoint.writing import Snapshot
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "files": ("CheckpointError",),
            "exporting": ("export_weights",),
            "manifest": ("ModelDescription",),
            "reading": ("LoadedCheckpoint",),
            "store": ("CheckpointStore",),
            "writing": ("Snapshot",),
        },
    )
