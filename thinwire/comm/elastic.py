"""Settings of a job whose workers come and go, and the store through which they find each other: who serves it, how a
worker reaches it, how it is asked without ever waiting for longer than a limit, and by what it tells who is alive."""

from __future__ import annotations

import atexit
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from thinwire.comm.attendance import in_background
from thinwire.comm.errors import CommunicationError
from thinwire.comm.torch_backend import serve_store

MEETING_PLACE = "THINWIRE_MEETING"
"""The environment variable that says where workers meet."""

Result = TypeVar("Result")

_IN_A_FILE = "file:"

_LEAST_SILENCE = 2.0


class MembershipError(CommunicationError):
    """This worker cannot go on with the others, nor can it without them: the meeting place is lost, too few workers are
    left, the job is over, or no worker is left that has its weights."""

    final = True


def until_done(action: Callable[[], Result], meet: Callable[[CommunicationError], object]) -> Result:
    """What `action` returns, called again after each meeting that a failure of it leads to."""
    while True:
        try:
            return action()
        except CommunicationError as error:
            if error.final:
                raise
            meet(error)


@dataclass(frozen=True)
class Elastic:
    """Workers that come and go while a job runs.

    They meet at a store that `python -m thinwire meet ADDRESS` serves, a process of its own that has to outlive them,
    or in a file.
    How each is started is its own affair: `python`, or `torchrun --standalone`. Ranks and sizes that a launcher gives
    are not looked at: each process is a worker, unless the optimizer gets a communicator, whose ranks are one then.

    Args:
        workers: with how many the job begins.
        min_workers: with how many it goes on; where fewer are left they wait for others.
        address: "HOST:PORT" of the meeting place, or "file:PATH" of a file on a file system that all workers share and
            lock, which nothing serves; by default what the environment says in THINWIRE_MEETING.
        job: tells jobs at one meeting place apart, and one run of a job from its next.
        timeout: seconds that one worker may keep the others waiting: more than the slowest takes from one outer step to
            the next, evaluation included.
        join_timeout: seconds to wait for workers: at the beginning, for one that joins, and where too few are left.
        silence: seconds without a sign of life after which a worker counts as dead.

    Raises ValueError for numbers that cannot work.
    """

    workers: int
    min_workers: int = 1
    address: str | None = None
    job: str = "job"
    timeout: float = 300.0
    join_timeout: float = 1800.0
    silence: float = 10.0

    def __post_init__(self) -> None:
        for name in ("workers", "min_workers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers={self.min_workers} is more than workers={self.workers}")
        for name in ("timeout", "join_timeout", "silence"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
        if not _LEAST_SILENCE <= self.silence <= self.timeout:
            raise ValueError(
                f"silence must be from {_LEAST_SILENCE:g} seconds up to timeout={self.timeout:g}, got {self.silence!r}"
            )
        if not isinstance(self.job, str) or not self.job:
            raise ValueError(f"job must be a name, got {self.job!r}")


def meeting_place(settings: Elastic, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port where workers meet; of a file its path, and 0. Raises ValueError if none is given, or what is given
    is no address."""
    given = settings.address or environ.get(MEETING_PLACE)
    if given is None:
        raise ValueError(
            "no meeting place of elastic workers is given: start `python -m thinwire meet HOST:PORT` and set "
            f"{MEETING_PLACE}=HOST:PORT in every worker's environment, or to file:PATH of a file that all share, or "
            "pass Elastic(address=...)"
        )
    if given.startswith(_IN_A_FILE):
        return given.removeprefix(_IN_A_FILE), 0
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"the meeting place must be HOST:PORT, as 10.0.0.1:29400, or file:PATH, got {given!r}")
    return host, int(port)


def check_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError under a launcher that would end the workers which are to go on."""
    agents = int(environ.get("GROUP_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in environ else 1
    if agents > 1 and int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise ValueError(
            f"torchrun with {agents} agents in one rendezvous and --max-restarts restarts every worker where one has "
            "died: start one torchrun --standalone a host, each with its own --max-restarts"
        )
    if any(name in environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        raise ValueError(
            "mpirun ends the whole job where one process dies, so that no worker would be left to go on: start elastic "
            "workers one by one, with python or torchrun --standalone"
        )


# The meeting place

_SECONDS = 300.0


def serve(address: str) -> TCPStore:
    """Serve a meeting place, as long as what is returned lives.

    Raises ValueError where `address` is none, and OSError where this host cannot listen there.
    """
    host, port = meeting_place(Elastic(workers=1, address=address))
    if not port:
        raise ValueError(f"a meeting place in a file is served by none: start the workers with {address}")
    return serve_store(host, port, timedelta(seconds=_SECONDS))


def reach(settings: Elastic) -> tuple[Store, str]:
    """Go to the meeting place: its store, and its address.

    Raises ValueError if no place is given, or where the launcher would end the workers that are to go on,
    and MembershipError if it is not served within `join_timeout`.
    """
    check_launcher()
    host, port = meeting_place(settings)
    if not port:
        return _file_store(Path(host)), f"{_IN_A_FILE}{host}"
    try:
        store = TCPStore(host, port, None, False, timedelta(seconds=settings.join_timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise MembershipError(
            f"no meeting place is served at {host}:{port}: start `python -m thinwire meet {host}:{port}` there "
            f"({error})"
        ) from error
    return store, f"{host}:{port}"


def _file_store(path: Path) -> Store:
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # no worker is in the middle of writing
            file.seek(0)
            begins = file.read(_LONGEST_BEGIN)
    except OSError as error:
        raise MembershipError(
            f"the meeting place {path} cannot be written: give a file in a folder that all workers share ({error})"
        ) from error
    if begins and _BEGIN not in begins:  # torch would wait in it without end
        raise MembershipError(f"the meeting place {path} holds something else: give a file that is not there yet")
    return FileStore(str(path), -1)


_BEGIN, _LONGEST_BEGIN = b"refcount", 64
"""The first key of each of torch's FileStores, and bytes within which it stands."""


class LimitedStore:
    """What workers write and read at their meeting place, `address`.

    Every call raises MembershipError where the store is lost, or does not answer for `seconds`.
    """

    def __init__(self, store: Store, address: str, seconds: float) -> None:
        self._store = store
        self._address = address
        self._seconds = seconds

    def read(self, key: str) -> str | None:
        """A value, None where there is none yet."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else "") or None

    def write(self, key: str, value: str) -> None:
        """Set a value, which is not empty."""
        self._ask(partial(self._store.set, key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0; the sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def propose(self, key: str, value: str) -> str:
        """Set a value where there is none yet; the value that is there then."""
        return self._ask(lambda: self._store.compare_set(key, "", value).decode())

    def check_alike(self, settings: Mapping[str, Any], about: str) -> None:
        """Raise ValueError, naming a difference, unless these are what the job's first worker has written."""
        mine = json.dumps(settings)
        first: dict[str, Any] = json.loads(self.propose(about, mine))
        for name, value in json.loads(mine).items():
            if first.get(name) != value:
                raise ValueError(
                    f"{name} is {value!r} here and {first.get(name)!r} on the job's first worker: every worker needs "
                    "the same model, settings and data. A new job at the same meeting place needs another "
                    "Elastic(job=...)"
                )

    def wait_for(self, heart: Heart) -> None:
        """Wait until it answers a heart, too, whose connection may be later to notice that it does again."""
        self._ask(heart.wait_for_answer)

    def _ask(self, question: Callable[[], Result]) -> Result:
        try:
            return in_background(question).result(self._seconds)
        except (TimeoutError, RuntimeError) as error:
            why = f" for {self._seconds:g} s" if isinstance(error, TimeoutError) else f": {error}"
            raise MembershipError(
                f"the meeting place {self._address} does not answer, and without it no worker can tell who is in the "
                f"job. This worker ends; start the job again, from a checkpoint where there is one{why}"
            ) from error


_INTERVAL = 0.5
_GONE = b"gone"


class Heart:
    """Beats twice a second from a thread, and looks meanwhile who else does, who waits, and who has set an alarm.

    A worker is silent where its beat has not changed in as many looks as make `silence` seconds: looks, not seconds, so
    that a process which was held up itself takes no worker for dead. The store is used by nothing else.
    """

    def __init__(self, store: Store, name: str, silence: float) -> None:
        self._store = store
        self._name = name
        self._silence = silence
        self._patience = max(2, round(silence / _INTERVAL))
        self._lock = threading.RLock()
        self._beats: dict[str, bytes] = {}
        self._unchanged: dict[str, int] = {}
        self._members: tuple[str, ...] = ()
        self._next = 0
        self._alarm = False
        self.wanted = False  # whether a worker waits for the next generation
        self.watched = False  # whether a newcomer waits to look on while the others train
        self.told = 0  # how many have looked on, or wanted to
        self.step = 0  # that this worker takes with the others
        self.ended: int | None = None  # the last step of a worker of this generation that takes no more
        self._looked = time.monotonic()
        self._stop = threading.Event()
        store.add(f"beat/{name}", 1)
        self._thread = threading.Thread(target=self._run, name="thinwire-heart", daemon=True)
        self._thread.start()
        # At exit too: a call of the store's that Python's end cuts off aborts the process.
        atexit.register(self.stop, gone=True)

    def follow(self, number: int, members: Iterable[str]) -> None:
        """Look after generation `number` and its members from now on."""
        with self._lock:
            self._next = number + 1
            self._members = tuple(members)
            self._alarm = self.wanted = False
            self.ended = None
            self.watch(self._members)

    def watch(self, names: Iterable[str]) -> None:
        """Look after these too."""
        with self._lock:
            for name in names:
                self._unchanged.setdefault(name, 0)

    def fate(self, name: str) -> str:
        """Whether a worker that is watched has left, or counts as dead, in words; empty if it is alive."""
        with self._lock:
            left, dead = self._beats.get(name) == _GONE, self._unchanged[name] >= self._patience
        return f"{name} left" if left else f"{name} gave no sign of life for {self._silence:g} s" if dead else ""

    def fates(self, names: Iterable[str]) -> list[str]:
        """Of those who have left or count as dead."""
        return [fate for name in names if (fate := self.fate(name))]

    @property
    def is_left_behind(self) -> bool:
        """Whether another worker has ended before the step that this one takes, which so never comes about."""
        return self.ended is not None and self.step > self.ended

    @property
    def disturbed(self) -> str:
        """Why the workers of this generation have to meet now; empty where they need not."""
        with self._lock:
            if self._alarm:
                return "another worker has called a meeting"
            lost = self.fates(name for name in self._members if name != self._name)
        if self.is_left_behind:
            return f"the others have ended after step {self.ended}"
        if lost:
            return "; ".join(lost)
        return "" if self.is_answered else "the meeting place does not answer"

    @property
    def is_answered(self) -> bool:
        """Whether the meeting place has answered of late."""
        return time.monotonic() - self._looked <= self._silence + _INTERVAL

    def wait_for_answer(self) -> None:
        """Return once the meeting place answers; raises RuntimeError if it is lost."""
        while not self.is_answered:
            if not self._thread.is_alive():
                raise RuntimeError("its connection is lost")
            time.sleep(_INTERVAL / 10)

    def tell(self) -> int:
        """Take note that the next one is told; its number."""
        with self._lock:
            self.told, self.watched = self.told + 1, False
        return self.told - 1

    def stop(self, gone: bool = False) -> None:
        """Beat no longer; `gone`: tell the others not to wait."""
        atexit.unregister(self.stop)
        self._stop.set()
        self._thread.join(2 * _INTERVAL)
        if gone and not self._thread.is_alive():
            with suppress(RuntimeError):  # of a meeting place that is lost
                self._store.set(f"beat/{self._name}", _GONE.decode())

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL):
            try:
                self._look()
            except RuntimeError:
                self._looked = -math.inf  # the store is lost, which `disturbed` says
                return

    def _look(self) -> None:
        self._store.add(f"beat/{self._name}", 1)
        with self._lock:
            names, number, told = list(self._unchanged), self._next, self.told
        beats = dict(zip(names, self._store.multi_get([f"beat/{name}" for name in names]), strict=True))
        alarm = bool(number) and self._store.check([f"{number}/alarm"])
        wanted = bool(number) and self._store.check([f"{number}/count"])
        watched = self._store.check([f"onlooker/{told}"])
        ended = f"{number - 1}/ended"
        last = int(self._store.get(ended)) if number and self._store.check([ended]) else None
        with self._lock:
            for name, beat in beats.items():
                self._unchanged[name] = self._unchanged[name] + 1 if self._beats.get(name) == beat else 0
            self._beats.update(beats)
            if number == self._next:
                self._alarm, self.wanted, self.ended = alarm, wanted, last
            if told == self.told:
                self.watched = watched
        self._looked = time.monotonic()
