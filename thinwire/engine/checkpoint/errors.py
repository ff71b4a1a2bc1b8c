"""The error of checkpoints: one type to catch when nothing whole is there, or only another model's."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file or parameter, what is wrong with it and what to do."""
