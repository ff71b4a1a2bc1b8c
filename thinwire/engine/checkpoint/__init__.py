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
    "convert_zero_checkpoint_to_fp32_state_dict",
    "export_weights",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

# `thinwire checkpoint --help` needs no torch.
if TYPE_CHECKING:
    from thinwire.engine.checkpoint.errors import CheckpointError
    from thinwire.engine.checkpoint.exporting import export_weights
    from thinwire.engine.checkpoint.fp32_weights import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )
    from thinwire.engine.checkpoint.reading import LoadedCheckpoint
    from thinwire.engine.checkpoint.snapshot import ModelDescription, Snapshot
    from thinwire.engine.checkpoint.store import CheckpointStore
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "errors": ("CheckpointError",),
            "exporting": ("export_weights",),
            "fp32_weights": (
                "convert_zero_checkpoint_to_fp32_state_dict",
                "get_fp32_state_dict_from_zero_checkpoint",
                "load_state_dict_from_zero_checkpoint",
            ),
            "reading": ("LoadedCheckpoint",),
            "snapshot": ("ModelDescription", "Snapshot"),
            "store": ("CheckpointStore",),
        },
    )
