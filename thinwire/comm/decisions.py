"""Small collectives whose results all survivors of a death have, or none: what workers that come and go decide together
in the middle of a step, when it can no longer be begun anew."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm.collectives import Work
from thinwire.comm.communicator import Communicator
from thinwire.comm.elastic import until_done
from thinwire.comm.errors import Call, CommunicationError, RollCall

Collective = Callable[[Communicator], list[bytes]]


class Bystander(Communicator):
    """Of ranks that others are: what only they do is a RuntimeError, so that no worker meets to try it again."""

    def __init__(self, size: int, timeout: float) -> None:
        super().__init__(0, size, "single", timeout)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("workers that come and go decide by gathered messages and broadcasts alone")

    _start_all_to_all = _start_all_gather = _start_broadcast = _start_all_reduce = _subgroup = _refuse

    @override
    def _roll_call(self, call: Call) -> RollCall:
        return RollCall({}, ())


class Decisions(Bystander):
    """Broadcasts and gathered messages over one group of workers after another, numbered over all of these.

    One that fails is repeated after `meet` among those who are left then, unless a survivor has its result: `adopt`
    takes that over. `passed`: how many are decided here. Others, as reductions, are not for what must be repeatable.
    """

    def __init__(self, comm: Communicator, meet: Callable[[CommunicationError], object]) -> None:
        """`meet`: has the workers meet, and calls `adopt` and `follow` before it returns."""
        super().__init__(comm.size, comm.timeout)
        self._meet = meet
        self.passed = 0
        self._kept: dict[int, list[bytes]] = {}  # by number, of the step in flight
        self.follow(comm)

    def follow(self, comm: Communicator) -> None:
        """Decide over this group from now on."""
        self._among, self.rank, self.size = comm, comm.rank, comm.size
        self.global_ranks = comm.global_ranks

    def kept_since(self, number: int) -> str:
        """The results of decision `number` and those after it, as text for `adopt`."""
        found = [self._kept[one] for one in range(number, self.passed)]
        return json.dumps([[base64.b64encode(part).decode() for part in one] for one in found])

    def adopt(self, first: int, results: str) -> None:
        """Take over results of decisions from number `first` on, which others have and this worker may lack."""
        for number, one in enumerate(json.loads(results), first):
            self._kept.setdefault(number, [base64.b64decode(part) for part in one])

    def share(self, group: Communicator, known: Mapping[int, int]) -> None:
        """Have all of `group` know the decisions that any does; `known`: how many, by rank. Collective of these."""
        first, last = min(known.values(), default=0), max(known.values(), default=0)
        if first < last:
            source = min(number for number, one in known.items() if one == last)
            mine = self.kept_since(first) if group.rank == source else ""
            self.adopt(first, group.all_gather_bytes(mine.encode(), "share decisions")[source].decode())

    def forget(self) -> None:
        """Keep no decision any longer: all others have passed every one so far."""
        self._kept = {}

    @override
    def all_gather_bytes(self, payload: bytes, purpose: str = "") -> list[bytes]:
        return self._decide(lambda comm: comm.all_gather_bytes(payload, purpose))

    @override
    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: Literal[False] | bool = False) -> Work:
        """Copy ``tensor`` of rank ``root``, of whichever group decides it, into ``tensor`` of every worker."""

        def send(comm: Communicator) -> list[bytes]:
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)  # one that fails may leave half of it
            comm.broadcast(copy, root)
            return [copy.cpu().view(-1).view(torch.uint8).numpy().tobytes()]

        result = self._decide(send)
        if tensor.numel():
            values = torch.frombuffer(bytearray(result[0]), dtype=tensor.dtype)
            tensor.detach().copy_(values.view(tensor.shape))
        return Work()

    def _decide(self, collective: Collective) -> list[bytes]:
        def decide() -> None:
            if self.passed not in self._kept:  # nor has a survivor shared it
                self._kept[self.passed] = collective(self._among)

        until_done(decide, self._meet)
        self.passed += 1
        return self._kept[self.passed - 1]
