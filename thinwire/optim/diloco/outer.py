"""The outer step of one fragment: the outer gradient's way over the wire, the owner's momentum, and the outer weights,
the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import CommunicationError, Communicator
from thinwire.comm.agreement import NodeLinks
from thinwire.comm.relay import Relay
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Exchange
from thinwire.compress.hierarchical_exchange import make_exchange
from thinwire.compress.kernels.loading import prepare_kernels, wait_for_kernels
from thinwire.compress.legs import Leg
from thinwire.compress.packet import Flags
from thinwire.optim.diloco.fragments import Fragment, Guard, OuterSettings, Told


@dataclass(frozen=True)
class WeightPair:
    """Of a piece of a fragment the `outer` weights and the worker's `own`, fp32 [elements]."""

    outer: Tensor
    own: Tensor


@dataclass(frozen=True)
class Arrived:
    """What an outer step subtracts from the outer weights, one value an element; None where some worker's weights were
    not finite, or all were outliers, so that no outer step was taken. `meet`: a worker said on leaving that all have to
    meet after it. `told`: what workers said, where there is a Guard."""

    update: Tensor | None
    meet: bool = False
    told: Told | None = None


@dataclass
class UnderWay:
    """A fragment that left after step `left_at` and is not taken in yet. `passed_on`: leg 2 has begun; `arrived`: what
    it brought, once that is here. `settings`: with which it left, whatever is set since. `departed`: the worker's own
    weights as they left, if what it does to them since is kept, fp32 [elements]."""

    fragment: int
    left_at: int
    settings: OuterSettings
    passed_on: bool = False
    arrived: Arrived | None = None
    departed: Tensor | None = None


@dataclass(frozen=True)
class OuterState:
    """What outer steps of a fragment leave behind for the next one.

    `momentum`: v of OuterStep, fp32, of the elements `own` of the fragment, those that this rank owns.
    `worker_residual`: what of leg 1 is still to be sent, of the elements `worker_place`; None where nothing is lost.
    `owner_residual`: the same of leg 2, of the elements `own`. `alike`: every rank holds the same.
    """

    own: slice
    momentum: Tensor
    worker_place: slice = field(default_factory=lambda: slice(0, 0))
    worker_residual: Tensor | None = None
    owner_residual: Tensor | None = None
    alike: bool = False

    def reset(self) -> None:
        """Forget momentum and residuals."""
        for one in (self.momentum, self.worker_residual, self.owner_residual):
            if one is not None:
                one.zero_()


class Together:
    """From workers' outer gradients of one fragment to what all subtract from the outer weights, over an exchange.

    With Δ_m = w° - w_m of worker m (DiLoCo, arXiv 2311.08105, Algorithm 1; C a codec, e and s its residuals):

        leg 1, worker m:  c_m = C(Δ_m + e_m),  e_m += Δ_m - c_m
        owner:            a = mean c_m,  v = μ v + a,  u = η (a + μ v),  q = C(u + s),  s += u - q
        leg 2, everyone:  w° -= q

    Use: `leave`, `pass_on`, `arrive`, in this order; a worker alone and a node's ranks do the same in their ways. The
    `guard`, or none on any rank, gives the c_m their weights.
    """

    def __init__(
        self, exchange: Exchange, device: torch.device, guard: Guard | None, comm: Communicator, links: NodeLinks | None
    ) -> None:
        self.guard = guard
        self._exchange = exchange
        self._comm = comm
        self._own = comm.rank if links is None else links.node
        self._members = [[rank] for rank in range(comm.size)] if links is None else links.groups.members
        self._telling: Leg | None = None
        self._told: Told | None = None
        self._momentum = torch.zeros(exchange.owner_place.stop - exchange.owner_place.start, device=device)
        self._next_momentum: Tensor | None = None

    @property
    def state(self) -> OuterState:
        """What is left behind, to be read and written in place until the next outer step."""
        one = self._exchange
        return OuterState(one.owner_place, self._momentum, one.worker_place, one.worker_residual, one.owner_residual)

    def leave(self, weights: Sequence[WeightPair], step: int, settings: int, *, meet: bool = False) -> None:
        """Leg 1: send w° - w of `weights`, which lie end to end in the fragment. Collective."""
        wait_for_kernels(self._momentum.device.type)
        payload = self._exchange.payload
        payload[self._exchange.numel :].zero_()
        for place, pair in _end_to_end(weights):
            torch.sub(pair.outer, pair.own, out=payload[place])
        self._telling = self._told = self._exchange.weights = None
        if self.guard is not None:
            said = self.guard.say(payload[: self._exchange.numel])
            everyone = said.new_empty(self._comm.size, len(said))
            self._telling = Leg(said, everyone, self._comm.all_gather(everyone, said, async_op=True))
        self._exchange.start(step, Flags.MEET if meet else Flags.NONE, settings)

    def may_pass_on(self) -> bool:
        """Whether leg 1 has brought all."""
        told = self._telling is None or self._telling.work.is_completed()
        return told and self._exchange.leg_1_is_over

    def pass_on(self, settings: OuterSettings) -> None:
        """Take the owner's part of the outer step, waiting for leg 1, and begin leg 2. Collective."""
        after = torch.empty_like(self._momentum)
        if self.guard is not None and self._telling is not None:
            self._telling.work.wait()
            said = self._telling.received[[ranks[0] for ranks in self._members]]
            self._told = self.guard.judge(self._own, said)
            # What a node sends is times its part of the ranks.
            mean = self._comm.size / len(self._members)
            weights = [mean / len(ranks) * one for ranks, one in zip(self._members, self._told.shares, strict=True)]
            self._exchange.weights = None if len(set(weights)) == 1 and weights[0] else weights

        def take_outer_step(average: Tensor, place: slice) -> None:
            torch.add(average, self._momentum[place], alpha=settings.momentum, out=after[place])
            average.add_(after[place], alpha=settings.momentum).mul_(settings.lr)

        self._exchange.advance(take_outer_step)
        self._next_momentum = after

    def arrive(self) -> Arrived:
        """Wait for leg 2. Raises PacketError or SettingsError, on every rank, where ranks are out of step."""
        exchange = self._exchange
        assert self._next_momentum is not None, "arrive() follows pass_on()"
        exchange.wait()
        outcome = exchange.outcome()
        finite = outcome.finite and (self._told is None or any(self._told.shares))
        self.settle(finite)
        if not finite:
            return Arrived(None, outcome.meet, self._told)
        update = torch.empty(exchange.padded_numel, device=self._momentum.device)
        exchange.read(update)
        return Arrived(update[: exchange.numel], outcome.meet, self._told)

    def settle(self, finite: bool) -> None:
        """Take over momentum and residuals of an outer step that other ranks have taken, where `finite`, though its end
        did not reach this rank; after `pass_on`."""
        after, self._next_momentum = self._next_momentum, None
        assert after is not None, "settle() follows pass_on()"
        if finite:
            self._momentum = after
            self._exchange.commit()
            residual = self._exchange.worker_residual
            if self._told is not None and self._own in self._told.left_out and residual is not None:
                residual.zero_()  # of what was not taken
        else:
            self._exchange.revert()


class Alone:
    """Of a single worker, which sends nothing. In fp64, so that a step of rate 1 without momentum leads to the worker's
    own weights, bit for bit."""

    def __init__(self, numel: int, device: torch.device, guard: Guard | None) -> None:
        self.guard = guard
        self._momentum = torch.zeros(numel, device=device)
        self._gradient: Tensor | None = None
        self._update: Tensor | None = None
        self._meet = False
        self._told: Told | None = None

    @property
    def state(self) -> OuterState:
        """What is left behind."""
        return OuterState(slice(0, len(self._momentum)), self._momentum, alike=True)

    def leave(self, weights: Sequence[WeightPair], step: int, settings: int, *, meet: bool = False) -> None:
        """Keep w° - w."""
        self._gradient = torch.empty_like(self._momentum, dtype=torch.float64)
        for place, pair in _end_to_end(weights):
            self._gradient[place].copy_(pair.outer).sub_(pair.own)
        self._meet = meet
        self._told = None if self.guard is None else self.guard.judge(0, self.guard.say(self._gradient)[None])

    def may_pass_on(self) -> bool:
        """Whether nothing has to be waited for: always."""
        return True

    def pass_on(self, settings: OuterSettings) -> None:
        """Take the outer step."""
        assert self._gradient is not None, "pass_on() follows leave()"
        gradient, self._gradient = self._gradient, None
        if self._told is not None and self._told.left_out:
            return
        if bool(torch.isfinite(gradient.abs().max())) if gradient.numel() else True:
            momentum = gradient + self._momentum.double() * settings.momentum
            self._update = gradient.add_(momentum, alpha=settings.momentum).mul_(settings.lr)
            self._momentum.copy_(momentum)

    def arrive(self) -> Arrived:
        """Give its update."""
        update, self._update = self._update, None
        return Arrived(update, self._meet, self._told)

    def settle(self, finite: bool) -> None:
        """Do nothing: no other rank has taken it."""


def _end_to_end(weights: Sequence[WeightPair]) -> Iterator[tuple[slice, WeightPair]]:
    """Each, and where in the fragment it lies."""
    start = 0
    for pair in weights:
        yield slice(start, start + pair.outer.numel()), pair
        start += pair.outer.numel()


@dataclass(eq=False)
class _OfNode:
    """`of_leader` on the node's first rank; on the others nothing, which own nothing of the fragment.

    What goes wrong between nodes goes wrong in `arrive`, on every rank of the node.
    """

    _relay: Relay
    _numel: int
    _device: torch.device
    guard: Guard | None
    _of_leader: Together | Alone | None
    _error: CommunicationError | None = None

    @property
    def state(self) -> OuterState:
        if self._of_leader is None:
            return OuterState(slice(0, 0), torch.zeros(0, device=self._device))
        return self._of_leader.state

    def leave(self, weights: Sequence[WeightPair], step: int, settings: int, *, meet: bool = False) -> None:
        self._error = None
        self._on_leader(lambda one: one.leave(weights, step, settings, meet=meet))

    def may_pass_on(self) -> bool:
        return self._error is None and self._of_leader is not None and self._of_leader.may_pass_on()

    def pass_on(self, settings: OuterSettings) -> None:
        self._on_leader(lambda one: one.pass_on(settings))

    def arrive(self) -> Arrived:
        """Collective inside the node."""
        here: list[Arrived] = []

        def arrive_between() -> tuple[str | None, bool, Told | None]:
            """What arrives on the first rank goes into `here`; the name of its dtype, None where nothing does."""
            assert self._of_leader is not None
            if self._error is not None:
                raise self._error
            here.append(arrived := self._of_leader.arrive())
            form = None if arrived.update is None else str(arrived.update.dtype).removeprefix("torch.")
            return form, arrived.meet, arrived.told

        form, meet, said = self._relay.ask(arrive_between)
        told = None if said is None else Told(*said)
        if form is None:
            return Arrived(None, meet, told)
        update = here[0].update if here else None
        if update is None:
            update = torch.empty(self._numel, dtype=getattr(torch, form), device=self._device)
        self._relay.spread(update)
        return Arrived(update, meet, told)

    def settle(self, finite: bool) -> None:
        if self._of_leader is not None:
            self._of_leader.settle(finite)

    def _on_leader(self, action: Callable[[Together | Alone], None]) -> None:
        if self._of_leader is not None and self._error is None:
            try:
                action(self._of_leader)
            except CommunicationError as error:
                self._error = error


OuterStep = Together | Alone | _OfNode


def make_outer_step(
    comm: Communicator,
    links: NodeLinks | None,
    fragment: Fragment,
    codec: Codec,
    index: int,
    device: torch.device,
    guard: Guard | None,
    *,
    reversible: bool = False,
) -> Together | Alone:
    """Of fragment number `index`, over nodes where there are `links`, else over the ranks of `comm`.

    `reversible`: what has left can be undone, at the price of a second worker residual while it is in flight.
    """
    workers = comm.size if links is None else links.num_nodes
    if workers == 1:
        return Alone(fragment.numel, device, guard)
    if codec.has_kernels:
        prepare_kernels(device.type, ("encode", "encode_rounded", "decode"))
    given: dict[str, Any] = {"bucket": index, "device": device, "keeps_payload": False}
    given |= {"residual_dtype": torch.bfloat16, "reversible": reversible}
    exchange = make_exchange(Exchange, comm, links, fragment.numel, codec, **given)
    return Together(exchange, device, guard, comm, links)


def make_node_outer_step(
    relay: Relay,
    comm: Communicator | None,
    fragment: Fragment,
    codec: Codec,
    index: int,
    device: torch.device,
    guard: Guard | None,
) -> OuterStep:
    """Of fragment number `index`, over the workers whose first ranks are those of `comm`, which no others have; what
    has left can be undone."""
    of_leader = None
    if comm is not None:
        of_leader = make_outer_step(comm, None, fragment, codec, index, device, guard, reversible=True)
    return of_leader if relay.alone and of_leader else _OfNode(relay, fragment.numel, device, guard, of_leader)
