"""Errors of this room: something that thinwire has no counterpart of, and a call that cannot work."""

from __future__ import annotations


class NotOfferedError(NotImplementedError):
    """Something of DeepSpeed's that thinwire does not have was used; the message says what to do instead."""


class DeepSpeedUsageError(ValueError, AssertionError):
    """A call that cannot work. DeepSpeed raises AssertionError there, and scripts may catch that."""
