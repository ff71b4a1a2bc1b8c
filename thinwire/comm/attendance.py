"""Attendance of a job: ranks that are still there. Where a transfer fails that torch started, ranks that wait in others
of its transfers can answer no roll call: a thread of each answers for as long as its process lives."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from thinwire.comm.errors import ROLL_CALL_SECONDS

Result = TypeVar("Result")

_LOOKS_EVERY = 0.25
_STORE_SECONDS = 1.0
_POLL_SECONDS = 0.05


def in_background(ask: Callable[[], Result]) -> Future[Result]:
    """Call it on a daemon thread: a process that gives up on its peers must be able to end."""
    answer: Future[Result] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def within(seconds: float, ask: Callable[[], Result]) -> Result | None:
    """``ask()``, or None if it takes longer than ``seconds``; its exception if it raises one."""
    try:
        return in_background(ask).result(seconds)
    except TimeoutError:
        return None


_ATTENDING: weakref.WeakValueDictionary[int, Attendance] = weakref.WeakValueDictionary()


def attend(store: Store, rank: int, size: int) -> Attendance:
    """Begin to answer for this rank of a job of `size` that `store` is of, unless something in this process does."""
    known = attendance_of(store)
    if known is None:
        known = _ATTENDING[id(store)] = Attendance(store, rank, size)
    return known


def attendance_of(store: Store) -> Attendance | None:
    """The one of the job that a store is of; None where this rank does not attend."""
    return _ATTENDING.get(id(store))


class Attendance:
    """Has a thread answer for this rank until this object is let go."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self._ranks = store, range(size)
        self._place = PrefixStore("thinwire/attendance", store)
        self._place.set(f"attends/{rank}", "1")
        self._lost: list[int] = []
        own: Store = store.clone()  # type: ignore[attr-defined]
        ended = threading.Event()
        thread = threading.Thread(target=_answer, args=(own, rank, self._lost, ended), daemon=True)
        thread.start()
        # At exit too: a thread that comes back from the store after Python's shutdown aborts the process.
        weakref.finalize(self, _end, ended, thread)

    @property
    def lost(self) -> Sequence[int]:
        """The ranks of the job that did not answer, once any rank has asked and missed some."""
        return tuple(self._lost)

    def ask(self) -> Sequence[int]:
        """Find out which ranks are lost, within `ROLL_CALL_SECONDS`, and tell all the others. Raises RuntimeError where
        the store is lost."""
        place, deadline = self._place, time.monotonic() + ROLL_CALL_SECONDS
        if self._lost:
            return self.lost
        place.set("asked", "1")
        attending = [rank for rank in self._ranks if place.check([f"attends/{rank}"])]
        self._wait_for("here", attending, deadline)
        absent = [rank for rank in attending if not place.check([f"here/{rank}"])]
        if absent:
            absent = json.loads(place.compare_set("lost", "", json.dumps(absent)))  # the first to tell is believed
            # The store may die with this rank.
            self._wait_for("told", set(attending) - set(absent), deadline + 2 * _LOOKS_EVERY)
        return absent

    def _wait_for(self, kind: str, ranks: Iterable[int], deadline: float) -> None:
        keys = [f"{kind}/{rank}" for rank in ranks]
        while not self._place.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _end(ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    thread.join(_STORE_SECONDS)


def _answer(store: Store, rank: int, lost: list[int], ended: threading.Event) -> None:
    """Answer for a rank until `ended`, and note who is lost."""
    place = PrefixStore("thinwire/attendance", store)
    place.set_timeout(timedelta(seconds=ROLL_CALL_SECONDS))
    awaited = "asked"
    try:
        while not ended.wait(_LOOKS_EVERY):
            if not place.check([awaited]):
                continue
            if awaited == "lost":
                lost.extend(json.loads(place.get("lost")))
                place.set(f"told/{rank}", "1")
                return
            place.set(f"here/{rank}", "1")
            awaited = "lost"
    except RuntimeError:  # the store is lost
        return
