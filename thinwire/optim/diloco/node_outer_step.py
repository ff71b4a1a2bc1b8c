"""The outer step of a whole node: its first rank takes it with the other workers, and its other ranks get what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm import CommunicationError, Communicator
from thinwire.comm.node_membership import Relay
from thinwire.compress.codecs import Codec
from thinwire.optim.diloco.fragments import Fragment
from thinwire.optim.diloco.outer import Arrived, OuterSettings, OuterStep, WeightPair, make_outer_step

__all__ = ["NodeOuterStep", "make_node_outer_step"]


class NodeOuterStep(OuterStep):
    """`of_leader` on the node's first rank; on the others nothing, which own nothing of the fragment.

    What goes wrong between nodes goes wrong in `arrive`, on every rank of the node.
    """

    def __init__(self, relay: Relay, numel: int, device: torch.device, of_leader: OuterStep | None) -> None:
        self.own = slice(0, 0) if of_leader is None else of_leader.own
        self._relay = relay
        self._numel = numel
        self._device = device
        self._of_leader = of_leader
        self._nothing = torch.zeros(0, device=device)
        self._error: CommunicationError | None = None

    @property
    def momentum(self) -> Tensor:  # type: ignore[override]
        """See OuterStep."""
        return self._nothing if self._of_leader is None else self._of_leader.momentum

    def leave(self, weights: Sequence[WeightPair], step: int, settings: int, *, meet: bool = False) -> None:
        """See OuterStep."""
        self._error = None
        if self._of_leader is not None:
            try:
                self._of_leader.leave(weights, step, settings, meet=meet)
            except CommunicationError as error:
                self._error = error

    def may_pass_on(self) -> bool:
        """See OuterStep."""
        return self._error is None and self._of_leader is not None and self._of_leader.may_pass_on()

    def pass_on(self, settings: OuterSettings) -> None:
        """See OuterStep."""
        if self._of_leader is not None and self._error is None:
            try:
                self._of_leader.pass_on(settings)
            except CommunicationError as error:
                self._error = error

    def arrive(self) -> Arrived:
        """See OuterStep. Collective inside the node."""
        here: list[Arrived] = []
        form, meet = self._relay.ask(lambda: self._arrive_between(here))
        if form is None:
            return Arrived(None, meet)
        dtype = getattr(torch, form)
        update = here[0].update if here else None
        if update is None:
            update = torch.empty(self._numel, dtype=dtype, device=self._device)
        self._relay.spread(update)
        return Arrived(update, meet)

    def settle(self, finite: bool) -> None:
        """See OuterStep."""
        if self._of_leader is not None:
            self._of_leader.settle(finite)

    def reset(self) -> None:
        """See OuterStep."""
        if self._of_leader is not None:
            self._of_leader.reset()

    @property
    def worker_place(self) -> slice:
        """See OuterStep."""
        return slice(0, 0) if self._of_leader is None else self._of_leader.worker_place

    @property
    def worker_residual(self) -> Tensor | None:
        """See OuterStep."""
        return None if self._of_leader is None else self._of_leader.worker_residual

    @property
    def owner_residual(self) -> Tensor | None:
        """See OuterStep."""
        return None if self._of_leader is None else self._of_leader.owner_residual

    def _arrive_between(self, here: list[Arrived]) -> tuple[str | None, bool]:
        """On the first rank: what arrives goes into `here`; the name of its dtype, None where nothing does."""
        assert self._of_leader is not None
        if self._error is not None:
            raise self._error
        arrived = self._of_leader.arrive()
        here.append(arrived)
        form = None if arrived.update is None else str(arrived.update.dtype).removeprefix("torch.")
        return form, arrived.meet


def make_node_outer_step(
    relay: Relay, comm: Communicator | None, fragment: Fragment, codec: Codec, index: int, device: torch.device
) -> OuterStep:
    """Of fragment number `index`, over the workers whose first ranks are those of `comm`, which no others have; what
    has left can be undone."""
    of_leader = None
    if comm is not None:
        of_leader = make_outer_step(comm, None, fragment, codec, index, device, reversible=True)
    return of_leader if relay.alone and of_leader else NodeOuterStep(relay, fragment.numel, device, of_leader)
