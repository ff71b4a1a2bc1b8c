"""The outer step of one fragment: the outer gradient's way over the wire, the owner's momentum, and the outer weights,
the same bits on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import NodeLinks
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Exchange
from thinwire.compress.hierarchical_exchange import HierarchicalExchange
from thinwire.compress.light_exchanges import LowMemoryExchange
from thinwire.compress.packet import Flags
from thinwire.optim.diloco.fragments import Fragment


@dataclass
class OuterSettings:
    """Of the outer optimizer, SGD with Nesterov's momentum."""

    lr: float
    momentum: float


@dataclass(frozen=True)
class WeightPair:
    """Of a piece of a fragment the `outer` weights and the worker's `own`, fp32 [elements]."""

    outer: Tensor
    own: Tensor


@dataclass(frozen=True)
class Arrived:
    """What an outer step subtracts from the outer weights, one value an element; None where some worker's weights were
    not finite, so that no outer step was taken. `meet`: a worker said on leaving that all have to meet after it."""

    update: Tensor | None
    meet: bool = False


@dataclass
class UnderWay:
    """A fragment that left after step `left_at` and is not taken in yet. `passed_on`: leg 2 has begun; `arrived`: what
    it brought, once that is here."""

    fragment: int
    left_at: int
    passed_on: bool = False
    arrived: Arrived | None = None


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


class OuterStep(ABC):
    """From workers' outer gradients of one fragment to what all subtract from the outer weights.

    With Δ_m = w° - w_m of worker m (DiLoCo, arXiv 2311.08105, Algorithm 1; C a codec, e and s its residuals):

        leg 1, worker m:  c_m = C(Δ_m + e_m),  e_m += Δ_m - c_m
        owner:            a = mean c_m,  v = μ v + a,  u = η (a + μ v),  q = C(u + s),  s += u - q
        leg 2, everyone:  w° -= q

    Use: `leave`, `pass_on`, `arrive`, in this order.
    """

    @property
    @abstractmethod
    def state(self) -> OuterState:
        """What is left behind, to be read and written in place until the next outer step."""

    @abstractmethod
    def leave(self, weights: Sequence[WeightPair], step: int, settings: int, *, meet: bool = False) -> None:
        """Leg 1: send w° - w of `weights`, which lie end to end in the fragment. Collective."""

    @abstractmethod
    def may_pass_on(self) -> bool:
        """Whether leg 1 has brought all."""

    @abstractmethod
    def pass_on(self, settings: OuterSettings) -> None:
        """Take the owner's part of the outer step, waiting for leg 1, and begin leg 2. Collective."""

    @abstractmethod
    def arrive(self) -> Arrived:
        """Wait for leg 2. Raises PacketError or SettingsError, on every rank, where ranks are out of step."""

    def settle(self, finite: bool) -> None:
        """Take over momentum and residuals of an outer step that other ranks have taken, where `finite`, though its end
        did not reach this rank; after `pass_on`."""


class Together(OuterStep):
    """Over the ranks of a communicator, or over nodes."""

    def __init__(self, exchange: Exchange, numel: int, device: torch.device) -> None:
        self._exchange = exchange
        self._numel = numel
        self._momentum = torch.zeros(exchange.owner_place.stop - exchange.owner_place.start, device=device)
        self._next_momentum: Tensor | None = None

    @property
    @override
    def state(self) -> OuterState:
        one = self._exchange
        return OuterState(one.owner_place, self._momentum, one.worker_place, one.worker_residual, one.owner_residual)

    @override
    def leave(self, weights: Sequence[WeightPair], step: int, settings: int, *, meet: bool = False) -> None:
        payload = self._exchange.payload
        payload[self._numel :].zero_()
        for place, pair in _end_to_end(weights):
            torch.sub(pair.outer, pair.own, out=payload[place])
        self._exchange.start(step, Flags.MEET if meet else Flags.NONE, settings)

    @override
    def may_pass_on(self) -> bool:
        return self._exchange.leg_1_is_over

    @override
    def pass_on(self, settings: OuterSettings) -> None:
        after = torch.empty_like(self._momentum)

        def take_outer_step(average: Tensor, place: slice) -> None:
            torch.add(average, self._momentum[place], alpha=settings.momentum, out=after[place])
            average.add_(after[place], alpha=settings.momentum).mul_(settings.lr)

        self._exchange.advance(take_outer_step)
        self._next_momentum = after

    @override
    def arrive(self) -> Arrived:
        exchange = self._exchange
        assert self._next_momentum is not None, "arrive() follows pass_on()"
        exchange.wait()
        outcome = exchange.outcome()
        self.settle(outcome.finite)
        if not outcome.finite:
            return Arrived(None, outcome.meet)
        update = torch.empty(exchange.padded_numel, device=self._momentum.device)
        exchange.read(update)
        return Arrived(update[: self._numel], outcome.meet)

    @override
    def settle(self, finite: bool) -> None:
        after, self._next_momentum = self._next_momentum, None
        assert after is not None, "settle() follows pass_on()"
        if finite:
            self._momentum = after
            self._exchange.commit()
        else:
            self._exchange.revert()


class Alone(OuterStep):
    """Of a single worker, which sends nothing. In fp64, so that a step of rate 1 without momentum leads to the worker's
    own weights, bit for bit."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._momentum = torch.zeros(numel, device=device)
        self._gradient: Tensor | None = None
        self._update: Tensor | None = None
        self._meet = False

    @property
    @override
    def state(self) -> OuterState:
        return OuterState(slice(0, len(self._momentum)), self._momentum, alike=True)

    @override
    def leave(self, weights: Sequence[WeightPair], step: int, settings: int, *, meet: bool = False) -> None:
        self._gradient = torch.empty_like(self._momentum, dtype=torch.float64)
        for place, pair in _end_to_end(weights):
            self._gradient[place].copy_(pair.outer).sub_(pair.own)
        self._meet = meet

    @override
    def may_pass_on(self) -> bool:
        return True

    @override
    def pass_on(self, settings: OuterSettings) -> None:
        assert self._gradient is not None, "pass_on() follows leave()"
        gradient, self._gradient = self._gradient, None
        if bool(torch.isfinite(gradient.abs().max())) if gradient.numel() else True:
            momentum = gradient + self._momentum.double() * settings.momentum
            self._update = gradient.add_(momentum, alpha=settings.momentum).mul_(settings.lr)
            self._momentum.copy_(momentum)

    @override
    def arrive(self) -> Arrived:
        update, self._update = self._update, None
        return Arrived(update, self._meet)


def _end_to_end(weights: Sequence[WeightPair]) -> Iterator[tuple[slice, WeightPair]]:
    """Each, and where in the fragment it lies."""
    start = 0
    for pair in weights:
        yield slice(start, start + pair.outer.numel()), pair
        start += pair.outer.numel()


def make_outer_step(
    comm: Communicator,
    links: NodeLinks | None,
    fragment: Fragment,
    codec: Codec,
    index: int,
    device: torch.device,
    *,
    reversible: bool = False,
) -> OuterStep:
    """Of fragment number `index`, over nodes where there are `links`, else over the ranks of `comm`.

    `reversible`: what has left can be undone, at the price of a second worker residual while it is in flight.
    """
    workers = comm.size if links is None else links.num_nodes
    if workers == 1:
        return Alone(fragment.numel, device)
    exchange: Exchange
    if links is not None:
        exchange = HierarchicalExchange(links, fragment.numel, codec, bucket=index, device=device)
    else:
        exchange = LowMemoryExchange(
            comm,
            fragment.numel,
            codec,
            bucket=index,
            device=device,
            residual_dtype=torch.bfloat16,
            reversible=reversible,
        )
    return Together(exchange, fragment.numel, device)
