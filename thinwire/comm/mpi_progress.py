"""Keeps MPI transfers moving while the application computes: MPI itself moves data only while it is called.

One thread asks after every transfer in flight. It sleeps when there is none, and while a caller waits, who asks too.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice

from torch import Tensor

from thinwire.comm.mpi_rounds import CALLS_A_LOOK, MPI, Rounds

SLEEP_SECONDS = 50e-6
"""Between two looks of a caller who has nothing else to do."""

_YIELDS_BEFORE_SLEEP = 200

_SHORTEST_PAUSE, _LONGEST_PAUSE = 100e-6, 2e-3
"""Seconds between two looks of the thread, and of a caller whose transfer takes long. In the longest pause a socket's
buffer should not run empty or full."""

_MOVING_SECONDS = 40e-6
"""Processor time of a look that moved data. One that finds nothing takes 3 to 20 microseconds."""

_EXIT_SECONDS = 5.0
"""How long a process that ends waits for the thread to leave MPI."""


class Progress:
    """A thread that drives the transfers of some communicators. It starts with the first of them.

    It ends with this object or the process, whichever is first, and holds neither up. MPI must allow calls from
    several threads at once (MPI_THREAD_MULTIPLE). `watched`: what it drives.
    """

    def __init__(self) -> None:
        self.watched = Watched()
        self._stop: weakref.finalize[..., Progress] | None = None

    def watch(self, transfers: Iterable[Transfer]) -> None:
        """Drive ``transfers`` until they are over or forgotten."""
        self.watched.add(transfers)
        if self._stop is None:
            thread = threading.Thread(target=self.watched.drive, name="thinwire-mpi-progress", daemon=True)
            thread.start()
            # At exit too: MPI must not be called once it is finalised.
            self._stop = weakref.finalize(self, _stop, self.watched, thread)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Within this context the caller drives MPI, and the thread stands aside."""
        self.watched.attend(1)
        try:
            yield
        finally:
            self.watched.attend(-1)


class Transfer:
    """Messages in flight, with the tensors that MPI reads and writes until they are over."""

    def __init__(
        self,
        test: Callable[[], bool],
        tensors: tuple[Tensor, ...],
        in_flight: set[Transfer],
        progress: Progress | None,
        *,
        short: bool = True,
    ) -> None:
        """It joins ``in_flight`` and leaves it when it is over. ``progress``: what may be told to drive it, if any.

        ``test`` says whether it is over, or raises ``MPI.Exception``. ``short``: it may be over so soon that who waits
        for it should not sleep at first, nor long.
        """
        self._drive = test
        self._tensors = tensors
        self._in_flight = in_flight
        self._progress = progress
        self._short = short
        self._testing = threading.Lock()
        self._over = False
        self._error: MPI.Exception | None = None
        in_flight.add(self)

    def done(self) -> bool:
        """Whether it is over, well or badly; drives progress and never raises. Any thread may call it."""
        self._look_at_rounds()
        return self.test()

    def test(self) -> bool:
        """``done``, where rounds have just been looked at."""
        with self._testing:  # MPI forbids that two threads test one request
            if not self._over:
                self._test()
            return self._over

    def wait(self, seconds: float) -> bool:
        """Block for at most ``seconds``; False if it is still running. Raises ``MPI.Exception``."""
        deadline = time.monotonic() + seconds
        pace, yields = _Pace(), 0
        with nullcontext() if self._progress is None else self._progress.attended():
            while True:
                moved = self._look_at_rounds()
                calls = 1 if yields < _YIELDS_BEFORE_SLEEP and self._short else CALLS_A_LOOK
                if any(self.test() for _ in range(calls)):
                    break
                if time.monotonic() >= deadline:
                    return False
                if self._short:
                    yields += 1
                    if yields < _YIELDS_BEFORE_SLEEP:
                        # Not a sleep of no time, which returns at once: other ranks may need this core.
                        os.sched_yield()
                    else:
                        time.sleep(SLEEP_SECONDS)
                else:
                    time.sleep(pace.pause(moved))
        if self._error is not None:
            raise self._error
        return True

    def _look_at_rounds(self) -> bool:
        # All of them: another rank may need them to move before it comes to what this one waits for.
        return self._progress is not None and self._progress.watched.look_at_rounds()

    def _test(self) -> None:
        try:
            self._over = self._drive()
        except MPI.Exception as error:
            # Other requests may still run: the tensors stay in flight.
            self._error, self._over = error, True
        else:
            if self._over:
                self._in_flight.discard(self)
        if self._over and self._progress is not None:
            self._progress.watched.remove((self,))


class _Pace:
    """How long to pause between two looks: shortly after data moved, ever longer while none does."""

    def __init__(self) -> None:
        self._pause = _SHORTEST_PAUSE

    def pause(self, moved: bool) -> float:
        """Seconds until the next look."""
        self._pause = _SHORTEST_PAUSE if moved else min(2 * self._pause, _LONGEST_PAUSE)
        return self._pause


class Watched:
    """What the thread and the rest of the process share: transfers to drive until they are over or removed, and rounds
    to move, for as long as they exist, whoever drives MPI."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._transfers: set[Transfer] = set()
        self._rounds: weakref.WeakSet[Rounds] = weakref.WeakSet()
        self._adding_rounds = threading.Lock()
        self._attending = 0
        self._closed = False

    def add(self, transfers: Iterable[Transfer]) -> None:
        """Drive these."""
        with self._changed:
            self._transfers.update(transfers)
            self._changed.notify()

    def remove(self, transfers: Iterable[Transfer]) -> None:
        """Leave these alone."""
        with self._changed:
            self._transfers.difference_update(transfers)

    def add_rounds(self, rounds: Rounds) -> None:
        """Move these too."""
        with self._adding_rounds:
            self._rounds.add(rounds)

    def look_at_rounds(self) -> bool:
        """Move what MPI does not move of itself while it is called; whether something did."""
        with self._adding_rounds:
            everywhere = list(self._rounds)
        return any([rounds.look() for rounds in everywhere])

    def attend(self, callers: int) -> None:
        """Count callers who drive MPI themselves."""
        with self._changed:
            self._attending += callers
            if self._transfers and not self._attending:
                self._changed.notify()

    def close(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def drive(self) -> None:
        """Look at all transfers again and again: soon after data moved, ever more rarely while none does."""
        pace = _Pace()
        while self._wait_for_some():
            before = time.thread_time()
            moved = self._look() or time.thread_time() - before >= _MOVING_SECONDS
            time.sleep(pace.pause(moved))

    def _wait_for_some(self) -> bool:
        """Sleep until there is something to look at, or this is closed: then False."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._transfers and not self._attending))
            return not self._closed

    def _look(self) -> bool:
        """Whether rounds moved."""
        with self._changed:
            transfers = list(self._transfers)
        # Not with the lock, which callers take who neither wait for MPI nor expect to.
        moved = self.look_at_rounds()
        for transfer in islice(cycle(transfers), max(CALLS_A_LOOK, len(transfers))):
            transfer.test()
        return moved


def _stop(watched: Watched, thread: threading.Thread) -> None:
    # In a forked child there is no such thread, and its locks may be held forever.
    if thread.is_alive():
        watched.close()
        if thread is threading.current_thread():
            # It was the last to hold what it served, in the middle of a look: the process waits for it, and not this.
            atexit.register(thread.join, _EXIT_SECONDS)
        else:
            thread.join(_EXIT_SECONDS)
