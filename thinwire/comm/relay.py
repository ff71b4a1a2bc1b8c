"""Between the ranks of a node that is one worker of an elastic job: its first rank speaks with the other workers, and
relays what came of it, errors included, to its other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.comm.communicator import Communicator
from thinwire.comm.elastic import MembershipError
from thinwire.comm.errors import CommunicationError

Result = TypeVar("Result")

_COUNT, _FIRST = 8, 256
"""Bytes in which a message says its length, and bytes of its first part, which takes most messages whole."""


class Relay:
    """Between the ranks of a node, of which rank 0, `leads`, speaks with other nodes. Every rank makes the same calls.

    A rank that is lost here ends the node: every call then raises MembershipError, once `when_lost` has been called.
    """

    def __init__(
        self,
        comm: Communicator | None,
        patience: float,
        errors: Sequence[type[Exception]] = (),
        when_lost: Callable[[], object] = lambda: None,
    ) -> None:
        """`comm`: of the node's ranks, None for a process on its own. `patience`: seconds that the leader may take for
        what it is asked. `errors`: kinds that the others should get as they are, the most special first; beside them
        those of communication, and ValueError."""
        self.leads = comm is None or comm.rank == 0
        self._comm = None if comm is None or comm.size == 1 else comm.duplicate(patience)
        self.alone = self._comm is None
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
        self._between(lambda comm: comm.broadcast(tensor))
        if inside:
            self._relay.spread(tensor)

    def barrier(self) -> None:
        """Return once every worker has called it."""
        self._between(Communicator.barrier)

    def _between(self, collective: Callable[[Communicator], object]) -> None:
        def call() -> None:
            assert self.comm is not None
            collective(self.comm)

        self._relay.ask(call)

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other workers."""
        return 0 if self.comm is None else self.comm.traffic.bytes_sent

    def close(self) -> None:
        """Release the communicator."""
        if self.comm is not None:
            self.comm.close()
