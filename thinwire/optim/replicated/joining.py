"""State for a newcomer of an elastic job, which all workers have alike between two steps: at once from one of them, for
which the others wait; or a part from each while they train, and after it the packets of every step since, by which the
newcomer takes these steps as well. docs/internals/elastic.md says how it enters then."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import CommunicationError, Communicator
from thinwire.comm.attendance import in_background
from thinwire.comm.membership import Membership
from thinwire.comm.pairwise import Messages
from thinwire.optim.home import be_as_far
from thinwire.optim.replicated.elastic_buckets import Arrival
from thinwire.optim.replicated.synchronizer import FreezeGroups
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.replica import checksum
from thinwire.zero.saved_state import counters_of

Told = Mapping[str, Any]
Step = tuple[Told, list[Tensor]]

_STRIDE = 61
"""Of the elements by which weights and state are compared: all of the weights are every `resync_interval` steps."""


class CommonState:
    """What all workers have alike between two steps: weights, state, and where the run is.

    `groups`: the optimizer's. `save` and `load`: where the run is, but for what tensors hold, as JSON can hold it.
    """

    def __init__(
        self,
        layout: FreezeGroups,
        groups: list[dict[str, Any]],
        save: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        self.groups, self.save = groups, save
        self._layout, self._load = layout, load

    def begin_as(self, where: dict[str, Any]) -> None:
        """Be as far as another worker, but for what tensors hold."""
        self._load(where)
        for group, saved in zip(self._layout.groups, where["freeze_groups"], strict=True):
            be_as_far(group, self._layout.table.names, saved)
            if group.shows_own_weights:
                group.storage.keep_common()

    def tensors(self) -> list[Tensor]:
        """Weights and state, in one order."""
        found = self._layout.table.weights()
        for bucket in self._layout.buckets:
            found += [bucket.state[name][: bucket.layout.numel] for name in sorted(bucket.state)]
        return found

    def end(self) -> None:
        """Go on from tensors that were written."""
        self._layout.table.publish_all()
        for group in self._layout.groups:
            group.restore()

    def check_alike(self, comm: Communicator, names: Sequence[str]) -> None:
        """Raise CommunicationError unless all workers hold the same bits of some elements. Collective."""
        mine = json.dumps([checksum(one.reshape(-1)[::_STRIDE]) for one in self.tensors()]).encode()
        digests = comm.all_gather_bytes(mine, "compare bits")
        for name, one in zip(names, digests, strict=True):
            if one != digests[0]:
                raise CommunicationError(f"{name}, which has looked on, holds other bits than {names[0]}")

    def hand_over(self, group: Communicator, told: Told) -> Told:
        """Have what the first worker of `group` has, and what it has `told`; others call `end` then. Collective."""
        mine = json.dumps({**told, "where": self.save()}).encode() if group.rank == 0 else b""
        said: Told = json.loads(group.all_gather_bytes(mine, "hand over its state")[0])
        if group.rank:
            self.begin_as(said["where"])
        broadcast_from_rank_0(group, self.tensors())
        return said


# Beside training

_PIECE = 1 << 20
_SAYS_EVERY = 5.0


def _pieces(tensors: Sequence[Tensor]) -> list[tuple[int, slice]]:
    """In which elements of which tensors all of them travel; the sender of piece n is worker n modulo their number."""
    return [
        (number, slice(first, min(first + _PIECE, one.numel())))
        for number, one in enumerate(tensors)
        for first in range(0, one.numel(), _PIECE)
    ]


class Teller:
    """One of `size` workers that tell an onlooker, from a thread of its own, of the state as it is now; number 0 of
    them tells `where` it is, and then of steps. `connected`: the onlooker, which is rank 0, and they."""

    def __init__(
        self,
        connected: Future[Messages],
        number: int,
        size: int,
        where: Told,
        tensors: Sequence[Tensor],
    ) -> None:
        self._leads = number == 0
        self._where = where
        flat = [one.detach().reshape(-1) for one in tensors]
        self._parts = [flat[one][place].to("cpu", copy=True) for one, place in _pieces(tensors)[number::size]]
        self._room = sum(one.nbytes for one in flat)
        self._steps: SimpleQueue[Step | None] = SimpleQueue()
        self._telling = in_background(lambda: self._tell(connected))

    def add(self, told: Told, packets: list[Tensor]) -> bool:
        """Tell of a step that was taken. False if it need not be told: number 0 alone tells of steps, if the onlooker
        is there and what waits takes no more room than the state."""
        waits = self._steps.qsize() * sum(one.nbytes for one in packets)
        if not self._leads or self._telling.done() or waits > self._room:
            return False
        self._steps.put((told, packets))
        return True

    def end(self) -> None:
        """Tell of no further step."""
        self._steps.put(None)

    def _tell(self, connected: Future[Messages]) -> None:
        with connected.result() as link:
            if self._leads:
                link.send_bytes(json.dumps(self._where).encode(), 0)
            for part in self._parts:
                link.send(part, 0)
            self._parts = []
            while self._leads and (step := self._steps.get()) is not None:
                told, packets = step
                shapes = [list(one.shape) for one in packets]
                link.send_bytes(json.dumps({**told, "shapes": shapes, "behind": self._steps.qsize()}).encode(), 0)
                for one in packets:
                    link.send(one.cpu(), 0)
            if self._leads:
                link.send_bytes(b"{}", 0)


class Telling:
    """A worker's part in telling those who look on of the state and of every step, while it trains."""

    def __init__(self, membership: Membership, state: CommonState) -> None:
        self._membership, self._state = membership, state
        self._tellers: list[Teller] = []
        self._links: list[Future[Messages]] = []

    def begin(self, told: Told) -> None:
        """Tell who waits of the state as it is now, beside what is `told`."""
        generation, link = self._membership.generation, self._membership.tell()
        if generation is not None and link is not None:
            where, size = {**told, "where": self._state.save()}, len(generation.entries)
            self._links.append(link)
            self._tellers.append(Teller(link, generation.index, size, where, self._state.tensors()))

    def go_on(self, arrival: Arrival, decisions: Callable[[], str], shared_data: Told) -> None:
        """Tell of a step that was taken by what `arrival` holds and these `decisions`."""
        if self._tellers:
            told = {"arrival": arrival.but_packets().decode(), "decisions": decisions(), "shared_data": shared_data}
            told |= counters_of("", self._state.groups)
            for teller in [one for one in self._tellers if not one.add(told, arrival.packets)]:
                teller.end()
                self._tellers.remove(teller)

    def end(self) -> None:
        """Tell of no further step."""
        while self._tellers:
            self._tellers.pop().end()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent to those who look on."""
        return sum(one.result().bytes_sent for one in self._links if one.done() and not one.exception())


class Onlooker:
    """A newcomer's view of the workers that train: rank 0 of `link`."""

    def __init__(self, link: Messages) -> None:
        self._link = link
        self._steps: SimpleQueue[Step | Exception | None] = SimpleQueue()

    def take_state(self, state: CommonState) -> Told:
        """Have it as it was when the others began to tell; what the first of them has said of it."""
        try:
            return self._take_state(state)
        except CommunicationError:
            self._link.close(True)
            raise

    def _take_state(self, state: CommonState) -> Told:
        where: Told = json.loads(self._link.receive_bytes(1))
        state.begin_as(where["where"])
        tensors, size = state.tensors(), self._link.size - 1
        pieces = _pieces(tensors)
        total, done, said = sum(one.nbytes for one in tensors), 0, time.monotonic()
        flat = [one.reshape(-1) for one in tensors]
        parts = [(flat[number][place], 1 + turn % size) for turn, (number, place) in enumerate(pieces)]
        # As many at once as there are senders, so that none waits for another.
        for values, (part, wait) in zip((one for one, _ in parts), _ahead(size, self._receive(parts)), strict=True):
            wait()
            if part is not values:
                values.copy_(part)
            done += part.nbytes
            if time.monotonic() - said > _SAYS_EVERY:
                said = time.monotonic()
                print(f"thinwire: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB of state", file=sys.stderr, flush=True)
        for one, values in zip(tensors, flat, strict=True):
            if values.data_ptr() != one.data_ptr():  # a copy, as it is not contiguous
                one.copy_(values.view(one.shape))
        state.end()
        in_background(self._receive_steps)
        return where

    def next_step(self) -> Step:
        """The next step that the others have taken, once they have. Raises CommunicationError if they tell of no
        more."""
        found = self._steps.get()
        if not isinstance(found, tuple):
            self._steps.put(found)  # for the next call
            raise CommunicationError("the workers tell of no further step") from found
        return found

    @property
    def has_step(self) -> bool:
        """Whether `next_step` would not wait."""
        return not self._steps.empty()

    def _receive_steps(self) -> None:
        failed: CommunicationError | None = None
        try:
            while told := json.loads(self._link.receive_bytes(1)):
                packets = [torch.empty(shape, dtype=torch.uint8) for shape in told["shapes"]]
                for one in packets:
                    self._link.receive(one, 1)()
                self._steps.put((told, packets))
        except CommunicationError as error:
            failed = error
        self._steps.put(failed)
        self._link.close(failed is not None)

    def _receive(self, parts: Sequence[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Callable[[], None]]]:
        for like, source in parts:
            part = like if like.device.type == "cpu" else torch.empty_like(like, device="cpu")
            yield part, self._link.receive(part, source)


def _ahead(count: int, ones: Iterator[Any]) -> Iterator[Any]:
    """The same, each begun `count` before it is needed."""
    begun = []
    for one in ones:
        begun.append(one)
        if len(begun) > count:
            yield begun.pop(0)
    yield from begun
