"""A whole node, or a single process, as one worker of an elastic job: its first rank agrees with the other workers on
who is in the job, and its other ranks hear of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from thinwire.comm.communicator import Communicator
from thinwire.comm.elastic import Elastic
from thinwire.comm.limited_store import LimitedStore
from thinwire.comm.membership import Entry, Generation, Membership, Record, job_store
from thinwire.comm.relay import Relay

__all__ = ["NodeMembership", "WorkerGroup"]


class WorkerGroup:
    """Some of a generation's workers, connected by their first ranks. `comm`: on such a rank their communicator."""

    def __init__(self, relay: Relay, comm: Communicator | None) -> None:
        self.comm = comm
        self._relay = relay

    def broadcast(self, tensor: Tensor, *, inside: bool = True) -> None:
        """Copy the first worker's `tensor` into that of all; not `inside`: of their first ranks alone."""

        def between() -> None:
            assert self.comm is not None
            self.comm.broadcast(tensor)

        self._relay.ask(between)
        if inside:
            self._relay.spread(tensor)

    def barrier(self) -> None:
        """Return once every worker has called it."""

        def between() -> None:
            assert self.comm is not None
            self.comm.barrier()

        self._relay.ask(between)

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other workers."""
        return 0 if self.comm is None else self.comm.traffic.bytes_sent

    def close(self) -> None:
        """Release the communicator."""
        if self.comm is not None:
            self.comm.close()


class NodeMembership:
    """One rank's part in the agreement on who is in the job, as the ranks of `comm` are one worker.

    Its calls are those of Membership. Every rank makes them alike, but for `claim`, and for `wanted` and `leave`, which
    say and do something on the first rank alone.

    `generation`: the last one that this worker was in. `relay`: between the node's ranks.
    """

    def __init__(
        self, settings: Elastic, comm: Communicator, store: Store, address: str, errors: Sequence[type[Exception]] = ()
    ) -> None:
        """`store`: the meeting place's, at `address`. `errors`: see Relay."""
        self.settings = settings
        self.generation: Generation | None = None
        self._first: list[Membership] = []
        self._store: LimitedStore = job_store(settings, store, address)
        self.relay = Relay(comm, settings.join_timeout + settings.timeout, errors, self.leave)
        self.relay.ask(lambda: self._first.append(Membership(settings, store, address)))

    def agree_on(self, settings: Mapping[str, Any]) -> None:
        """See Membership."""
        self.relay.ask(lambda: self._first[0].agree_on(settings))

    def begin(self) -> None:
        """See Membership."""
        self.relay.ask(lambda: self._first[0].begin())

    @property
    def begun(self) -> bool:
        """See Membership."""
        return self.relay.ask(lambda: self._first[0].begun)

    def claim(self, count: int) -> int:
        """The first of `count` numbers, from 0 up, that no other rank of the job gets or has got; each rank asks for
        itself, whenever it likes."""
        return self._store.add("claimed", count) - count

    def why_meet(self, own_reason: str) -> str:
        """Why all workers have to meet now, empty where they need not; `own_reason`: the first rank's own, if any."""
        return self.relay.ask(lambda: own_reason or self._first[0].disturbed)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits to join, as the first rank knows."""
        return self.relay.leads and self._first[0].wanted

    def meet(self, record: Record | None, *, alarm: bool) -> Generation:
        """See Membership."""
        found = self.relay.ask(lambda: _plain(self._first[0].meet(record, alarm=alarm)))
        entries = tuple(Entry(**one) for one in found["entries"])
        self.generation = Generation(found["number"], entries, found["index"])
        return self.generation

    def connect(self, members: Sequence[int], purpose: str) -> WorkerGroup:
        """See Membership."""
        made: list[Communicator] = []
        self.relay.ask(lambda: made.append(self._first[0].connect(members, purpose)))
        return WorkerGroup(self.relay, made[0] if made else None)

    def finish(self) -> bool:
        """See Membership."""
        return self.relay.ask(lambda: self._first[0].finish())

    def leave(self) -> None:
        """See Membership."""
        for one in self._first:
            one.leave()


def _plain(generation: Generation) -> dict[str, Any]:
    return {
        "number": generation.number,
        "entries": [asdict(entry) for entry in generation.entries],
        "index": generation.index,
    }
