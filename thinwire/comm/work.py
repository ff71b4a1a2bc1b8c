"""Handles of collectives in flight: issue several, compute, wait for them later.

A backend supplies a ``Pending``; the communicator that started it says how a ``Work`` waits for it: with a timeout, an
ear for other ranks' alarms, and good errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from thinwire.comm.errors import CommunicationError

__all__ = ["Finishing", "Pending", "Work"]


class Pending(Protocol):
    """A transfer that a backend has started."""

    def done(self) -> bool:
        """Whether it is over, well or badly; drives progress and never raises."""

    def wait(self, seconds: float) -> bool:
        """Block for at most ``seconds``; False if it is still running. Raises what the transport raises."""


class Finishing:
    """A pending transfer followed by a local action on this rank: unstaging, or dividing a sum."""

    def __init__(self, pending: Pending, action: Callable[[], object]) -> None:
        self._pending = pending
        self._action = action

    def done(self) -> bool:
        """Whether the transfer is over; the action runs in ``wait``."""
        return self._pending.done()

    def wait(self, seconds: float) -> bool:
        """Wait for the transfer, then act."""
        if not self._pending.wait(seconds):
            return False
        self._action()
        return True


class Work:
    """Handle of an asynchronous collective. Its tensors are valid, and may be touched, after ``wait``."""

    def __init__(self, pending: Pending, wait_for: Callable[[Pending, float | None], None]) -> None:
        self._pending: Pending | None = pending
        self._wait_for = wait_for
        self._error: CommunicationError | None = None

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once. On MPI this also drives progress."""
        return self._pending is None or self._error is not None or self._pending.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the collective is over; for NCCL, make the current CUDA stream wait for it.

        ``timeout`` in seconds, by default the communicator's. Raises ``CommunicationTimeout`` when it
        passes and ``CommunicationError`` when a rank or the transport failed; either one is final, for
        the whole communicator. Use ``is_completed`` to look without that risk.
        """
        if self._error is not None:
            raise self._error
        if self._pending is None:
            return
        try:
            self._wait_for(self._pending, timeout)
        except CommunicationError as error:
            self._error = error
            raise
        self._pending = None
