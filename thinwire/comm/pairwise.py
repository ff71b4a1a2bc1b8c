"""Transfers over Gloo between one rank and one other: all-to-alls and all-gathers of large messages, in turns on a
thread of their own, and messages of a rank's choice.

Gloo sends to every rank at once, and moves what is in flight side by side. On Ethernet streams then meet at receivers'
links, share them unevenly, and the last of them takes 1.2 to 1.7 times as long as the bytes alone. Its all-gather fills
a tensor of its own, which it then copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.collectives import Sizes, cut
from thinwire.comm.errors import CommunicationError

LEAST_CHUNK_BYTES = 64 << 10
"""Of a message to one peer: below, a round's latency is felt beside its transfer, and switches hold all streams."""

_TAGS = range(1 << 30, (1 << 30) + (1 << 20))
"""Of messages on the group, which users of the same group are unlikely to take."""

_EXIT_SECONDS = 5.0
"""How long a communicator that is closed waits for its thread."""


class Pairwise:
    """Collectives on the host tensors of one Gloo group, one after another in the order of their starts."""

    def __init__(self, group: dist.ProcessGroup, instance: int) -> None:
        """``instance`` tells those on one group apart: every rank must give the same."""
        self._group = group
        self._tags = _TAGS[instance % 64 :: 64]
        self._started = 0
        self._waiting: SimpleQueue[tuple[_Turn, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """End the thread, once what it has been given is over."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_EXIT_SECONDS)

    def start(self, collective: Callable[..., None], output: Tensor, input: Tensor, sizes: Sizes) -> _Turn:
        """Start `all_to_all` or `all_gather` below, of flat tensors: of equal chunks, or of `sizes` by rank."""
        tag = self._tags[self._started % len(self._tags)]
        turn = _Turn()
        self._started += 1
        self._waiting.put((turn, partial(collective, self._group, output, input, tag, sizes)))
        if self._thread is None:
            # A daemon, as a process that gives up on its peers must be able to end.
            self._thread = threading.Thread(
                target=_run_turns, args=(self._waiting,), name="thinwire-pairwise", daemon=True
            )
            self._thread.start()
        return turn


class _Turn(Future[None]):
    """One collective: a ``Pending`` for who waits."""

    def wait(self, seconds: float) -> bool:
        """Block for at most ``seconds``; False if it is still running. Raises what Gloo raised."""
        try:
            self.result(seconds)
        except TimeoutError:
            return False
        return True


def all_to_all(group: dist.ProcessGroup, output: Tensor, input: Tensor, tag: int, sizes: Sizes) -> None:
    """In rounds: in round k every rank sends to the one k places on, and receives from the one k places back."""
    rank, size = group.rank(), group.size()
    received, sent = output.chunk(size), cut(input, sizes, size)
    received[rank].copy_(sent[rank])
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        # Gloo sends nothing before it is asked for: a rank asks one after another, so that no two streams meet there.
        arriving = group.recv([received[source]], source, tag)
        leaving = group.send([sent[to]], to, tag)
        arriving.wait()
        leaving.wait()


def all_gather(group: dist.ProcessGroup, output: Tensor, input: Tensor, tag: int, sizes: Sizes) -> None:
    """In a ring: every rank passes on to the next what it receives from the one before. All is asked for at once, as it
    comes one after another."""
    rank, size = group.rank(), group.size()
    chunks = cut(output, sizes, size)
    if chunks[rank].data_ptr() != input.data_ptr():
        chunks[rank].copy_(input)
    in_order = [chunks[(rank - distance) % size] for distance in range(size)]
    arriving = [group.recv([chunk], (rank - 1) % size, tag) for chunk in in_order[1:]]
    leaving = []
    for chunk, work in zip(in_order[:-1], arriving, strict=True):
        leaving.append(group.send([chunk], (rank + 1) % size, tag))
        work.wait()
    for work in leaving:
        work.wait()


class Messages:
    """Messages from one rank of a Gloo group to one other, in order, of host tensors; each call waits for so many
    `seconds` at most, and raises CommunicationError. `close`: ends them, and is told whether some may be in flight.
    `bytes_sent`: by this rank."""

    def __init__(self, group: dist.ProcessGroup, seconds: float, close: Callable[[bool], None]) -> None:
        self.size, self.bytes_sent = group.size(), 0
        self._group, self._limit, self.close = group, timedelta(seconds=seconds), close

    def __enter__(self) -> Messages:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(kind is not None)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send it, contiguous, to rank `to`, which receives as much."""
        self._wait(lambda: self._group.send([tensor], to, _TAGS[0]))()
        self.bytes_sent += tensor.nbytes

    def receive(self, tensor: Tensor, source: int) -> Callable[[], None]:
        """Begin to receive from rank `source`; what is returned waits for it."""
        return self._wait(lambda: self._group.recv([tensor], source, _TAGS[0]))

    def send_bytes(self, message: bytes, to: int) -> None:
        """Send a message of any length, for `receive_bytes`."""
        self.send(torch.tensor([len(message)]), to)
        self.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to)

    def receive_bytes(self, source: int) -> bytes:
        """What rank `source` has sent with `send_bytes`."""
        length = torch.empty(1, dtype=torch.int64)
        self.receive(length, source)()
        message = torch.empty(int(length), dtype=torch.uint8)
        self.receive(message, source)()
        return message.numpy().tobytes()

    def _wait(self, begin: Callable[[], dist.Work]) -> Callable[[], None]:
        def within(do: Callable[[], Any]) -> Any:
            try:
                return do()
            except RuntimeError as error:
                raise CommunicationError(f"a message between two workers failed: {error}") from error

        work = within(begin)
        return lambda: within(lambda: work.wait(self._limit))


def _run_turns(waiting: SimpleQueue[tuple[_Turn, Callable[[], None]] | None]) -> None:
    while (next_one := waiting.get()) is not None:
        turn, collective = next_one
        try:
            collective()
        except Exception as error:
            turn.set_exception(error)
        else:
            turn.set_result(None)
        del next_one, turn, collective  # its tensors and its group are the caller's to free
