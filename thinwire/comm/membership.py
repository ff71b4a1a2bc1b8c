"""Membership of an elastic job: generations of workers, each agreed on through a store that no worker serves. A worker
is a process, or a node, whose first rank agrees with the other workers. docs/internals/elastic.md says what is assumed,
and why no worker hangs and no two halves of a job go on by themselves.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from thinwire.comm import threads
from thinwire.comm.attendance import in_background
from thinwire.comm.communicator import Communicator
from thinwire.comm.elastic import Elastic, Heart, LimitedStore, MembershipError
from thinwire.comm.errors import CommunicationError
from thinwire.comm.pairwise import Messages
from thinwire.comm.relay import GenerationCommunicator, Relay, WorkerGroup
from thinwire.comm.torch_backend import Wiring, connect

P = ParamSpec("P")
Result = TypeVar("Result")

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 10.0  # how long the meeting place may take to answer, at least

Record = Mapping[str, Any]
"""What a worker says of its state at a meeting, as JSON can hold it."""


@dataclass(frozen=True)
class Entry:
    """A worker at a meeting. `record`: None where it has no state of the job. `looks_on`: it has it all the same, but
    for the last steps."""

    name: str
    record: Record | None
    looks_on: bool = False


@dataclass(frozen=True)
class Generation:
    """The workers that were agreed on, in their order; this one is number `index` of them."""

    number: int
    entries: tuple[Entry, ...]
    index: int

    @property
    def names(self) -> list[str]:
        """The workers' names, which no other worker ever has."""
        return [entry.name for entry in self.entries]


Method = Callable[Concatenate["Membership", P], Result]


def _asked(method: Method[P, Result]) -> Method[P, Result]:
    """A method that runs on the worker's first rank; what it returns, which JSON can hold, or raises, all ranks do."""

    def ask(self: Membership, /, *arguments: P.args, **options: P.kwargs) -> Result:
        return self.relay.ask(lambda: method(self, *arguments, **options))

    return ask


class Membership:
    """One worker's part in the agreement on who is in the job; of one of its ranks, where it is a node.

    Every rank of a node makes the same calls, but for those of `claims`, and for `wanted` and `leave`, which say and do
    something on the first rank alone. Every call may raise MembershipError, which is final.

    `generation`: the last one that this worker was in; `departures`: what the first rank saw of who was in the one
    before, and is not in it. `relay`: between the node's ranks. `heart`: of the first one. `claims`: see Claims.
    """

    heart: Heart
    departures: Sequence[str] = ()
    looks_on = False
    idle: Callable[[], object] = staticmethod(lambda: None)  # called again and again at meetings

    def __init__(
        self,
        settings: Elastic,
        store: Store,
        address: str,
        comm: Communicator | None = None,
        errors: Sequence[type[Exception]] = (),
        admits: Callable[[Sequence[Record | None]], bool] | None = None,
    ) -> None:
        """`store`: the meeting place's, at `address`. `comm`: of the node's ranks. `errors`: see Relay. `admits`:
        whether newcomers may join workers that say so of their state, else at a later meeting; and a worker that the
        others have gone on without does not join anew. By default they may, and it does."""
        self.settings = settings
        self._admits = admits
        self.name = f"{socket.gethostname()}:{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.generation: Generation | None = None
        self._place = store
        seconds = max(settings.silence, _ANSWER_SECONDS)
        self._store = LimitedStore(PrefixStore(f"thinwire/{settings.job}", store), address, seconds)
        self.claims = Claims(self._store, self.name)
        self.relay = Relay(comm, settings.join_timeout + settings.timeout, errors, self.leave)
        self._arrive()

    @_asked
    def _arrive(self) -> None:
        self._store.add("workers", 1)  # is anybody there?
        self.heart = Heart(self._another_store(), self.name, self.settings.silence)

    @_asked
    def agree_on(self, settings: Mapping[str, Any], about: str = "settings") -> None:
        """Leave and raise ValueError, naming a difference, unless these are what the job's first worker has; `about`:
        what they are of."""
        try:
            self._store.check_alike(settings, about)
        except ValueError:
            self.leave()
            raise

    @_asked
    def begin(self) -> None:
        """Say that the job has weights which count: whoever comes from now on takes them over."""
        self._store.write("begun", "1")

    @property
    @_asked
    def begun(self) -> bool:
        """Whether a worker has said so."""
        return self._store.read("begun") is not None

    @_asked
    def why_meet(self, own_reason: str) -> str:
        """Why all workers have to meet now, empty where they need not; `own_reason`: the first rank's own, if any."""
        return own_reason or self.heart.disturbed

    def takes(self, step: int) -> None:
        """Note that this worker takes a step with the others, which they may not have ended before."""
        if self.relay.leads:
            self.heart.step = step

    @property
    def wanted(self) -> bool:
        """Whether a worker waits to join, as the first rank knows."""
        return self.relay.leads and self.heart.wanted

    # Meetings

    def meet(self, record: Record | None, *, alarm: bool) -> Generation:
        """Agree with the others on the next generation, and be in it.

        `record`: this worker's state, None where it has none; it counts as none where others have met without this
        worker. `alarm`: call those who do not know yet that a meeting is held.
        """
        before = [] if self.generation is None else self.generation.names
        found = self._met(record, alarm)
        self.generation = Generation(found["number"], tuple(Entry(**one) for one in found["entries"]), found["index"])
        lost = [name for name in before if self.relay.leads and name not in self.generation.names]
        self.departures = [self.heart.fate(name) or f"{name} did not come" for name in lost]
        return self.generation

    @_asked
    def _met(self, record: Record | None, alarm: bool) -> dict[str, Any]:
        while True:
            if self.heart.is_left_behind:
                raise MembershipError(
                    f"the others of job {self.settings.job!r} have ended it after {self.heart.ended} common steps, "
                    "and this one has begun a further one, as who joins after the last step might: end the loop before "
                    "a step, `while optimizer.steps < STEPS`"
                )
            number = self._next_open()
            stayed = self.generation is not None and self.generation.number == number - 1
            if self._admits is not None and record is not None and not stayed:
                raise MembershipError(
                    f"the other workers of job {self.settings.job!r} took this one for dead and went on without it, as "
                    f"it had not answered for {self.settings.silence:g} s: start it again to join them"
                )
            record = record if stayed else None
            self._store.wait_for(self.heart)
            if alarm and stayed:
                self._store.write(f"{number}/alarm", "1")
            entry = Entry(self.name, record, self.looks_on)
            place = self._store.add(f"{number}/count", 1) - 1
            self._store.write(f"{number}/entry/{place}", json.dumps(asdict(entry)))
            entries = self._decided(number, record)
            names = [entry.name for entry in entries]
            if self.name in names:
                self.heart.follow(number, names)
                return asdict(Generation(number, tuple(entries), names.index(self.name)))

    def _next_open(self) -> int:
        number = max(int(self._store.read("latest") or 0), self.generation.number if self.generation else 0) + 1
        while self._store.read(f"{number}/members") is not None:
            number += 1
        return number

    def _decided(self, number: int, record: Record | None) -> list[Entry]:
        """Wait until generation `number` is decided, and propose it where this worker may."""
        before = [entry.name for entry in _parsed(self._store.read(f"{number - 1}/members"))]
        self.heart.watch(before)
        began = time.monotonic()
        while True:
            decided = self._store.read(f"{number}/members")
            if decided is None and (found := self._proposal(number, record, before, time.monotonic() - began)):
                decided = self._store.propose(f"{number}/members", json.dumps([asdict(entry) for entry in found]))
                self._store.write("latest", str(number))
            if decided is not None:
                return _parsed(decided)
            if self.name not in before:
                self._check_goes_on()
            self.idle()
            time.sleep(_POLL_SECONDS)

    def _check_goes_on(self) -> None:
        if self._store.read("finished"):
            raise MembershipError(
                f"job {self.settings.job!r} is over: there is nothing to join. Its next run needs another "
                "Elastic(job=...), or a new meeting place"
            )

    def _proposal(self, number: int, record: Record | None, before: Sequence[str], waited: float) -> list[Entry] | None:
        """Whom this worker would have in a generation after that of the workers `before`; None to wait on."""
        here, settings = self._present(number), self.settings
        names = {entry.name for entry in here}
        missing = [name for name in before if name not in names and not self.heart.fate(name)]
        # Who was in the last generation, and got no state in it, is a newcomer still.
        late = self._admits is not None and record is None and self._store.read("begun") is not None
        stay = [one for one in here if one.name in before and (one.record is not None or self._admits is None)]
        if self.name in before and not late:
            complete = not missing or waited >= settings.timeout
        elif before:  # a newcomer leaves it to those who have the job's state
            complete = False
            if not missing and not stay:
                self._check_goes_on()  # they end it, and then are gone
                raise MembershipError(
                    f"none of the {len(before)} last workers of job {settings.job!r} is left. Start a new job, from a "
                    "checkpoint where there is one, with another Elastic(job=...) or a new meeting place"
                )
        else:
            complete = len(here) >= settings.workers or waited >= settings.join_timeout
        order = {name: place for place, name in enumerate(before)}
        admits = self._admits is None or not stay or self._admits([entry.record for entry in stay])
        if complete and len(here if admits else stay) >= (settings.min_workers if admits else 1):
            return sorted(here if admits else stay, key=lambda entry: order.get(entry.name, len(order)))
        if waited >= settings.join_timeout and not (self.name in before and missing):
            raise MembershipError(
                f"job {settings.job!r}: {len(here)} workers have met within {waited:.0f} s; the job has min_workers="
                f"{settings.min_workers}" + (f", and {len(before)} others did not let them in" if before else "")
            )
        return None

    def _present(self, number: int) -> list[Entry]:
        """Who has come to the meeting and is alive, in the order of coming."""
        places = range(self._store.add(f"{number}/count", 0))
        written = [self._store.read(f"{number}/entry/{place}") for place in places]
        found = [Entry(**json.loads(one)) for one in written if one is not None]
        self.heart.watch([one.name for one in found])
        return [one for one in found if one.name == self.name or not self.heart.fate(one.name)]

    # Before a newcomer comes to a meeting

    def look_on(self) -> Messages | None:
        """Wait until the workers that train begin to tell of it; connected with them, as rank 0. None if there is a
        meeting to go to, or if they do not, as one alone."""
        if len(_parsed(self._store.read(f"{self._next_open() - 1}/members"))) < 2:
            return None
        number, began = self._store.add("onlookers", 1) - 1, time.monotonic()
        self._store.write(f"onlooker/{number}", self.name)
        while (size := self._store.read(f"onlooker/{number}/size")) is None:
            meets = self._store.read(f"{self._next_open()}/count") or self._store.read("finished")
            if meets or time.monotonic() - began > self.settings.join_timeout:
                return None
            time.sleep(_POLL_SECONDS)
        tellers = [entry.name for entry in _parsed(self._store.read(f"{self._next_open() - 1}/members"))]
        return self._linked(number, 0, int(size), tellers) if int(size) > 1 else None

    def tell(self) -> Future[Messages] | None:
        """Be connected, in the background, with the next one that waits to look on; None if this worker is alone."""
        assert self.generation is not None
        number, index, size = self.heart.tell(), self.generation.index, len(self.generation.entries)
        if index == 0:
            self._store.write(f"onlooker/{number}/size", str(size + 1 if size > 1 else 0))
        # None where it comes later: two workers may have called for one onlooker, a step apart.
        onlooker = [name for name in (self._store.read(f"onlooker/{number}"),) if name is not None]
        return in_background(lambda: self._linked(number, index + 1, size + 1, onlooker)) if size > 1 else None

    def _linked(self, number: int, rank: int, size: int, others: Sequence[str]) -> Messages:
        limit = self.settings.timeout
        self.heart.watch(others)
        wiring = self._wired(f"onlooker/{number}", rank, size, lambda: "; ".join(self.heart.fates(others)))
        comm = GenerationCommunicator(wiring, limit, lambda: "")
        assert wiring.group is not None
        return Messages(wiring.group, limit, lambda in_flight: comm.abandon(others=in_flight))

    # What a generation does together

    def connect(self, members: Sequence[int], purpose: str) -> WorkerGroup:
        """Connect these of the generation's workers, this one among them, in this order. Collective.

        Raises CommunicationError where one of them dies meanwhile, or calls a meeting.
        """
        made: list[Communicator] = []
        self.relay.ask(lambda: made.append(self._connected(members, purpose)))
        return WorkerGroup(self.relay, made[0] if made else None)

    def _connected(self, members: Sequence[int], purpose: str) -> Communicator:
        generation = self.generation
        assert generation is not None, "connect() follows meet()"
        limit = self.settings.timeout
        if len(members) == 1:
            return threads.single(limit)
        rank = members.index(generation.index)
        wiring = self._wired(f"{generation.number}/{purpose}", rank, len(members), lambda: self.heart.disturbed)
        return GenerationCommunicator(wiring, limit, lambda: self.heart.disturbed)

    def _wired(self, path: str, rank: int, size: int, disturbed: Callable[[], str]) -> Wiring:
        """Gloo connects for as long as its timeout is, and learns of no death meanwhile: this one asks `disturbed`."""
        wiring = in_background(lambda: connect(self._another_store(), path, rank, size, self.settings.timeout))
        while not (why := disturbed()) and not wait([wiring], _POLL_SECONDS).done:
            pass
        try:
            if wiring.done():
                return wiring.result()
        except RuntimeError as error:
            why = str(error)
        raise CommunicationError(f"the workers did not connect: {why}")

    @_asked
    def finish(self, steps: int) -> bool:
        """Wait until all of the generation have come here; False where they have to meet first. `steps`: how many this
        worker has taken, after which no other may take a further one: see Heart.

        After True this worker is out of the job, and the job is over for all who would join.
        """
        generation = self.generation
        assert generation is not None, "finish() follows meet()"
        self._store.write(f"{generation.number}/ended", str(steps))
        key, size = f"{generation.number}/done", len(generation.entries)
        done = self._store.add(key, 1)
        while done < size:
            time.sleep(_POLL_SECONDS)
            disturbed = self.heart.disturbed  # before the count: who is done may leave
            done = self._store.add(key, 0)
            if disturbed and done < size:
                return False
        self._store.write("finished", "1")
        self.leave()
        return True

    def leave(self) -> None:
        """Tell the others not to wait for this worker."""
        if heart := vars(self).get("heart"):  # the first rank has one, once it has arrived
            heart.stop(gone=True)

    def _another_store(self) -> Store:
        """Over a connection of its own: one that waits for a key answers nothing else."""
        return PrefixStore(f"thinwire/{self.settings.job}", self._place.clone())  # type: ignore[attr-defined]


class Claims:
    """Numbers from 0 up that the ranks of a job claim, each for itself, whenever it likes."""

    def __init__(self, store: LimitedStore, worker: str) -> None:
        self._store, self._worker, self._taken = store, worker, 0

    def claim(self, count: int) -> int:
        """The first of `count` numbers that no other rank of the job gets or has got."""
        return self._store.add("claimed", count) - count

    @property
    def taken(self) -> int:
        """How many numbers are claimed; when last asked, if the meeting place is lost, as after the job's end."""
        with suppress(MembershipError):
            self._taken = self.claim(0)
        return self._taken

    def go_on_from(self, taken: int) -> None:
        """Leave out the numbers that another job had `taken`: once, however many workers ask for it."""
        if self._store.propose("goes on claiming", self._worker) == self._worker:
            self.claim(max(0, taken - self.claim(0)))

    def check_meaning(self, meaning: Mapping[str, Any]) -> None:
        """Raise ValueError unless numbers mean the same on the first rank that has said what they do."""
        self._store.check_alike(meaning, "numbers")


def _parsed(decided: str | None) -> list[Entry]:
    return [Entry(**entry) for entry in json.loads(decided or "[]")]
