"""All-to-alls of large messages over Gloo, with one partner at a time, on a thread of their own.

Gloo sends to everybody at once. On Ethernet the senders' streams then meet at each receiver's link, share it unevenly,
and the last of them takes 1.2 to 1.7 times as long as the bytes alone.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor

__all__ = ["LEAST_CHUNK_BYTES", "Pairwise"]

LEAST_CHUNK_BYTES = 64 << 10
"""Of a message to one peer: below, a round's latency is felt beside its transfer, and switches hold all streams."""

_TAGS = range(1 << 30, (1 << 30) + (1 << 20))
"""Of messages on the group, which users of the same group are unlikely to take."""

_EXIT_SECONDS = 5.0
"""How long a communicator that is closed waits for its thread."""


class Pairwise:
    """All-to-alls on the host tensors of one Gloo group, one after another in the order of their starts."""

    def __init__(self, group: dist.ProcessGroup, instance: int) -> None:
        """``instance`` tells those on one group apart: every rank must give the same."""
        self._group = group
        self._tags = _TAGS[instance % 64 :: 64]
        self._started = 0
        self._waiting: SimpleQueue[_Exchange | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, output: Tensor, input: Tensor) -> _Exchange:
        """Start the all-to-all of flat tensors of as many equal chunks as there are ranks."""
        exchange = _Exchange(self._group, output, input, self._tags[self._started % len(self._tags)])
        self._started += 1
        self._waiting.put(exchange)
        if self._thread is None:
            # A daemon, as a process that gives up on its peers must be able to end.
            self._thread = threading.Thread(
                target=_work_off, args=(self._waiting,), name="thinwire-pairwise", daemon=True
            )
            self._thread.start()
        return exchange

    def close(self) -> None:
        """End the thread, once what it has been given is over."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_EXIT_SECONDS)


class _Exchange:
    """One all-to-all: a ``Pending`` for who waits, rounds for the thread."""

    def __init__(self, group: dist.ProcessGroup, output: Tensor, input: Tensor, tag: int) -> None:
        self._group = group
        self._output = output
        self._input = input
        self._tag = tag
        self._over = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether it is over, well or badly."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Block for at most ``seconds``; False if it is still running. Raises what Gloo raised."""
        if not self._over.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        """All rounds. In round k every rank sends to the one k places on, and hears from the one k places back."""
        try:
            self._run()
        except Exception as error:
            self._error = error
        finally:
            self._over.set()

    def _run(self) -> None:
        rank, size = self._group.rank(), self._group.size()
        received, sent = self._output.chunk(size), self._input.chunk(size)
        received[rank].copy_(sent[rank])
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            arriving = self._group.recv([received[source]], source, self._tag)
            leaving = self._group.send([sent[to]], to, self._tag)
            arriving.wait()
            leaving.wait()


def _work_off(waiting: SimpleQueue[_Exchange | None]) -> None:
    while (exchange := waiting.get()) is not None:
        exchange.run()
        del exchange  # its tensors and its group are the caller's to free
