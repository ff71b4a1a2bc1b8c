"""The errors of checkpoints: one type to catch when nothing whole is there, or only another model's, and one of the
command line."""

from __future__ import annotations

__all__ = ["CheckpointError", "UsageError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file or parameter, what is wrong with it and what to do."""


class UsageError(Exception):
    """What the command line asked for is not there, or cannot be done; exit code 2."""
