"""The entry of an optimizer into a job whose workers come and go: on whose ranks it is built, what all must have
alike, and how they meet until they can work together."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor

from thinwire.comm import CommunicationError, Communicator, threads
from thinwire.comm.agreement import on_every_rank
from thinwire.comm.elastic import Elastic, MembershipError, reach
from thinwire.comm.membership import Generation, Membership, Record
from thinwire.compress.packet import PacketError, SettingsError
from thinwire.version import __version__


def own_communicator(
    elastic: object, comm: Communicator | None, backend: str | None, nodes: object, stage: object
) -> Communicator:
    """The communicator of this worker's ranks, on which an elastic optimizer is built: `comm`, or of itself alone.

    Raises ValueError or TypeError for what elastic workers cannot have.
    """
    if not isinstance(elastic, Elastic):
        raise TypeError(f"elastic must be a thinwire.Elastic, got {elastic!r}")
    if backend not in (None, "gloo"):
        raise ValueError(
            f"elastic workers exchange over Gloo, got comm_backend_name={backend!r}: a worker that dies ends an MPI "
            "job, and NCCL's watchdog ends the processes of its peers"
        )
    if comm is not None and comm.backend == "mpi":
        raise ValueError(
            "the ranks of an elastic worker cannot be those of an MPI job, which ends as a whole where one dies: start "
            "each node's ranks with a torchrun of their own, and pass comm=thinwire.comm.init()"
        )
    if not isinstance(nodes, str):
        raise ValueError(
            f"an elastic worker is one process, or a node whose ranks are those of comm=, got nodes={nodes!r}: leave "
            "nodes as it is, and to make a torchrun's ranks one worker pass comm=thinwire.comm.init()"
        )
    if stage != 0 and (comm is None or comm.size == 1):
        raise ValueError(
            f"this elastic worker is one process, which has no other rank to shard with, got stage={stage!r}: "
            "use stage=0, or make a torchrun's ranks one worker with comm=thinwire.comm.init()"
        )
    return threads.single(elastic.timeout) if comm is None else comm


def enter_elastic_job(
    elastic: Elastic,
    comm: Communicator,
    settings: Mapping[str, Any],
    names: Sequence[str],
    parameters: Sequence[Tensor],
    admits: Callable[[Sequence[Record | None]], bool] | None = None,
) -> Membership:
    """Go to the meeting place, as the ranks of `comm` together; raises ValueError unless this worker's model and
    settings are the job's. Collective. `admits`: see Membership."""
    store, address = on_every_rank(
        comm, lambda: reach(elastic), "reach the meeting place", (ValueError, MembershipError)
    )
    membership = Membership(elastic, store, address, comm, (SettingsError, PacketError), admits)
    model = [
        (name, list(one.shape), str(one.dtype), one.requires_grad) for name, one in zip(names, parameters, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(model).encode()).hexdigest()[:16]
    own = {"parameters": len(model), "model": digest, "version of thinwire": __version__}
    membership.agree_on({**settings, **own})
    return membership


class StepPhase(IntEnum):
    """The part of a step that a worker is in, after the last of which it has had everything."""

    APPLYING = 0
    BETWEEN = 1  # steps, before the next one's data are chosen: here workers may join
    SENDING = 2


@dataclass(frozen=True)
class Position:
    """A worker's, as it says at a meeting: steps of which it has had everything, its phase since, and decisions that it
    knows. `begins_at`: what tells the state apart that it has loaded, if it has. Of those who divide state: the step of
    which it has all weights, the one after which it has last had what it is to hold, and what it holds, as bits."""

    brought: int
    phase: int
    decided: int
    begins_at: str = ""
    published: int = 0
    settled: int = -1
    held: str = "0"

    @property
    def at(self) -> tuple[int, int]:
        """Comparable between workers."""
        return self.brought, self.phase


def positions(generation: Generation) -> dict[int, Position]:
    """Of its workers, by number, but for those that are new."""
    return {number: Position(**one.record) for number, one in enumerate(generation.entries) if one.record is not None}


def first_and_late(generation: Generation, steps: Callable[[Position], int]) -> list[int]:
    """The first worker of those with most `steps`, and those with fewer; none if there are no such, or this worker is
    not one of them."""
    said = {number: steps(one) for number, one in positions(generation).items()}
    last = max(said.values(), default=0)
    late = [number for number, one in said.items() if one < last]
    members = [next(number for number, one in said.items() if one == last), *late] if late else []
    return members if generation.index in members else []


def may_be_joined(records: Sequence[Record | None]) -> bool:
    """Whether workers that say so are all between the same two steps."""
    said = [Position(**one) for one in records if one is not None]
    return all(one.at == said[0].at and one.phase == StepPhase.BETWEEN for one in said)


_ATTEMPTS = 10
"""Meetings in a row after which workers did not connect: they reach the meeting place, but not each other."""


def meet_and_join(
    membership: Membership,
    failure: CommunicationError | None,
    stand: Callable[[], Record | None],
    join: Callable[[Generation], None],
    where: Callable[[], str],
) -> Generation:
    """Be in the next generation that can work together; one of its workers prints who came, and was lost on the way.

    `failure`: why this worker calls a meeting; None where all come to it by themselves. `stand`: where this worker is,
    as a meeting takes it. `join`: connects it with a generation. `where`: from where that goes on, in words.
    """
    lost: list[str] = []
    for _ in range(_ATTEMPTS):
        generation = membership.meet(stand(), alarm=failure is not None)
        lost += membership.departures
        try:
            join(generation)
        except CommunicationError as error:
            if error.final:
                raise
            failure = error
        else:
            if membership.relay.leads and generation.index == 0 and generation.number > 1:
                new = sum(one.record is None for one in generation.entries)
                line = "; ".join([f"{len(generation.entries)} workers {where()}, {new} of them new", *lost])
                print(f"thinwire: {line}", file=sys.stderr, flush=True)
            return generation
    raise MembershipError(
        f"the workers met {_ATTEMPTS} times and could not connect: {failure}. Can each reach the others? "
        "GLOO_SOCKET_IFNAME says by which interface"
    )
