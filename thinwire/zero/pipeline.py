"""The order in which the legs of many buckets are issued: fixed by the buckets' numbers alone, so that ranks cannot
disagree about it, and never idle while a bucket waits for its gradients."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Legs", "Pipeline"]


class Legs(Protocol):
    """A bucket's transfer whose first leg is under way."""

    def advance(self) -> None:
        """Wait for leg 1, combine what it brought, and start leg 2."""

    def wait(self) -> None:
        """Wait for leg 2."""


class Pipeline:
    """Moves buckets on as later ones start: start(0), start(1), advance(0), start(2), advance(1), wait(0), ...

    `hold` keeps every bucket in leg 1 until `drain`, for what must be known of all of them before leg 2.
    """

    def __init__(self, hold: bool = False) -> None:
        self.hold = hold
        self._legs: list[Legs] = []
        self._advanced = 0
        self._waited = 0

    @property
    def started(self) -> int:
        """How many buckets have left since `reset`."""
        return len(self._legs)

    def follow(self, legs: Legs) -> None:
        """Take charge of a bucket that has just started leg 1, and move the earlier ones on."""
        self._legs.append(legs)
        if not self.hold:
            self._move_on(lag=1)

    def drain(self) -> None:
        """Bring every bucket to the end of leg 2."""
        self._move_on(lag=0)

    def reset(self) -> None:
        """Forget them; the next bucket to start is the first one again."""
        self._legs = []
        self._advanced = self._waited = 0

    def _move_on(self, lag: int) -> None:
        while self._advanced < len(self._legs) - lag:
            self._legs[self._advanced].advance()
            self._advanced += 1
        while self._waited < len(self._legs) - 2 * lag:
            self._legs[self._waited].wait()
            self._waited += 1
