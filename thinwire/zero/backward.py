"""The one watcher of backward: it sees gradients arrive, sends each bucket as soon as it is whole, and knows when a
backward, and when a step, is over.

Buckets are moved on as later ones start: start(0), start(1), advance(0), start(2), advance(1), wait(0), ... The order
of legs is fixed by the buckets' numbers alone, so that ranks cannot disagree about it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero import gradient_seal
from thinwire.zero.bucket_layout import Slot
from thinwire.zero.gradient_seal import Seal, SentGradient, gradient_of, whole_of
from thinwire.zero.gradients import BucketTransport
from thinwire.zero.rank_checks import agree_to_leave_out, check_left_out
from thinwire.zero.training_loops import Turn

_Call = Callable[[], None]
_graph_task = torch._C._current_graph_task_id


class GradientHook:
    """Calls a method with `index` whenever a parameter's gradient is complete, while the method's object lives, whose
    `turn` is told of errors. One that is in the graph and gets no gradient, as a dropped layer's, is not announced.
    """

    def __init__(self, on_gradient: Callable[[int], None], index: int) -> None:
        # As weakref.WeakMethod, without a call of Python's for each gradient.
        self._owner: weakref.ref[Any] = weakref.ref(on_gradient.__self__)  # type: ignore[attr-defined]
        self._on_gradient = on_gradient.__func__  # type: ignore[attr-defined]
        self._index = index

    def __call__(self, parameter: Tensor) -> None:
        """Be called by autograd."""
        owner = self._owner()
        if owner is not None and parameter.grad is not None:
            try:
                self._on_gradient(owner, self._index)
            except BaseException as error:
                owner.turn.fail(error)
                raise


def _drop_sent(parameter: Tensor, sent: SentGradient) -> None:
    """Have every backward that adds to the gradient, as torch.autograd.grad does not, drop a SentGradient before."""
    of_parameter, of_sent = weakref.ref(parameter), weakref.ref(sent)

    def drop(gradients: object) -> None:
        one, stands = of_parameter(), of_sent()
        if one is not None and stands is not None and (one.grad is stands or stands.in_place):
            stands.make_way(one)

    sent.adder = torch.autograd.graph.get_gradient_edge(whole_of(parameter)).node
    sent.adder.register_prehook(drop)


class BackwardWatcher:
    """The backwards of one step, and which parameters had gradients in them.

    With `keeps_gradients`, backwards add up in `.grad`, and only the last one, outside of `no_sync`, is sent. Without,
    every backward is sent, and the transports add up. Every rank runs the same number of backwards.

    `parameters`: those watched, by number; hooked once they require gradients. `held_back`: keep them until `finish`.
    `arrived`: the numbers of those whose gradients this backward has brought, in order. `seal`: by which edits of these
    are noticed. `started`: how many buckets have left in this backward.
    `left_out`: parameters that all of the step's backwards, as sent so far, left out on every rank.
    `gates`: nothing is sent while one of them returns false, which is how another wrapper's `no_sync` is obeyed.
    `turn`: of the one thread in a backward. `before_first`: called once, before the next one's first gradient is taken.

    Args:
        describe: how an error message calls a parameter, by its number.
        on_whole: called when a synchronised backward ends that reached every parameter but those in `usually_absent`.
            Another may be a part of a larger one.
    """

    def __init__(self, describe: Callable[[int], str], on_whole: _Call) -> None:
        self.parameters: list[Tensor] = []
        self.seal = Seal(self.parameters, describe)
        self._kinds: list[tuple[torch.dtype, torch.device]] = []
        self._sent_gradients: dict[int, SentGradient] = {}
        self.usually_absent: frozenset[int] = frozenset()
        self._describe, self._on_whole = describe, on_whole
        self._unhooked: list[int] = []
        self.gates: list[Callable[[], bool]] = []
        self.before_first: _Call | None = None
        self._synchronize, self.held_back = True, False
        self.turn = Turn()
        self.use([], keeps_gradients=True)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take charge of the gradients of further parameters from the next backward on, and of earlier ones that by now
        require gradients."""
        for parameter in parameters:
            self._unhooked.append(len(self.parameters))
            self.parameters.append(parameter)
            self._kinds.append((parameter.dtype, parameter.device))
        for number in self._unhooked:
            if self.parameters[number].requires_grad:
                gradient_seal.replace_hook(self.parameters[number], GradientHook(self._on_gradient, number))
        self._unhooked = [number for number in self._unhooked if not self.parameters[number].requires_grad]

    def use(
        self, transports: Sequence[BucketTransport], keeps_gradients: bool, between_legs: _Call | None = None
    ) -> None:
        """Send through these from the next backward on.

        `between_legs`, where given, is called by `finish` when every bucket has left and none has begun leg 2.
        """
        self._transports: list[BucketTransport] = []
        self._places: dict[int, tuple[int, Slot]] = {}
        self._sizes, self._overwrites = list[int](), False
        self._keeps_gradients = keeps_gradients
        self._between_legs = between_legs
        self._begin_step()
        self.add(transports)

    @torch.no_grad()
    def add(self, transports: Sequence[BucketTransport]) -> None:
        """Send through these too, after the others. Gradients of their parameters that are there are taken now."""
        for transport in transports:
            number = len(self._transports)
            self._transports.append(transport)
            self._overwrites |= transport.overwrites_gradients
            self._places |= {slot.parameter: (number, slot) for slot in transport.layout.slots}
            self._sizes.append(len(transport.layout.slots))
            self._waiting.append(sum(slot.parameter not in self._left_out for slot in transport.layout.slots))
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

    # What a training loop calls

    def leave_out(self, parameters: Iterable[Tensor], comm: Communicator) -> None:
        """Expect no gradient of these in the next backward that is sent, on any rank. Collective.

        Takes the place of what was left out before; raises as the optimizer's.
        """
        error = None
        if self.arrived and self._keeps_gradients:
            error = RuntimeError("leave_out() comes before the synchronised backward(), not after it")
        elif self.arrived:
            self.end_backward()
        self._left_out = agree_to_leave_out(comm, self.parameters, parameters, error)
        for number, transport in enumerate(self._transports):
            self._waiting[number] = sum(slot.parameter not in self._left_out for slot in transport.layout.slots)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up; where gradients are not kept they leave all the same."""
        if self.in_step and self._keeps_gradients:
            gradient_seal.refuse_late_no_sync()
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def end_backward(self) -> None:
        """Send the buckets that some parameter's lack of a gradient held back. Collective."""
        if not self._sends():
            return
        before = self.started
        self._send_rest()
        if not self._keeps_gradients:
            self._move_on(lag=0)
            self._begin_backward()
        elif self.started > before:
            self.seal.take_again()

    def finish(self) -> None:
        """Bring everything of this step to its end. Collective; again after `add`, for what was added."""
        if self._unhooked:
            self.watch(())
        if self.arrived or not self._sent or self._keeps_gradients:
            self._send_rest()
        if self._between_legs is not None:
            self._between_legs()
        self._move_on(lag=0)
        self._finished = True

    def wait_for_averages(self) -> None:
        """Wait until the gradients that have left in this step are averaged, and leave it open. Collective."""
        if self.arrived and not self._keeps_gradients:
            self.end_backward()
        elif self._keeps_gradients and self.in_step and not self._finished:
            self.finish()
            self.seal.take_again()

    @torch.no_grad()
    def send_again(self) -> None:
        """Take and send this step's gradients once more. Collective, after `finish`."""
        self.started = self._advanced = self._waited = 0
        self._stay.clear()
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
        for number, sent in self._sent_gradients.items():
            sent.spent, sent.in_place = self.parameters[number].grad is sent, False
        self.seal.used = self.seal.taken if self._overwrites else {}
        self._begin_step()

    def drop(self) -> None:
        """Forget gradients that have left or arrived, as some may have on other ranks. Collective if there are any."""
        if self._sent or self.arrived:
            self.finish()
        if self._sent or self.arrived or self._arrived_in_step or self._left_out:
            self.end_step()
        self.seal.used = {}

    # One backward

    def _sends(self) -> bool:
        if not self._keeps_gradients:
            return True
        return self._synchronize and not self.held_back and all(map(operator.call, self.gates))

    def _begin_step(self) -> None:
        self._arrived_in_step: set[int] = set()
        self.left_out: frozenset[int] = frozenset()
        self._sent: bool = False
        self._some_sent = self._finished = False
        self._task = -1  # torch's number of the backward
        self._begin_backward()

    def _begin_backward(self) -> None:
        self.arrived: dict[int, tuple[Tensor | None, int] | None] = {}  # what `.grad` was once it had been taken
        self.seal.clear()
        self._left_out = frozenset[int]()
        self._waiting: list[int] = self._sizes.copy()  # how many gradients each bucket has not taken yet
        self.started = self._advanced = self._waited = 0
        self._stay: set[int] = set()

    def _on_gradient(self, number: int) -> None:
        if torch.is_grad_enabled():  # with create_graph
            with torch.no_grad():
                self._on_gradient(number)
            return
        if self._task != _graph_task():
            self._enter()
        self._arrive(number, self._sending)

    def _enter(self) -> None:
        """Note that the first gradient of a backward has come, or of one within it."""
        turn = self.turn
        if turn.thread or turn.cut_short:
            turn.check("backward()")
        if self.before_first is not None:
            callback, self.before_first = self.before_first, None
            callback()
        self._task = _graph_task()
        if turn.thread and turn.in_backward:
            return
        self._sending = self._sends()
        # Twice: a callback queued by a callback runs after those that others, DDP for one, queued meanwhile.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        at_end = partial(queue, self._on_backward_end)
        turn.backward, turn.call, turn.thread = weakref.ref(at_end), "backward()", get_ident()
        queue(at_end)

    def _on_backward_end(self) -> None:
        self._task = -1
        try:
            for number, held in self.arrived.items() if self._sending and not self.seal.written_back else ():
                gradient = self.parameters[number].grad
                if gradient is None or (held and (gradient is not held[0] or gradient._version != held[1])):
                    self.seal.refuse(number)
            known = self.arrived.keys() | self.usually_absent | self._left_out
            if self._sending and (
                len(known) == len(self.parameters)
                or all(number in known or not one.requires_grad for number, one in enumerate(self.parameters))
            ):
                with torch.no_grad():
                    self._on_whole()
            # Not before: DDP writes gradients back after they have arrived here.
            self.seal.take(self.arrived if self._sending else ())
        except BaseException as error:
            self.turn.fail(error)
            raise
        self.turn.thread = 0

    def _arrive(self, number: int, sends: bool = True) -> None:
        parameter, place = self.parameters[number], self._places.get(number)
        if self.seal.used:
            self.seal.refuse_used(number, writes=1)
        if (gradient := parameter.grad) is None:
            gradient_seal.refuse_dropped_gradient(self._describe(number))
        if gradient.layout is not torch.strided or (parameter.dtype, parameter.device) != self._kinds[number]:
            gradient_seal.refuse_kind(parameter, *self._kinds[number], self._describe(number))
        if not sends:
            self._arrived_in_step.add(number)
            if place is not None:
                self._transports[place[0]].keep(place[1], parameter)
            return
        if number in self._left_out:
            check_left_out(parameter, self._describe(number))
            return
        first = number not in self.arrived
        if self._finished if first else self._keeps_gradients:
            gradient_seal.refuse_second_backward(self._describe(number), late=first)
        if not first:
            self.end_backward()
        self._arrived_in_step.add(number)
        self.arrived[number] = None
        if place is not None:
            self._take(number)
            self._waiting[place[0]] -= 1
            while self.started < len(self._transports) and not self._waiting[self.started]:
                self._send_next()

    def _take(self, number: int) -> None:
        parameter = self.parameters[number]
        index, slot = self._places[number]
        self._transports[index].take(slot, parameter)
        if parameter.grad is None:
            sent = self._sent_gradients.get(number)
            if sent is None or sent.shape != parameter.shape:  # its `.data` was replaced
                sent = self._sent_gradients[number] = SentGradient(parameter, self._describe(number))
                _drop_sent(parameter, sent)
            sent.spent, sent.written, sent.in_place = False, False, True
            parameter.grad = sent
        self.arrived[number] = parameter.grad, parameter.grad._version

    def _send_next(self) -> None:
        """Start the next bucket, and move the earlier ones on."""
        self._sent = True
        transport = self._transports[self.started]
        arrives = False
        for slot in transport.layout.slots:
            if slot.parameter in self._left_out:
                check_left_out(self.parameters[slot.parameter], self._describe(slot.parameter))
            else:
                arrives = True
        if not arrives and transport.may_stay:
            transport.stay()
            self._stay.add(self.started)
        else:
            for slot in transport.layout.slots:
                if slot.parameter not in self.arrived:
                    transport.leave_out(slot, expected=slot.parameter in self._left_out)
            transport.start()
        self.started += 1
        if self._between_legs is None:
            self._move_on(lag=1)

    @torch.no_grad()
    def _send_rest(self) -> None:
        # Gradients that no hook announced: accumulated in no_sync, or set by hand.
        before = len(self.arrived)
        for number, parameter in enumerate(self.parameters) if before < len(self.parameters) else ():
            if number not in self.arrived and parameter.grad is not None:
                self.seal.refuse_used(number, writes=0)
                if gradient_of(parameter) is not None:
                    self._arrive(number)
        while self.started < len(self._transports):
            self._send_next()
        if len(self.arrived) > before:
            self.seal.take(list(self.arrived)[before:])
        self.left_out = self._left_out & self.left_out if self._some_sent else self._left_out
        self._some_sent = True

    def _move_on(self, lag: int) -> None:
        """Bring all buckets that have left but the last `lag` to leg 2, and all but twice as many to its end."""
        while self._advanced < self.started - lag:
            if self._advanced not in self._stay:
                self._transports[self._advanced].advance()
            self._advanced += 1
        while self._waited < self.started - 2 * lag:
            if self._waited not in self._stay:
                self._transports[self._waited].wait()
            self._waited += 1
