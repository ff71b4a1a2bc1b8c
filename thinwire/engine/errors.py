"""The engine's own errors: for calls out of order, and for training that has gone wrong."""

from __future__ import annotations

__all__ = ["CallError", "NonFiniteError"]


class CallError(RuntimeError, AssertionError):
    """A call that cannot come here, as step() before backward(). An AssertionError too, as scripts written for
    other engines catch. Nothing has changed."""


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is not finite, and no smaller loss scale can help. Raised on every rank; nothing moved."""
