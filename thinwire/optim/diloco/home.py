"""The home of local updates: a worker that steps by itself, and fragments of its weights in flight to and from the
others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import NodeLinks
from thinwire.compress.packet import SettingsError
from thinwire.optim.diloco.checkpoint import LocalCheckpoint, LocalCounters
from thinwire.optim.diloco.fragments import Fragment, OuterOptimizer, Timetable
from thinwire.optim.diloco.outer import Arrived, OuterState, OuterStep, UnderWay
from thinwire.optim.diloco.outer_weights import OuterWeights, SharedStates
from thinwire.optim.diloco.touches import Touches
from thinwire.optim.diloco.worker import Worker
from thinwire.zero.home import Home, ParameterState, StepResult, ring_bytes
from thinwire.zero.saved_state import SavedSlice, SliceSource
from thinwire.zero.sharded_home import settings_digest


class LocalHome(Home):
    """Workers that take steps of their own, and now and then an outer step together, fragment by fragment.

    One order on every rank: a fragment is passed on before the next one leaves, and taken in in the order of leaving.
    """

    kind = "local"
    counted = LocalCounters
    touches: Touches | None = None

    def __init__(
        self,
        comm: Communicator,
        exchange_comm: Communicator,
        links: NodeLinks | None,
        worker: Worker,
        names: Sequence[str],
        fragments: Sequence[Fragment],
        timetable: Timetable,
        outer: OuterOptimizer,
        mix: float | Literal["carry"],
        share: Mapping[str, int],
        make_step: Callable[[Fragment, int, bool], OuterStep],
    ) -> None:
        """`share`: state that workers have in common. `make_step`: of a fragment, its number, and whether its values
        are nowhere below 0."""
        self.comm = comm
        self.worker = worker
        self.watcher = worker.watcher
        self.turn = self.watcher.turn
        self.parameters, self.names = worker.parameters, list(names)
        self.outer = outer
        self.fragments = list(fragments)
        self.outer_steps = [make_step(one, number, False) for number, one in enumerate(fragments)]
        self.weights = OuterWeights(worker, self.fragments)
        self.under_way: list[UnderWay] = []
        self.met_at = 0
        """The step after which all workers last held the same weights."""
        self.overflows = False
        self.dropped_outer_steps = 0
        self.left_out = 0
        self.workers = comm.size if links is None else links.num_nodes
        self._trained = [one for one in worker.parameters if one.requires_grad]
        self.uncompressed_step_bytes = ring_bytes(comm.size, self._trained)
        self._warns = comm.rank == 0  # of what all ranks see alike
        self._exchange_comm = exchange_comm
        self._links = links
        self._timetable = timetable
        ranks = range(comm.size) if links is None else links.groups.node_of
        self._shared = SharedStates(share, comm, list(ranks), self.weights, self.outer_steps, make_step)
        self._carries = mix == "carry"
        self._mix = mix if isinstance(mix, float) else 0.0
        self._before_first: Callable[[], None] | None = None
        worker.before_backwards(self._on_gradient)

    # What it reports

    @property
    @override
    def in_sync(self) -> bool:  # type: ignore[override]
        return not self.under_way and self.met_at == self.steps

    @property
    @override
    def bytes_sent(self) -> int:
        inside = 0 if self._links is None else self._links.bytes_inside
        return self.bytes_sent_between_nodes + self.worker.bytes_inside + inside

    @property
    @override
    def bytes_sent_between_nodes(self) -> int:
        touched = 0 if self.touches is None else self.touches.comm.traffic.bytes_sent
        sent = self._exchange_comm.traffic.bytes_sent + touched
        return sent + (0 if self._links is None else self._links.bytes_between)

    # One step

    @override
    def step(self) -> StepResult:
        """Take this worker's own step, then do what the timetable has for it."""
        self._take_over_written()
        if self.touches is not None:
            self.touches.send(self.steps)
            self.touches.pass_on()
        result = self.worker.step(self.loss_scale, self.overflows)
        self.steps += 1
        if self.touches is not None:
            self.touches.take_in()
        self._take_part()
        if self.touches is not None:
            self.touches.send(self.steps)
        return result

    def _take_part(self) -> None:
        self._take_in_all(self.steps, self._mix)
        self._leave_due()
        if self._timetable.overlap == 0:
            self._take_in_all(self.steps, self._mix)
            if self._ends_in_sync:
                self._note_met()

    @property
    def _ends_in_sync(self) -> bool:
        """Whether the last step has ended with all weights alike."""
        plain = self._timetable.overlap == 0 and self._mix == 0.0 and self._timetable.fragments == 1
        return plain and bool(self._timetable.leaving(self.steps))

    @override
    def drop(self) -> None:
        """Keep all: gradients never leave a worker."""

    @override
    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        self.worker.leave_out(parameters)

    @override
    def before_first_backward(self, callback: Callable[[], None]) -> None:
        self._before_first = callback

    # Weights

    @override
    def synchronize_weights(self) -> None:
        """Take in what is in flight, and an outer step of every fragment; replicas then are the outer weights."""
        if self.in_sync:
            return
        self._take_in_all()
        for fragment in range(len(self.fragments)):
            self._leave(fragment)
            self._take_in(self.under_way[0])
        self._note_met()

    @override
    def show_own_weights(self, own: bool) -> None:
        self._take_over_written()
        self.weights.show(not own)

    @override
    def parameter_state(self) -> ParameterState:
        return self.worker.parameter_state(lambda: self.in_sync)

    # Checkpoints

    @override
    def saved_slices(self) -> list[SavedSlice]:
        """Waits for what is in flight, in which other ranks have to take part at their next step at the latest."""
        self._take_over_written()
        self._bring_all()
        return self._checkpoint(self._saved_states()).slices(self.under_way)

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        self._bring_all()
        return self._checkpoint(self._saved_states()).rank_tensors(self.under_way)

    @override
    def counters(self) -> dict[str, Any]:
        self._bring_all()
        counted = self._checkpoint(self._states()).counters(self.steps, self.met_at, self.under_way)
        return {**counted, "lr": self.outer.lr, "momentum": self.outer.momentum}

    @override
    def check(self, source: SliceSource) -> None:
        self._checkpoint(self._states()).check(source)

    @override
    def load(self, source: SliceSource) -> None:
        self._take_in_all()
        self._shared.cut_saved(source.counters(), self._timetable)
        self.steps, self.met_at, self.under_way = self._checkpoint(self._states()).load(source)
        for one in self.under_way if not self._carries else ():
            one.departed = None
        if self.touches is not None:
            self.touches.forget()
        self.weights.note_met()

    @override
    def load_weights(self, source: SliceSource) -> None:
        self._take_in_all()
        self._checkpoint(self._states()).load_weights(source)
        self._note_met()

    @override
    def reset_state(self) -> None:
        """Every worker goes on from the outer weights."""
        self._take_in_all()
        self._shared.cut({})
        self.worker.reset_state()
        for history in self._checkpoint(self._states()).histories.values():
            history.reset()
        for number, outer_step in enumerate(self.outer_steps):
            outer_step.state.reset()
            outer = self.weights.outer(number).clone()
            self.weights.set(number, outer, outer)
        self.steps = 0
        self._note_met()

    @override
    def model_state_bytes(self) -> dict[str, float]:
        numel = sum(one.numel() for one in self._trained)
        found = self.worker.model_state_bytes(numel)
        states = self._states()
        residuals = [kept for one in states for kept in (one.worker_residual, one.owner_residual) if kept is not None]
        found["outer weights"] = 4.0 * numel
        if self._shared.found:
            found["shared state"] = 4.0 * sum(one.numel for one in self.fragments if one.kind)
        found["outer momentum"] = float(sum(one.momentum.nbytes for one in states))
        found["residuals"] = float(sum(one.nbytes for one in residuals))
        return found

    @override
    def close(self) -> None:
        self.worker.close()
        self._exchange_comm.close()
        if self.touches is not None:
            self.touches.comm.close()
        if self._links is not None:
            self._links.close()

    def _checkpoint(self, states: Sequence[OuterState]) -> LocalCheckpoint:
        """What is saved, and where it is taken up: `states` of the fragments' outer steps, and all else here."""
        nodes = None if self._links is None else list(self._links.groups.node_of)
        pieces = (piece.numel for one in self.fragments for piece in one.pieces)
        shape = [self._timetable.every, self._timetable.overlap, *pieces, *self._shared.share.values()]
        return LocalCheckpoint(
            self.comm,
            nodes,
            self.worker,
            self.names,
            self.fragments,
            states,
            self.weights,
            shape,
            self._shared.found,
            *(self.outer, [one.guard for one in self.outer_steps]),
        )

    def _states(self) -> list[OuterState]:
        """What outer steps have left behind, by fragment."""
        return [one.state for one in self.outer_steps]

    def _saved_states(self) -> list[OuterState]:
        return self._states()

    def _note_met(self) -> None:
        if self.touches is not None:
            self.touches.forget()
        self.met_at = self.steps
        self.weights.note_met()

    def _take_over_written(self) -> None:
        """Where all workers hold the outer weights: take over what was written to the parameters since."""
        if self.in_sync:
            self.weights.take_over_written()

    def _leave_due(self) -> None:
        before, after = (self._timetable.count(step) for step in (self.steps - 1, self.steps))
        if before < after:
            self._shared.begin()
        for number in range(self._shared.count(before), self._shared.count(after)):
            self._leave(self._shared.fragment(number))

    def _leave(self, fragment: int) -> None:
        """Send a fragment's outer gradient; all that left before are passed on first, on every rank alike."""
        for earlier in self.under_way:
            self._pass_on(earlier)
        number, meet = self._announced()
        lost = self._shared.lost(self.fragments[fragment])
        settings = self.outer.of(fragment, self.fragments[fragment].kind)
        digest = settings_digest([{**vars(settings), "lost": lost}], number)
        pairs = [] if lost else self.weights.pairs(fragment)
        self.outer_steps[fragment].leave(pairs, number, digest, meet=meet)
        carries = self._carries and not self.fragments[fragment].kind
        departed = self.weights.replica(fragment) if carries else None
        self.under_way.append(UnderWay(fragment, self.steps, settings, departed=departed))

    def _announced(self) -> tuple[int, bool]:
        """The number that all ranks give the next outer step, and whether all have to meet after it."""
        return self.steps, False

    def _pass_on(self, one: UnderWay) -> None:
        if not one.passed_on:
            self.outer_steps[one.fragment].pass_on(one.settings)
            one.passed_on = True

    def _take_in_all(self, due_by: float = math.inf, mix: float = 0.0) -> None:
        """Take in what is in flight and due by a step."""
        while self.under_way and self.under_way[0].left_at + self._timetable.overlap <= due_by:
            self._take_in(self.under_way[0], mix)

    def _take_in(self, one: UnderWay, mix: float = 0.0) -> None:
        """Take the outer step that a fragment has brought; where none was taken, begin again from the outer weights."""
        arrived = self._bring(one)
        self.under_way.remove(one)
        guard, told = self.outer_steps[one.fragment].guard, arrived.told
        left_out = told is not None and told.own in told.left_out
        if guard is not None and told is not None:
            guard.follow(told)
            self.left_out += len(told.left_out)
            if told.left_out and any(told.shares) and self._warns:
                warnings.warn(
                    f"the outer step of step {one.left_at} left out workers {told.left_out}, as outliers: all outer "
                    f"gradients have norms of {told.norms}. Those left out go on from the outer weights",
                    RuntimeWarning,
                    stacklevel=6,
                )
        if arrived.update is None:
            outer = self.weights.outer(one.fragment).clone()
            self.weights.set(one.fragment, outer, outer)
            self.dropped_outer_steps += 1
            if self._warns:
                why = "all outer gradients were outliers" if left_out else "some worker's weights were not finite"
                warnings.warn(
                    f"the outer step of step {one.left_at} was dropped on every rank: {why}. "
                    f"Fragment {one.fragment} goes on from the outer weights, without the steps since the last",
                    RuntimeWarning,
                    stacklevel=6,
                )
        else:
            fragment = self.fragments[one.fragment]
            own, departed = (0.0, None) if fragment.kind or left_out else (mix, one.departed)
            self.weights.subtract(one.fragment, arrived.update, own, self._shared.least(fragment), departed)
            if not fragment.kind:
                self.outer.follow(one.fragment, arrived.update, one.settings)

    def _bring_all(self) -> None:
        for one in self.under_way:
            self._bring(one)

    def _bring(self, one: UnderWay) -> Arrived:
        for earlier in self.under_way[: self.under_way.index(one) + 1]:
            self._pass_on(earlier)
        if one.arrived is None:
            lost = self._shared.lost(self.fragments[one.fragment])
            try:
                one.arrived = self.outer_steps[one.fragment].arrive()
            except SettingsError as error:
                if lost:
                    raise ValueError(lost) from error
                raise
            if lost:
                raise ValueError(lost)
        return one.arrived

    def _on_gradient(self, number: int) -> None:
        """During backwards: go on with what is in flight, where that does not mean to wait."""
        del number
        if self.turn.thread or self.turn.cut_short:
            self.turn.check("backward()")
        if self._before_first is not None:
            callback, self._before_first = self._before_first, None
            callback()
        if self.under_way and not self.under_way[-1].passed_on:
            last = self.under_way[-1]
            if self.outer_steps[last.fragment].may_pass_on():
                self._pass_on(last)
