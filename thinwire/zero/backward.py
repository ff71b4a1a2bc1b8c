"""The one watcher of backward: it sees gradients arrive, sends each bucket as soon as it is whole, and knows when a
backward, and when a step, is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero.autograd_hooks import GradientHook, at_backward_end
from thinwire.zero.bucket_layout import BucketLayout, Slot
from thinwire.zero.left_out_parameters import NothingToSend, agree_to_leave_out, has_gradient
from thinwire.zero.pipeline import Legs, Pipeline

__all__ = ["BackwardWatcher", "BucketTransport"]


class BucketTransport(Legs, Protocol):
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
        """Forget what this step brought."""


class _Seal:
    """A parameter's gradient as it was, so that a later change is noticed."""

    def __init__(self, parameter: Tensor) -> None:
        self._gradient = parameter.grad
        self._version = 0 if parameter.grad is None else parameter.grad._version

    def holds(self, parameter: Tensor) -> bool:
        """Whether nobody has changed or replaced it."""
        gradient = parameter.grad
        return gradient is self._gradient and (gradient is None or gradient._version == self._version)


class BackwardWatcher:
    """The backwards of one step, and which parameters had gradients in them.

    With `keeps_gradients`, backwards add up in `.grad`, and only the last one, outside of `no_sync`, is sent. Without,
    every backward is sent, and the transports add up. Every rank runs the same number of backwards.

    `parameters`: those watched, by number. A parameter that requires no gradient takes no hook until it does.

    Args:
        describe: how an error message calls a parameter, by its number.
        on_whole: called when a synchronised backward ends that reached every parameter but those in `usually_absent`.
            A backward that did not may be a part of a larger one (reentrant checkpointing, or one loss of several over
            disjoint parameters): then the step decides.
    """

    def __init__(self, describe: Callable[[int], str], on_whole: Callable[[], None] | None = None) -> None:
        self.parameters: list[Tensor] = []
        self.usually_absent: frozenset[int] = frozenset()
        self._describe = describe
        self._on_whole = on_whole
        self._unhooked: list[int] = []
        self._gates: list[Callable[[], bool]] = []
        self._synchronize = True
        self._callback_queued = False
        self._begin_step()
        self.use([], keeps_gradients=True)

    # Setting up

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take charge of the gradients of further parameters, from the next backward on."""
        for parameter in parameters:
            self._unhooked.append(len(self.parameters))
            self.parameters.append(parameter)
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

    def add(self, transports: Sequence[BucketTransport]) -> None:
        """Send through these too, after the others. Gradients of their parameters that are there are taken now."""
        for transport in transports:
            number = len(self._transports)
            self._transports.append(transport)
            self._places |= {slot.parameter: (number, slot) for slot in transport.layout.slots}
            self._waiting.append(self._awaited(transport))
            for slot in transport.layout.slots:
                if slot.parameter in self._arrived:
                    transport.take(slot, self.parameters[slot.parameter])

    def follow(self, gate: Callable[[], bool]) -> None:
        """Send nothing while `gate()` is false: how another wrapper's `no_sync` is obeyed."""
        self._gates.append(gate)

    # What is known of the step

    @property
    def arrived(self) -> list[int]:
        """Parameters whose gradients this backward has brought, in the order in which they came."""
        return list(self._arrived)

    @property
    def missing(self) -> list[int]:
        """Parameters that have had no gradient on this rank in this step, and were not left out."""
        known = self._arrived_in_step | self.left_out
        return [number for number in range(len(self.parameters)) if number not in known]

    @property
    def in_step(self) -> bool:
        """Whether gradients have been taken since the last step, so that `step` or `drop` has to come next."""
        return self._sent or bool(self._arrived)

    @property
    def left_out(self) -> frozenset[int]:
        """Parameters that all of the step's backwards, as sent so far, left out on every rank."""
        return self._left_out_of_all or frozenset()

    def check_gradients_untouched(self) -> None:
        """Raise RuntimeError where somebody has changed, or dropped, a `.grad` after it had been taken."""
        for number, seal in self._arrived.items():
            if not seal.holds(self.parameters[number]):
                raise RuntimeError(
                    f"the gradient of {self._describe(number)} was changed or dropped between backward() and step(), "
                    "after it had left for the other ranks, so the change would be ignored. To clip, pass max_norm= "
                    "to the optimizer; remove other edits of .grad"
                )

    # What a training loop calls

    def leave_out(self, parameters: Iterable[Tensor], comm: Communicator) -> None:
        """Expect no gradient of these in the next backward that is sent, on any rank. Collective.

        Takes the place of what was left out before. Raises ValueError, on every rank, where ranks differ, and where one
        of the parameters has a gradient, and RuntimeError where gradients of that backward have left already.
        """
        error = None
        if self._arrived and self._keeps_gradients:
            error = RuntimeError("leave_out() comes before the synchronised backward(), not after it")
        elif self._arrived:
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
        if not self._sending:
            return
        self._send_rest()
        if not self._keeps_gradients:
            self._pipeline.drain()
            self._begin_backward()

    def finish(self) -> None:
        """Bring everything of this step to its end. Collective; again after `add`, for what was added."""
        self._hook_trainable()
        if self._arrived or not self._sent or self._keeps_gradients:
            self._send_rest()
        if self._between_legs is not None:
            self._between_legs()
        self._pipeline.drain()
        self._finished = True

    def send_again(self) -> None:
        """Take and send this step's gradients once more. Collective, after `finish`."""
        self._pipeline.reset()
        self._finished = False
        for transport in self._transports:
            transport.end_step()
        for number in self._arrived.keys() & self._places.keys():
            index, slot = self._places[number]
            self._transports[index].take(slot, self.parameters[number])
        self.finish()

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

    # One backward

    @property
    def _sending(self) -> bool:
        return not self._keeps_gradients or (self._synchronize and all(gate() for gate in self._gates))

    def _begin_step(self) -> None:
        self._arrived_in_step: set[int] = set()
        self._left_out_of_all: frozenset[int] | None = None
        self._finished = False

    def _begin_backward(self) -> None:
        self._arrived: dict[int, _Seal] = {}  # by number: the gradient as it was taken
        self._left_out = frozenset[int]()
        self._waiting = [self._awaited(transport) for transport in self._transports]
        self._pipeline.reset()

    def _hook_trainable(self) -> None:
        for number in self._unhooked:
            if self.parameters[number].requires_grad:
                GradientHook(self._on_gradient, number).register(self.parameters[number])
        self._unhooked = [number for number in self._unhooked if not self.parameters[number].requires_grad]

    def _on_gradient(self, number: int) -> None:
        with torch.no_grad():
            if not self._sending:
                self._keep(number)
                return
            self._arrive(number)
        if self._on_whole is not None and not self._callback_queued:
            self._callback_queued = True
            # Twice: a callback queued by a callback runs after those that others, DDP for one, queued meanwhile.
            at_backward_end(lambda: at_backward_end(self._on_backward_end))

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        if self._on_whole is not None and all(
            number in self._arrived or number in self.usually_absent or number in self._left_out
            for number, parameter in enumerate(self.parameters)
            if parameter.requires_grad
        ):
            with torch.no_grad():
                self._on_whole()
        # DDP writes gradients back, unchanged, after they have arrived here.
        self._arrived = {number: _Seal(self.parameters[number]) for number in self._arrived}

    def _keep(self, number: int) -> None:
        self._check_layout(number)
        self._arrived_in_step.add(number)
        if number in self._places:
            index, slot = self._places[number]
            self._transports[index].keep(slot, self.parameters[number])

    def _arrive(self, number: int) -> None:
        self._check_layout(number)
        if self._is_left_out(number):
            return
        if self._finished and number not in self._arrived:
            raise RuntimeError(
                f"{self._describe(number)} got its gradient in a backward() of its own, after the step's gradients had "
                "left without it, as in the step before. Put every backward() but the last inside `with no_sync():`"
            )
        if number in self._arrived:
            self._begin_next_backward(number)
        self._arrived_in_step.add(number)
        self._arrived[number] = _Seal(self.parameters[number])
        if number in self._places:
            index, slot = self._places[number]
            self._transports[index].take(slot, self.parameters[number])
            self._waiting[index] -= 1
            while (following := self._pipeline.started) < len(self._transports) and not self._waiting[following]:
                self._send(following)
        self._arrived[number] = _Seal(self.parameters[number])  # the transport may have moved it

    def _begin_next_backward(self, number: int) -> None:
        if self._keeps_gradients:
            raise RuntimeError(
                f"a second backward() before step() reached {self._describe(number)} whose gradient has left already. "
                "To accumulate gradients, put every backward() but the last inside `with no_sync():`; to drop the "
                "first one, call zero_grad()"
            )
        self.end_backward()

    def _check_layout(self, number: int) -> None:
        gradient = self.parameters[number].grad
        if gradient is not None and gradient.layout != torch.strided:
            raise ValueError(
                f"{self._describe(number)} has a sparse gradient, which cannot be sent: build the embedding with "
                "sparse=False, or leave it to torch.optim.SparseAdam in a second optimizer"
            )

    def _is_left_out(self, number: int) -> bool:
        """Whether the parameter was left out; raises RuntimeError where it has a gradient all the same."""
        if number in self._left_out and has_gradient(self.parameters[number]):
            raise RuntimeError(
                f"{self._describe(number)} was left out of this step, but this backward() reached it: leave out only "
                "what no rank's backward() reaches"
            )
        return number in self._left_out  # its gradient is zeros that DDP has put there

    def _awaited(self, transport: BucketTransport) -> int:
        return sum(slot.parameter not in self._left_out for slot in transport.layout.slots)

    def _send(self, index: int) -> None:
        self._sent = True
        transport = self._transports[index]
        for slot in transport.layout.slots:
            self._is_left_out(slot.parameter)
        if not self._awaited(transport) and transport.may_stay:
            transport.stay()
            self._pipeline.follow(NothingToSend())
            return
        for slot in transport.layout.slots:
            if slot.parameter not in self._arrived:
                transport.leave_out(slot, expected=slot.parameter in self._left_out)
        transport.start()
        self._pipeline.follow(transport)

    def _send_rest(self) -> None:
        # Gradients that no hook announced: accumulated in no_sync, or set by hand.
        for number, parameter in enumerate(self.parameters):
            if number not in self._arrived and parameter.grad is not None:
                self._arrive(number)
        for index in range(self._pipeline.started, len(self._transports)):
            self._send(index)
        before = self._left_out if self._left_out_of_all is None else self._left_out_of_all
        self._left_out_of_all = self._left_out & before
