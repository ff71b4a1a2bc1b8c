"""A whole node, or a single process, as one worker of an elastic job: its first rank agrees with the other workers on
who is in the job, and relays what came of it, errors included, to its other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from thinwire.comm.communicator import Communicator
from thinwire.comm.elastic import Elastic, LimitedStore, MembershipError
from thinwire.comm.errors import CommunicationError
from thinwire.comm.membership import Entry, Generation, Membership, Record, job_store

Result = TypeVar("Result")

_COUNT, _FIRST = 8, 256
"""Bytes in which a message says its length, and bytes of its first part, which takes most messages whole."""


class Relay:
    """Between the ranks of a node, of which rank 0, `leads`, speaks with other nodes. Every rank makes the same calls.

    A rank that is lost here ends the node: every call then raises MembershipError, once `when_lost` has been called.
    """

    def __init__(
        self,
        comm: Communicator,
        patience: float,
        errors: Sequence[type[Exception]] = (),
        when_lost: Callable[[], object] = lambda: None,
    ) -> None:
        """`patience`: seconds that the leader may take for what it is asked. `errors`: kinds that the others should get
        as they are, the most special first; beside them those of communication, and ValueError."""
        self.leads = comm.rank == 0
        self.alone = comm.size == 1
        self._comm = None if self.alone else comm.duplicate(patience)
        self._kinds: tuple[type[Exception], ...] = (*errors, MembershipError, CommunicationError, ValueError)
        self._when_lost = when_lost

    def ask(self, question: Callable[[], Result]) -> Result:
        """What `question` returns on the leader, a value that JSON can hold; what it raises there all raise."""
        if self.alone:
            return question()
        answer: dict[str, object] = {}
        error: Exception | None = None
        if self.leads:
            try:
                answer["value"] = question()
            except self._kinds as raised:
                error = raised
                kind = next(number for number, one in enumerate(self._kinds) if isinstance(raised, one))
                answer |= {"kind": kind, "message": str(raised)}
        reply = json.loads(self._tell(json.dumps(answer).encode()))
        if error is not None:
            raise error
        if "kind" in reply:
            raise self._kinds[reply["kind"]](reply["message"])
        value: Result = reply["value"]
        return value

    def spread(self, tensor: Tensor) -> None:
        """Copy the leader's `tensor` into that of every rank."""
        if self._comm is not None:
            self._send(self._comm, tensor)

    def lost(self, error: CommunicationError) -> MembershipError:
        """What to raise where a collective of the node's ranks has failed, of which the other nodes are told."""
        self._when_lost()
        return MembershipError(
            f"a rank of this node is lost, and with it the node: the other nodes go on without it. {error}",
            ranks=error.ranks,
            collective=error.collective,
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to the others of its node, by these calls."""
        return 0 if self._comm is None else self._comm.traffic.bytes_sent

    def close(self) -> None:
        """Release the node's communicator."""
        if self._comm is not None:
            self._comm.close()

    def _tell(self, message: bytes) -> bytes:
        assert self._comm is not None
        whole = len(message).to_bytes(_COUNT, "little") + message
        first = self._tell_part(self._comm, whole[:_FIRST], _FIRST)
        length = _COUNT + int.from_bytes(first[:_COUNT], "little")
        if length > _FIRST:
            first += self._tell_part(self._comm, whole[_FIRST:], length - _FIRST)
        return first[_COUNT:length]

    def _tell_part(self, comm: Communicator, part: bytes, length: int) -> bytes:
        mine = bytearray(part.ljust(length, b"\0")[:length])  # a follower's own is not looked at
        data = torch.frombuffer(mine, dtype=torch.uint8).to(comm.control_device)
        self._send(comm, data)
        return data.cpu().numpy().tobytes()

    def _send(self, comm: Communicator, tensor: Tensor) -> None:
        try:
            comm.broadcast(tensor)
        except CommunicationError as error:
            raise self.lost(error) from error


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
        """Raise ValueError, naming a difference, unless these are what the job's first worker has."""
        self.relay.ask(lambda: self._first[0].agree_on(settings))

    def begin(self) -> None:
        """Say that the job has weights which count."""
        self.relay.ask(lambda: self._first[0].begin())

    @property
    def begun(self) -> bool:
        """Whether a worker has said so."""
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
        """Whether a worker waits to join, as the first rank knows."""
        return self.relay.leads and self._first[0].wanted

    def meet(self, record: Record | None, *, alarm: bool) -> Generation:
        """Agree with the other workers on the next generation, and be in it."""
        found = self.relay.ask(lambda: asdict(self._first[0].meet(record, alarm=alarm)))
        entries = tuple(Entry(**one) for one in found["entries"])
        self.generation = Generation(found["number"], entries, found["index"])
        return self.generation

    def connect(self, members: Sequence[int], purpose: str) -> WorkerGroup:
        """Connect these of the generation's workers."""
        made: list[Communicator] = []
        self.relay.ask(lambda: made.append(self._first[0].connect(members, purpose)))
        return WorkerGroup(self.relay, made[0] if made else None)

    def finish(self) -> bool:
        """Wait until all of the generation have come here; False if they have to meet first."""
        return self.relay.ask(lambda: self._first[0].finish())

    def leave(self) -> None:
        """Tell the others not to wait for this worker."""
        for one in self._first:
            one.leave()
