"""Handles of collectives in flight: issue several, compute, wait for them later.

A backend supplies a ``Pending``; ``Work`` adds the timeout, the alarm from other ranks, and good errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from thinwire.comm.errors import CommunicationError
from thinwire.comm.failure import Call

if TYPE_CHECKING:
    from thinwire.comm.communicator import Communicator

__all__ = ["Finishing", "Pending", "Work"]

_ALARM_INTERVAL = 0.5
"""Seconds between two looks for the alarm of a rank that failed."""


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

    def __init__(self, communicator: Communicator, call: Call, pending: Pending) -> None:
        self._communicator = communicator
        self._call = call
        self._pending: Pending | None = pending
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
        limit = self._communicator.timeout if timeout is None else timeout
        try:
            self._wait(self._pending, limit)
        except CommunicationError as error:
            self._error = error
            raise
        self._pending = None

    def _wait(self, pending: Pending, limit: float) -> None:
        deadline = time.monotonic() + limit
        while True:
            remaining = deadline - time.monotonic()
            with self._communicator._failures_of(self._call):
                if pending.wait(max(0.0, min(_ALARM_INTERVAL, remaining))):
                    return
            if remaining <= 0:
                raise self._communicator._fail(self._call, timeout=limit)
            if self._communicator._alarmed():
                raise self._communicator._fail(self._call, cause="another rank reported a failure")
