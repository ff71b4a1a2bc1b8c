"""Watches gradients arrive during backward and sends each bucket as soon as it is whole, so that communication
overlaps with computation; knows when a backward, and when a step, is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero.autograd_hooks import ArrivalHook
from thinwire.zero.bucket_layout import BucketLayout, Slot
from thinwire.zero.left_out_parameters import NothingToSend, agree_to_leave_out, has_gradient
from thinwire.zero.parameter_order import Placement
from thinwire.zero.pipeline import Legs, Pipeline

__all__ = ["BackwardRounds", "GradientTransport"]


class GradientTransport(Legs, Protocol):
    """What sends one bucket's gradients."""

    @property
    def layout(self) -> BucketLayout:
        """The bucket's parameters."""

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Note a gradient that a later backward will add to, before it is taken."""

    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Take a parameter's gradient, to be sent."""

    def leave_out(self, slot: Slot, expected: bool) -> None:
        """Note that a parameter has no gradient on this rank; `expected`: nor on any other."""

    @property
    def may_stay(self) -> bool:
        """Whether `stay` can take the place of a transfer of zeros; the same on every rank."""

    def stay(self) -> None:
        """Note that no rank has a gradient for any of the parameters: nothing will be sent."""

    def start(self) -> None:
        """Start leg 1."""

    def end_step(self) -> None:
        """Forget the averages."""


class BackwardRounds:
    """The backwards of one step, and which parameters had gradients in them.

    With `keeps_gradients`, backwards add up in `.grad`, and only the last one, outside of `no_sync`, is sent. Without,
    every backward is sent, and the transports add up. Every rank runs the same number of backwards; within one, each
    may lack other parameters.
    """

    def __init__(self, placement: Placement, transports: Sequence[GradientTransport], keeps_gradients: bool) -> None:
        self._placement = placement
        self._synchronize = True
        self._left_out: frozenset[int] = frozenset()  # of the backward that comes, or is under way
        self._begin_step()
        self.use(transports, keeps_gradients)
        for number, parameter in enumerate(placement.parameters):
            ArrivalHook(self._on_gradient, number).register(parameter)

    def use(
        self,
        transports: Sequence[GradientTransport],
        keeps_gradients: bool,
        between_legs: Callable[[], None] | None = None,
    ) -> None:
        """Send through these from the next backward on.

        `between_legs`, where given, is called by `finish` when every bucket has left and none has begun leg 2.
        """
        self._transports = list(transports)
        self._keeps_gradients = keeps_gradients
        self._between_legs = between_legs
        self._pipeline = Pipeline(hold=between_legs is not None)
        self._places = {
            slot.parameter: (number, slot)
            for number, transport in enumerate(self._transports)
            for slot in transport.layout.slots
        }
        self._begin_backward()
        self._sent = False

    @property
    def missing(self) -> list[int]:
        """Parameters that have had no gradient on this rank in this step, and were not left out."""
        known = self._arrived_in_step | self.left_out
        return [number for number in range(len(self._placement.parameters)) if number not in known]

    @property
    def in_step(self) -> bool:
        """Whether gradients have been taken since the last step, so that `step` or `drop` has to come next."""
        return self._sent or bool(self._arrived)

    @property
    def left_out(self) -> frozenset[int]:
        """Parameters that all of the step's backwards, as sent so far, left out on every rank."""
        return self._left_out_of_all or frozenset()

    def leave_out(self, parameters: Iterable[Tensor], comm: Communicator) -> None:
        """Expect no gradient of these in the next backward that is sent, on any rank. Collective.

        Takes the place of what was left out before. Raises ValueError, on every rank, where ranks differ, and where one
        of the parameters has a gradient, and RuntimeError where gradients of that backward have left already.
        """
        error = None
        if self._arrived and self._keeps_gradients:
            error = RuntimeError("leave_out() comes before the backward() that is sent, not after it")
        elif self._arrived:
            self.end_backward()
        self._left_out = agree_to_leave_out(comm, self._placement.parameters, parameters, error)
        self._waiting = [self._awaited(transport) for transport in self._transports]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up; where gradients are not kept they leave all the same."""
        if self._sent and self._keeps_gradients:
            raise RuntimeError(
                "no_sync() was entered between a synchronised backward() and its step(): the gradients have left "
                "already. Call step() first, or put the earlier backward() inside no_sync() too"
            )
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def end_backward(self) -> None:
        """Send the buckets that some parameter's lack of a gradient held back. Collective."""
        if self._keeps_gradients and not self._synchronize:
            return
        self._send_rest()
        if not self._keeps_gradients:
            self._pipeline.drain()
            self._begin_backward()

    def finish(self) -> None:
        """Bring everything of this step to its end. Collective."""
        if self._arrived or not self._sent:
            self._send_rest()
        if self._between_legs is not None:
            self._between_legs()
        self._pipeline.drain()

    def end_step(self) -> None:
        """Forget this step; the next backward begins another."""
        for transport in self._transports:
            transport.end_step()
        self._begin_step()
        self._begin_backward()
        self._sent = False

    def drop(self) -> None:
        """Forget gradients that have left, or arrived, since the last step. Collective if any have left."""
        if self._pipeline.started or self._sent:
            self.finish()
        self.end_step()

    def _begin_step(self) -> None:
        self._arrived_in_step: set[int] = set()
        self._left_out_of_all: frozenset[int] | None = None

    def _begin_backward(self) -> None:
        self._arrived: set[int] = set()
        self._left_out = frozenset()
        self._waiting = [self._awaited(transport) for transport in self._transports]
        self._pipeline.reset()

    def _on_gradient(self, number: int) -> None:
        with torch.no_grad():
            self._arrive(number)

    def _arrive(self, number: int) -> None:
        parameter = self._placement.parameters[number]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ValueError(
                f"{self._placement.describe(number)} has a sparse gradient, which cannot be sharded: build the "
                "embedding with sparse=False, or leave it to torch.optim.SparseAdam in a second optimizer"
            )
        sending = self._synchronize or not self._keeps_gradients
        if sending:
            self._check_left_out(number)
        if number in self._arrived and sending:
            self._begin_next_backward(number)
        index, slot = self._places[number]
        self._arrived_in_step.add(number)
        if not sending:
            self._transports[index].keep(slot, parameter)
        else:
            self._transports[index].take(slot, parameter)
            self._arrived.add(number)
            self._waiting[index] -= 1
            while (following := self._pipeline.started) < len(self._transports) and not self._waiting[following]:
                self._send(following)

    def _begin_next_backward(self, number: int) -> None:
        if self._keeps_gradients:
            raise RuntimeError(
                f"a second backward() before step() reached {self._placement.describe(number)} whose gradient has left "
                "already. To accumulate gradients, put every backward() but the last inside `with no_sync():`; to drop "
                "the first one, call zero_grad()"
            )
        self.end_backward()

    def _awaited(self, transport: GradientTransport) -> int:
        return sum(slot.parameter not in self._left_out for slot in transport.layout.slots)

    def _send(self, index: int) -> None:
        self._sent = True
        transport = self._transports[index]
        if not self._awaited(transport) and transport.may_stay:
            for slot in transport.layout.slots:
                self._check_left_out(slot.parameter)
            transport.stay()
            self._pipeline.follow(NothingToSend())
            return
        for slot in transport.layout.slots:
            if slot.parameter not in self._arrived:
                self._take_unannounced(transport, slot)
        transport.start()
        self._pipeline.follow(transport)

    def _take_unannounced(self, transport: GradientTransport, slot: Slot) -> None:
        parameter = self._placement.parameters[slot.parameter]
        self._check_left_out(slot.parameter)
        if parameter.grad is None or slot.parameter in self._left_out:
            transport.leave_out(slot, expected=slot.parameter in self._left_out)
        else:  # from an earlier backward in no_sync, or set by hand
            transport.take(slot, parameter)
            self._arrived_in_step.add(slot.parameter)

    def _send_rest(self) -> None:
        for index in range(self._pipeline.started, len(self._transports)):
            self._send(index)
        before = self._left_out if self._left_out_of_all is None else self._left_out_of_all
        self._left_out_of_all = self._left_out & before

    def _check_left_out(self, number: int) -> None:
        if number in self._left_out and has_gradient(self._placement.parameters[number]):
            raise RuntimeError(
                f"{self._placement.describe(number)} was left out of this backward(), but has a gradient: leave out "
                "only what no rank's backward() reaches"
            )
