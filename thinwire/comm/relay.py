"""Between the workers of an elastic job, whose communicators are left with transfers in flight when some die; and
between the ranks of a node that is one worker: its first rank speaks with the other workers, and relays what came of
it, errors included, to its other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm.agreement import gather
from thinwire.comm.attendance import in_background
from thinwire.comm.collectives import Pending, Work
from thinwire.comm.communicator import Communicator, Start
from thinwire.comm.elastic import MembershipError
from thinwire.comm.errors import Call, CommunicationError, RollCall
from thinwire.comm.torch_backend import TorchCommunicator, Wiring

Result = TypeVar("Result")

_COUNT, _FIRST = 8, 256
"""Bytes in which a message says its length, and bytes of its first part, which takes most messages whole."""


class GenerationCommunicator(TorchCommunicator):
    """Of workers that come and go, over Gloo. `disturbed` says why they have to meet anew, and is empty where they need
    not: then nothing waits any longer. No rank holds a roll call: a meeting tells who is left."""

    _left: ClassVar[list[tuple[Wiring, list[Pending]]]] = []
    """Wirings that were abandoned, each with what was in flight: their threads look for it 100 times a second."""

    def __init__(self, wiring: Wiring, timeout: float, disturbed: Callable[[], str]) -> None:
        super().__init__(timeout=timeout, _wiring=wiring)
        self._disturbed = disturbed
        self._in_flight: list[Pending] = []

    def abandon(self, *, others: bool = False) -> None:
        """Close it, with transfers in flight that no caller waits for, and with `others` than its own. Its own end as
        soon as other workers close theirs; what they used is let go when another one is abandoned."""
        self._in_flight = [one for one in self._in_flight if not one.done()]
        if self._in_flight or others:
            self._abandon()
        if not self._let_go.alive and not others:
            self._left.append((self._wiring, self._in_flight))
        self.close()
        for one in [one for one in self._left if all(transfer.done() for transfer in one[1])]:
            with suppress(ValueError):  # of another thread's worker that does the same
                self._left.remove(one)
                in_background(one[0].let_go_of_kept)

    @override
    def _issue(self, name: str, signature: str, nbytes: int, start: Start, *options: Any, **named: Any) -> Work:
        def begin(call: Call) -> Pending:
            self._in_flight = [one for one in self._in_flight if not one.done()]
            self._in_flight.append(pending := start(call))
            return pending

        return super()._issue(name, signature, nbytes, begin, *options, **named)

    def _roll_call(self, call: Call) -> RollCall:
        return RollCall({}, (), self._disturbed())

    def _alarmed(self) -> bool:
        return bool(self._disturbed())


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

    def gather(self, value: object, purpose: str) -> list[Any]:
        """What each worker's first rank gives, by worker: small, and what JSON can hold."""

        def call() -> list[Any]:
            assert self.comm is not None
            return gather(self.comm, value, purpose)

        return self._relay.ask(call)

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
