"""The one watcher of backward: it sees gradients arrive, sends each bucket as soon as it is whole, and knows when a
backward, and when a step, is over."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero.bucket_layout import Slot
from thinwire.zero.gradient_seal import (
    GradientHook,
    Samples,
    SentGradient,
    Taken,
    at_backward_end,
    edited,
    forget_before_accumulation,
    gradient_of,
    refuse_edit,
    refuse_kind,
    taken,
)
from thinwire.zero.gradients import AveragedInPlace, BucketTransport, NothingToSend, Pipeline
from thinwire.zero.rank_checks import agree_to_leave_out, check_left_out

__all__ = ["BackwardWatcher"]

_LOOKED_AT = 8  # one parameter in so many


class BackwardWatcher:
    """The backwards of one step, and which parameters had gradients in them.

    With `keeps_gradients`, backwards add up in `.grad`, and only the last one, outside of `no_sync`, is sent. Without,
    every backward is sent, and the transports add up. Every rank runs the same number of backwards.

    `parameters`: those watched, by number; hooked once they require gradients. `held_back`: keep them until `finish`.
    `arrived`: the gradients that this backward has brought, as they were taken, in the order in which they came.
    `left_out`: parameters that all of the step's backwards, as sent so far, left out on every rank.
    `gates`: nothing is sent while one of them returns false, which is how another wrapper's `no_sync` is obeyed.
    `before_first`: called once, in the next backward, before its first gradient is taken.

    Args:
        describe: how an error message calls a parameter, by its number.
        on_whole: called when a synchronised backward ends that reached every parameter but those in `usually_absent`.
            Another may be a part of a larger one (reentrant checkpointing, or one of several losses).
    """

    def __init__(self, describe: Callable[[int], str], on_whole: Callable[[], None] | None = None) -> None:
        self.parameters: list[Tensor] = []
        self._kinds: list[tuple[torch.dtype, torch.device]] = []
        self._sent_gradients: dict[int, SentGradient] = {}
        self.usually_absent: frozenset[int] = frozenset()
        self._describe = describe
        self._on_whole = on_whole
        self._unhooked: list[int] = []
        self.gates: list[Callable[[], bool]] = []
        self._steps = 0
        self.before_first: Callable[[], None] | None = None
        self._synchronize = True
        self._callback_queued = False
        self._samples = Samples()
        self.samples_values = True  # else versions alone tell of edits
        self.held_back = False
        self.arrived: dict[int, Taken] = {}
        self._begin_step()
        self.use([], keeps_gradients=True)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take charge of the gradients of further parameters, from the next backward on."""
        for parameter in parameters:
            self._unhooked.append(len(self.parameters))
            self.parameters.append(parameter)
            self._kinds.append((parameter.dtype, parameter.device))
        self._hook_trainable()

    def use(
        self,
        transports: Sequence[BucketTransport],
        keeps_gradients: bool,
        between_legs: Callable[[], None] | None = None,
    ) -> None:
        """Send through these from the next backward on.

        `between_legs`, where given, is called by `finish` when every bucket has left and none has begun leg 2.
        """
        self._transports: list[BucketTransport] = []
        self._places: dict[int, tuple[int, Slot]] = {}
        self._keeps_gradients = keeps_gradients
        self._between_legs = between_legs
        self._pipeline = Pipeline(hold=between_legs is not None)
        self._sent = False
        self._begin_backward()
        self.add(transports)

    @torch.no_grad()
    def add(self, transports: Sequence[BucketTransport]) -> None:
        """Send through these too, after the others. Gradients of their parameters that are there are taken now."""
        for transport in transports:
            number = len(self._transports)
            self._transports.append(transport)
            self._places |= {slot.parameter: (number, slot) for slot in transport.layout.slots}
            self._waiting.append(self._awaited(transport))
            for slot in transport.layout.slots:
                if slot.parameter in self.arrived:
                    self._take(slot.parameter)

    @property
    def missing(self) -> list[int]:
        """Parameters that have had no gradient on this rank in this step, and were not left out."""
        known = self._arrived_in_step | self.left_out
        return [number for number in range(len(self.parameters)) if number not in known]

    @property
    def in_step(self) -> bool:
        """Whether gradients have been taken since the last step, so that `step` or `drop` has to come next."""
        return self._sent or bool(self.arrived)

    def check_gradients_untouched(self, *, may_write: bool = False) -> None:
        """Raise RuntimeError if somebody has changed, or dropped, a `.grad` after it had been taken.

        With `may_write` only if it was replaced or dropped: what is written into it takes effect.

        Edits through `.grad.data` leave no version: samples of every eighth, others each step, are compared on CPUs.
        """
        compared = []
        for number in edited(self.arrived, self.parameters):
            gradient = self.parameters[number].grad
            replaced = gradient is not self.arrived[number][0] or type(gradient) is SentGradient
            if may_write and replaced:
                refuse_edit(self._describe(number))
            # Of one that was not sampled, as in a capture, it is not known what it was.
            if not may_write and (replaced or self._samples.knows(number)):
                compared.append(number)
        every = min(_LOOKED_AT, len(self.parameters))
        for number in range(self._steps % every, len(self.parameters), every) if self.arrived and not may_write else ():
            if number in self.arrived and number in self._samples and self.parameters[number].is_cpu:
                compared.append(number)
        different = self._samples.first_that_differs(compared, self.parameters)
        if different is not None:
            refuse_edit(self._describe(different))

    # What a training loop calls

    def leave_out(self, parameters: Iterable[Tensor], comm: Communicator) -> None:
        """Expect no gradient of these in the next backward that is sent, on any rank. Collective.

        Takes the place of what was left out before. Raises ValueError, on every rank, where ranks differ, and where one
        of the parameters has a gradient, and RuntimeError where gradients of that backward have left already.
        """
        error = None
        if self.arrived and self._keeps_gradients:
            error = RuntimeError("leave_out() comes before the synchronised backward(), not after it")
        elif self.arrived:
            self.end_backward()
        self._left_out = agree_to_leave_out(comm, self.parameters, parameters, error)
        self._waiting = [self._awaited(transport) for transport in self._transports]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up; where gradients are not kept they leave all the same."""
        if self.in_step and self._keeps_gradients:
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
        if not self._sends():
            return
        self._send_rest()
        if not self._keeps_gradients:
            self._pipeline.drain()
            self._begin_backward()

    def finish(self) -> None:
        """Bring everything of this step to its end. Collective; again after `add`, for what was added."""
        self._hook_trainable()
        if self.arrived or not self._sent or self._keeps_gradients:
            self._send_rest()
        if self._between_legs is not None:
            self._between_legs()
        self._pipeline.drain()
        self._finished = True

    def wait_for_averages(self) -> None:
        """Wait until the gradients that have left in this step are averaged, and leave it open. Collective."""
        if self._keeps_gradients:
            if self.in_step and not self._finished:
                self.finish()
        elif self.arrived:
            self.end_backward()

    def seal_again(self, number: int) -> None:
        """Take a parameter's gradient as it is for what was averaged: somebody has written to it who may."""
        if number in self.arrived:
            self.arrived[number] = taken(self.parameters[number].grad)
            self._samples.take([number], self.parameters)

    @torch.no_grad()
    def send_again(self) -> None:
        """Take and send this step's gradients once more. Collective, after `finish`."""
        self._pipeline.reset()
        self._finished = False
        for transport in self._transports:
            transport.end_step()
        for number in self.arrived.keys() & self._places.keys():
            self._take(number)
        self.finish()

    def end_step(self) -> None:
        """Forget this step; the next backward begins another."""
        for transport in self._transports:
            transport.end_step()
        for number in self._sent_gradients:
            if isinstance(self.parameters[number].grad, SentGradient):
                self.parameters[number].grad = None
        self._steps += 1
        self._begin_step()
        self._begin_backward()
        self._sent = False

    def drop(self) -> None:
        """Forget gradients that have left, or arrived, since the last step. Collective if there are any.

        Other ranks' gradients may have left where all of this one's wait for more.
        """
        if self.in_step:
            self.finish()
        self.end_step()

    # One backward

    def _sends(self) -> bool:
        if not self._keeps_gradients:
            return True
        return self._synchronize and not self.held_back and all(map(operator.call, self.gates))

    def _begin_step(self) -> None:
        self._arrived_in_step: set[int] = set()
        self.left_out: frozenset[int] = frozenset()
        self._some_sent = self._finished = False

    def _begin_backward(self) -> None:
        self.arrived = {}
        self._samples.clear()
        self._left_out = frozenset[int]()
        self._waiting = [self._awaited(transport) for transport in self._transports]
        self._pipeline.reset()

    def _hook_trainable(self) -> None:
        if not self._unhooked:
            return
        for number in self._unhooked:
            if self.parameters[number].requires_grad:
                GradientHook(self._on_gradient, number).register(self.parameters[number])
        self._unhooked = [number for number in self._unhooked if not self.parameters[number].requires_grad]

    def _on_gradient(self, number: int) -> None:
        if self.before_first is not None:
            callback, self.before_first = self.before_first, None
            callback()
        if torch.is_grad_enabled():  # with create_graph
            with torch.no_grad():
                self._on_gradient(number)
            return
        sends = self._sends()
        self._arrive(number, sends)
        if sends and self._on_whole is not None and not self._callback_queued:
            self._callback_queued = True
            # Twice: a callback queued by a callback runs after those that others, DDP for one, queued meanwhile.
            at_backward_end(lambda: at_backward_end(self._on_backward_end))

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        known = self.arrived.keys() | self.usually_absent | self._left_out
        whole = all(number in known or not one.requires_grad for number, one in enumerate(self.parameters))
        if whole and self._on_whole is not None:
            with torch.no_grad():
                self._on_whole()
        # DDP writes gradients back after they have arrived here.
        written = edited(self.arrived, self.parameters)
        for number in written:
            self.arrived[number] = taken(self.parameters[number].grad)
        if self.samples_values:
            new = [number for number in self.arrived if number not in self._samples]
            self._samples.take([*written, *new], self.parameters)

    def _arrive(self, number: int, sends: bool = True) -> None:
        parameter, place = self.parameters[number], self._places.get(number)
        dtype, device = self._kinds[number]
        gradient = parameter.grad
        sparse = gradient is not None and gradient.layout is not torch.strided
        if sparse or parameter.dtype != dtype or parameter.device != device:
            refuse_kind(parameter, dtype, device, self._describe(number))
        if not sends:
            self._arrived_in_step.add(number)
            if place is not None:
                self._transports[place[0]].keep(place[1], parameter)
            return
        if number in self._left_out:
            check_left_out(parameter, self._describe(number))
            return
        if self._finished and number not in self.arrived:
            raise RuntimeError(
                f"{self._describe(number)} got its gradient in a backward() of its own, after the step's gradients had "
                "left without it, as in the step before. Put every backward() but the last inside `with no_sync():`"
            )
        if number in self.arrived:
            if self._keeps_gradients:
                raise RuntimeError(
                    f"a second backward() before step() reached {self._describe(number)} whose gradient has left "
                    "already. To accumulate gradients, put every backward() but the last inside `with no_sync():`; to "
                    "drop the first one, call zero_grad()"
                )
            self.end_backward()
        self._arrived_in_step.add(number)
        if place is not None:
            self._take(number)
        self.arrived[number] = taken(parameter.grad)
        if place is not None:
            self._waiting[place[0]] -= 1
            while (following := self._pipeline.started) < len(self._transports) and not self._waiting[following]:
                self._send(following)

    def _take(self, number: int) -> None:
        parameter = self.parameters[number]
        index, slot = self._places[number]
        self._transports[index].take(slot, parameter)
        if parameter.grad is None:
            sent = self._sent_gradients.get(number)
            if sent is None or sent.shape != parameter.shape:  # somebody has set its `.data`
                self._sent_gradients[number] = SentGradient(parameter, self._describe(number))
                forget_before_accumulation(parameter, SentGradient)
            parameter.grad = self._sent_gradients[number]

    def _awaited(self, transport: BucketTransport) -> int:
        slots = transport.layout.slots
        return sum(slot.parameter not in self._left_out for slot in slots) if self._left_out else len(slots)

    def _send(self, index: int) -> None:
        self._sent = True
        transport = self._transports[index]
        numbers = [slot.parameter for slot in transport.layout.slots]
        for number in self._left_out.intersection(numbers):
            check_left_out(self.parameters[number], self._describe(number))
        if not self._awaited(transport) and transport.may_stay:
            transport.stay()
            self._pipeline.follow(NothingToSend())
            return
        for slot in transport.layout.slots:
            if slot.parameter not in self.arrived:
                transport.leave_out(slot, expected=slot.parameter in self._left_out)
        transport.start()
        if self.samples_values:
            self._samples.take([number for number in numbers if number in self.arrived], self.parameters)
        if transport.averaged_by_advance or transport.averaged_by_wait:
            self._pipeline.follow(AveragedInPlace(transport, self.arrived, self._samples, self.parameters))
        else:
            self._pipeline.follow(transport)

    @torch.no_grad()
    def _send_rest(self) -> None:
        # Gradients that no hook announced: accumulated in no_sync, or set by hand.
        for number, parameter in enumerate(self.parameters):
            if number not in self.arrived and gradient_of(parameter) is not None:
                self._arrive(number)
        for index in range(self._pipeline.started, len(self._transports)):
            self._send(index)
        self.left_out = self._left_out & self.left_out if self._some_sent else self._left_out
        self._some_sent = True
