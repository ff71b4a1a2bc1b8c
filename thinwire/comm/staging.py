"""Collectives on an accelerator's tensors over a transport that reads host memory only: each begins once what it sends
has arrived there, and the host goes on meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.comm.work import Pending

__all__ = ["Staging", "bring_to_host"]


def bring_to_host(tensor: Tensor) -> tuple[Tensor, torch.Event]:
    """A page-locked copy of `tensor`, and the event after which it is whole."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.Event(tensor.device)
    arrived.record()
    return copy, arrived


class Staging:
    """The collectives of one communicator that have not begun, in the order of their calls, which is every rank's.

    One begins when it is waited for, or at any later call by which what it sends has arrived.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Staged] = deque()

    def follow(self, arrived: torch.Event, begin: Callable[[], Pending]) -> Pending:
        """Begin after all others, once `arrived` has happened."""
        staged = _Staged(self, arrived, begin)
        self._waiting.append(staged)
        self.begin_arrived()
        return staged

    def begin_arrived(self) -> None:
        """Begin those that can begin without a wait."""
        while self._waiting and self._waiting[0].has_arrived():
            self._waiting.popleft().begin()

    def begin_all(self) -> None:
        """Begin all, so that what is begun next comes after them on every rank."""
        while self._waiting:
            self._waiting.popleft().begin()

    def begin_until(self, staged: _Staged) -> None:
        """Begin this one, and those before it."""
        while staged in self._waiting:
            self._waiting.popleft().begin()


class _Staged:
    """A Pending of a collective that may not have begun."""

    def __init__(self, staging: Staging, arrived: torch.Event, begin: Callable[[], Pending]) -> None:
        self._staging = staging
        self._arrived = arrived
        self._begin = begin
        self._pending: Pending | None = None
        self._error: Exception | None = None

    def has_arrived(self) -> bool:
        return self._arrived.query()

    def begin(self) -> None:
        """Begin, waiting for what is sent; what the transport raises is for who waits for this one."""
        self._arrived.synchronize()
        try:
            self._pending = self._begin()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """See Pending."""
        self._staging.begin_arrived()
        return self._error is not None or (self._pending is not None and self._pending.done())

    def wait(self, seconds: float) -> bool:
        """See Pending."""
        self._staging.begin_until(self)
        if self._error is not None:
            raise self._error
        assert self._pending is not None
        return self._pending.wait(seconds)
