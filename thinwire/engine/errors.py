"""The engine's own error: one type to catch where training itself has gone wrong."""

from __future__ import annotations

__all__ = ["NonFiniteError"]


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is not finite, and no smaller loss scale can help. Raised on every rank; nothing moved."""
