"""What a wrong call raises where DeepSpeed asserts."""

from __future__ import annotations

__all__ = ["DeepSpeedUsageError"]


class DeepSpeedUsageError(ValueError, AssertionError):
    """A call that cannot work. DeepSpeed raises AssertionError there, and scripts may catch that."""
