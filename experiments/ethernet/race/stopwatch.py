"""How long a rank took, and how much of that it waited: read from the kernel's own accounts.

A rank that is neither running nor in the queue for a core waits for the network, or for other ranks: Gloo sleeps.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Interface", "Reading", "Stopwatch"]

_SCHEDULING = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Reading:
    """What happened on one rank between start and stop.

    Attributes:
        seconds: by the clock.
        waited: in which the calling thread neither ran nor stood in the queue for a core. Where the kernel does not
            count queueing, that counts as waiting too.
        cpu: processor time of all threads.
        sent: bytes the interface sent, headers and acknowledgements included; other ranks of the host count too.
        received: bytes it received.
    """

    seconds: float
    waited: float
    cpu: float
    sent: int
    received: int


class Interface:
    """Byte counters of a network interface, as the kernel keeps them."""

    def __init__(self, device: str) -> None:
        """A device such as "eth0"; where there are no counters for it, they stay 0."""
        self._folder = Path("/sys/class/net") / device / "statistics"

    def sent(self) -> int:
        """Bytes since it exists."""
        return self._read("tx_bytes")

    def received(self) -> int:
        """Bytes since it exists."""
        return self._read("rx_bytes")

    def _read(self, counter: str) -> int:
        path = self._folder / counter
        return int(path.read_text()) if path.exists() else 0


class Stopwatch:
    """Measures one stretch of work of the calling thread."""

    def __init__(self, interface: Interface) -> None:
        """Starts at once."""
        self._interface = interface
        self._sent, self._received = interface.sent(), interface.received()
        self._cpu = _process_cpu()
        self._on_core = time.thread_time()
        self._queued = _queued_seconds()
        self._started = time.perf_counter()

    def stop(self) -> Reading:
        """What happened since the start."""
        seconds = time.perf_counter() - self._started
        busy = time.thread_time() - self._on_core + _queued_seconds() - self._queued
        return Reading(
            seconds=seconds,
            waited=min(seconds, max(0.0, seconds - busy)),
            cpu=_process_cpu() - self._cpu,
            sent=self._interface.sent() - self._sent,
            received=self._interface.received() - self._received,
        )


def _process_cpu() -> float:
    times = os.times()
    return times.user + times.system


def _queued_seconds() -> float:
    """Time for which the calling thread was ready to run while others held the cores."""
    if not _SCHEDULING.exists():
        return 0.0
    return int(_SCHEDULING.read_text().split()[1]) / 1e9
