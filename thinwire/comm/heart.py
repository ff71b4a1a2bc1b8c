"""A worker's sign of life in the store that all workers share, and its ear for the others'."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable

from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Heart"]

_INTERVAL = 0.5
_GONE = b"gone"


class Heart:
    """Beats twice a second from a thread, and looks meanwhile who else does, who waits, and who has set an alarm.

    A worker is silent where its beat has not changed in as many looks as make `silence` seconds: looks, not seconds, so
    that a process which was held up itself takes nobody for dead. The store is used by nothing else.
    """

    def __init__(self, store: Store, name: str, silence: float, interval: float = _INTERVAL) -> None:
        self._store = store
        self._name = name
        self._silence = silence
        self._interval = interval
        self._patience = max(2, round(silence / interval))
        self._lock = threading.Lock()
        self._beats: dict[str, bytes] = {}
        self._unchanged: dict[str, int] = {}
        self._members: tuple[str, ...] = ()
        self._next = 0
        self._alarm = False
        self._wanted = False
        self._looked = time.monotonic()
        self._stop = threading.Event()
        store.add(f"beat/{name}", 1)
        self._thread = threading.Thread(target=self._run, name="thinwire-heart", daemon=True)
        self._thread.start()

    def follow(self, number: int, members: Iterable[str]) -> None:
        """Look after generation `number` and its members from now on."""
        with self._lock:
            self._next = number + 1
            self._members = tuple(members)
            self._alarm = self._wanted = False
            self._watch(self._members)

    def watch(self, names: Iterable[str]) -> None:
        """Look after these too."""
        with self._lock:
            self._watch(names)

    def silent(self, name: str) -> bool:
        """Whether a worker that is watched has left, or counts as dead."""
        with self._lock:
            return self._is_silent(name)

    @property
    def disturbed(self) -> str:
        """Why the workers of this generation have to meet now; empty where they need not."""
        with self._lock:
            if self._alarm:
                return "another worker has called a meeting"
            lost = [name for name in self._members if name != self._name and self._is_silent(name)]
        if lost:
            return f"{len(lost)} of the workers gave no sign of life"
        if time.monotonic() - self._looked > self._silence + self._interval:
            return "the meeting place does not answer"
        return ""

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the next generation."""
        return self._wanted

    def stop(self, gone: bool = False) -> None:
        """Beat no longer; `gone`: tell the others not to wait."""
        self._stop.set()
        self._thread.join(2 * self._interval)
        if gone and not self._thread.is_alive():
            self._store.set(f"beat/{self._name}", _GONE.decode())

    def _watch(self, names: Iterable[str]) -> None:
        for name in names:
            self._unchanged.setdefault(name, 0)

    def _is_silent(self, name: str) -> bool:
        return self._beats.get(name) == _GONE or self._unchanged[name] >= self._patience

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._look()
            except RuntimeError:
                self._looked = -math.inf  # the store is lost, which `disturbed` says
                return

    def _look(self) -> None:
        self._store.add(f"beat/{self._name}", 1)
        with self._lock:
            names, number = list(self._unchanged), self._next
        beats = dict(zip(names, self._store.multi_get([f"beat/{name}" for name in names]), strict=True))
        alarm = bool(number) and self._store.check([f"{number}/alarm"])
        wanted = bool(number) and self._store.check([f"{number}/count"])
        with self._lock:
            for name, beat in beats.items():
                self._unchanged[name] = self._unchanged[name] + 1 if self._beats.get(name) == beat else 0
            self._beats.update(beats)
            if number == self._next:
                self._alarm, self._wanted = alarm, wanted
        self._looked = time.monotonic()
