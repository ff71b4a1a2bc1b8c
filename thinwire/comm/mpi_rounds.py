"""Large all-to-alls and all-gathers over MPI, with one partner at a time.

MPI's own non-blocking ones send to every rank at once. On Ethernet the senders' streams then meet at each receiver's
link, share it unevenly, and the last of them takes 1.4 to 2 times as long as the bytes alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"MPI was asked for, and cannot be used: {error}. Install mpi4py and an MPI library that it finds "
        "(pip install 'thinwire[mpi]' brings both), or leave the backend to thinwire.comm.init()"
    ) from error


CALLS_A_LOOK = 8
"""Open MPI looks at its sockets in every eighth call only, so that fewer would see nothing of them."""

_PIECE = 63 << 10
"""Bytes of one message. Open MPI sends up to 64 KiB over TCP, its own header included, without asking the receiver
first; what is larger waits for both ends to look, again and again."""

_FEWEST, _MOST = 2, 64
"""Pieces in flight. Two keep a link of 1 Gb/s busy for 1 ms. On slower ones more would wait in queues, those of the
next round among them, so that streams meet."""

_FAST_SECONDS = 0.5e-3
"""Where all that was in flight has moved since a look so short ago, there may be more."""


class Rounds:
    """Exchanges of one communicator, one after another in the order of their starts, which is that of all ranks.

    They move while a thread looks here. Any thread may.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """``comm``: whose point-to-point messages are for these rounds alone."""
        self._comm = comm
        self._looking = threading.Lock()  # MPI forbids that two threads test one request
        self._to_begin: deque[LargeExchange] = deque()
        self._under_way: deque[_Piece] = deque()
        self._most = _FEWEST
        self._looked = 0.0
        self.error: MPI.Exception | None = None  # that ended these rounds
        self._stopped = False

    def start(self, received: Sequence[Tensor], sent: Sequence[Tensor], tag: int) -> LargeExchange:
        """Start to send ``sent[i]`` to rank i and to receive ``received[i]`` from it, at least two ranks.

        All are contiguous bytes, not all of them none, and must outlive the exchange. ``tag``: the same on all ranks,
        another than that of exchanges that these could be taken for.
        """
        rank = self._comm.Get_rank()
        received[rank].copy_(sent[rank])
        exchange = LargeExchange(self, received, sent, tag)
        with self._looking:
            self._to_begin.append(exchange)
        self.look()
        return exchange

    @property
    def busy(self) -> bool:
        """Whether something is to be moved."""
        return not self._stopped and bool(self._under_way or self._to_begin)

    def look(self) -> bool:
        """Move what can be moved; whether something did. Never raises: the exchanges do."""
        if not self.busy:
            return False
        with self._looking:
            try:
                return self._advance()
            except MPI.Exception as error:
                self.error, self._stopped = error, True
                return True

    def stop(self) -> None:
        """Leave MPI alone from now on: what is in flight stays there."""
        self._stopped = True

    def _advance(self) -> bool:
        moved = self._end()
        now = time.monotonic()
        if not moved:
            self._most = _FEWEST
        elif not self._under_way and now - self._looked < _FAST_SECONDS:
            self._most = min(2 * self._most, _MOST)
        self._looked = now
        while self._begin():
            moved = True
            if not self._end():
                break
        return moved

    def _end(self) -> bool:
        """Look which pieces have moved; whether one has."""
        before = len(self._under_way)
        while self._under_way and any(self._under_way[0].test() for _ in range(CALLS_A_LOOK)):
            self._under_way.popleft().exchange.ended += 1
        return len(self._under_way) < before

    def _begin(self) -> bool:
        """Begin as many pieces as may; whether one did."""
        before = len(self._under_way)
        while self._to_begin and len(self._under_way) < self._most:
            self._under_way.append(self._to_begin[0].begin_one(self._comm))
            if self._to_begin[0].begun == self._to_begin[0].total:
                self._to_begin.popleft()
        return len(self._under_way) > before


class LargeExchange:
    """One all-to-all or all-gather. In round k a rank sends to the one k places on and receives from the one k back."""

    def __init__(self, rounds: Rounds, received: Sequence[Tensor], sent: Sequence[Tensor], tag: int) -> None:
        self._rounds = rounds
        self._received, self._sent = received, sent
        self._tag = tag
        self._pieces = -(-max(one.nbytes for one in (*received, *sent)) // _PIECE)  # of the largest on any rank
        self.total = self._pieces * (len(sent) - 1)
        self.begun = self.ended = 0  # pieces

    def test(self) -> bool:
        """Whether it is over. Raises ``MPI.Exception``."""
        over = self.ended == self.total
        if not over and self._rounds.error is not None:
            raise self._rounds.error
        return over

    def begin_one(self, comm: MPI.Intracomm) -> _Piece:
        """Begin the next piece."""
        rank, size = comm.Get_rank(), comm.Get_size()
        turns, place = divmod(self.begun, self._pieces)
        to, source = (rank + turns + 1) % size, (rank - turns - 1) % size
        first = place * _PIECE
        arriving = address(self._received[source][first : first + _PIECE])
        leaving = address(self._sent[to][first : first + _PIECE])
        self.begun += 1
        arrival = comm.Irecv([arriving, MPI.BYTE], source, self._tag)
        return _Piece(self, [arrival, comm.Isend([leaving, MPI.BYTE], to, self._tag)])


@dataclass(frozen=True)
class _Piece:
    """One message in flight to a partner, and its like from the other."""

    exchange: LargeExchange
    requests: list[MPI.Request]

    def test(self) -> bool:
        return bool(MPI.Request.Testall(self.requests))


def address(tensor: Tensor) -> MPI.buffer:
    """The memory of a contiguous tensor on any device, for MPI; the tensor must outlive it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
