"""The home of local updates by workers that come and go.

Outer steps are numbered over the whole job, as SharedStates does it, and each is taken by all of a generation or by
none. docs/internals/elastic.md says why that holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import CommunicationError, Communicator
from thinwire.comm.elastic import MembershipError, until_done
from thinwire.comm.membership import Membership
from thinwire.comm.relay import GenerationCommunicator, WorkerGroup
from thinwire.compress.codecs import Codec
from thinwire.compress.packet import PacketError
from thinwire.optim.diloco.checkpoint import ELASTIC
from thinwire.optim.diloco.elastic_meeting import Loaded, Plan, Standing, hand_over, load_worker, saved_states
from thinwire.optim.diloco.fragments import Fragment, Guard, OuterOptimizer, Timetable
from thinwire.optim.diloco.home import LocalHome
from thinwire.optim.diloco.outer import OuterState, OuterStep, UnderWay, make_node_outer_step
from thinwire.optim.diloco.outer_weights import KeptMomentum
from thinwire.optim.diloco.worker import Worker
from thinwire.optim.elastic_job import meet_and_join
from thinwire.zero.home import StepResult, ring_bytes
from thinwire.zero.saved_state import SliceSource


class _WorkerWaits(CommunicationError):  # noqa: N818 - no error: all know after the same outer step
    """All meet, to let a worker in."""


class ElasticHome(LocalHome):
    """One worker's part in a job that goes on without workers that died, and with those that come.

    Where the worker is a node, all of its ranks do the same, and `membership` has the first one act for them.
    Construction waits until this worker is in the job, and then has its outer weights.
    """

    outer_steps: list[OuterStep]

    def __init__(
        self,
        comm: Communicator,
        membership: Membership,
        worker: Worker,
        names: Sequence[str],
        fragments: Sequence[Fragment],
        codec_of: Callable[[bool], Codec],
        timetable: Timetable,
        outer: OuterOptimizer,
        mix: float | Literal["carry"],
        share: Mapping[str, int],
        make_guard: Callable[[int], Guard | None],
    ) -> None:
        """`codec_of`: of values that are nowhere below 0, or of others."""
        device = worker.parameters[0].device
        self.membership = membership
        self.index = 0
        """This worker's number among `workers`, which may change at an outer step."""
        self._relay = membership.relay
        self._group = WorkerGroup(self._relay, None)

        def make_step(fragment: Fragment, number: int, positive: bool) -> OuterStep:
            guard, comm = make_guard(fragment.numel), self._group.comm
            return make_node_outer_step(self._relay, comm, fragment, codec_of(positive), number, device, guard)

        super().__init__(comm, comm, None, worker, names, fragments, timetable, outer, mix, share, make_step)
        # Who speaks for the node keeps it for all of its ranks.
        self._momentum = KeptMomentum([one.numel if self._relay.leads else 0 for one in fragments], device)
        self._loaded: Loaded | None = None  # until the next meeting
        self._resumed_from = ""
        self._taken = 0
        self._dropped: list[int] = []
        self._at_the_end = 0
        self._in_the_job = False
        self._is_over = False
        self._failure = ""
        self._bytes_earlier = 0
        self._meet()

    # What it reports

    @property
    @override
    def bytes_sent(self) -> int:
        return self.bytes_sent_between_nodes + self.worker.bytes_inside + self._relay.bytes_sent

    @property
    @override
    def bytes_sent_between_nodes(self) -> int:
        return self._bytes_earlier + self._group.bytes_sent

    @override
    def model_state_bytes(self) -> dict[str, float]:
        """Every worker keeps the whole outer momentum."""
        found = super().model_state_bytes()
        found["outer momentum"] += self._momentum.nbytes
        return found

    # Training

    @override
    def step(self) -> StepResult:
        if self._is_over:
            raise RuntimeError(
                "synchronize() has ended this worker's part in the job: to evaluate, or to save the model, while it "
                "runs, use eval() and train(), which need no other rank"
            )
        try:
            result = self.worker.step(self.loss_scale, self.overflows)
        except CommunicationError as error:
            raise self._relay.lost(error) from error
        self.steps += 1
        self._together(self._take_part)
        return result

    @override
    def synchronize_weights(self) -> None:
        """End this worker's part in the job, with all weights alike."""
        if self._is_over:
            return
        self._at_the_end = 0 if self._ends_in_sync else self._timetable.fragments
        self._together(self._end)
        self._is_over = True
        self.met_at = self.steps

    @property
    @override
    def in_sync(self) -> bool:  # type: ignore[override]
        return self._is_over

    @override
    def close(self) -> None:
        """Leave; the others go on without this worker."""
        if not self._is_over:
            self.membership.leave()
            self._is_over = True
        self._part()
        self._relay.close()
        self.worker.close()

    def _end(self) -> None:
        self._take_in_all()
        while self._left < self._due:
            self._leave_next()
            self._take_in(self.under_way[0])
        if not self.membership.finish(self._left):
            raise CommunicationError("the workers have to meet once more before they end")

    @property
    def _left(self) -> int:
        """Outer steps for which this worker has sent its part."""
        return self._taken + len(self.under_way)

    @property
    def _due(self) -> int:
        """Outer steps for which it should have."""
        return self._shared.count(self._timetable.count(self.steps) + self._at_the_end)

    @override
    def _leave_due(self) -> None:
        if self._left < self._due:
            self.membership.takes(self._left + 1)
            self._shared.begin()
        while self._left < self._due:
            self._leave_next()

    def _leave_next(self) -> None:
        self.membership.takes(self._left + 1)
        self._leave(self._shared.fragment(self._left))

    @override
    def _announced(self) -> tuple[int, bool]:
        return self._left, self.membership.wanted

    @override
    def _take_in(self, one: UnderWay, mix: float = 0.0) -> None:
        super()._take_in(one, mix)
        assert one.arrived is not None
        self._count(one, one.arrived.update)
        if one.arrived.meet and not self.fragments[self._shared.fragment(self._taken)].kind:
            raise _WorkerWaits("a worker waits")  # with state as it is in common behind these weights

    def _count(self, one: UnderWay, update: Tensor | None) -> None:
        """Outer step number `_taken` is taken, or dropped where there is no `update`."""
        if update is None:
            self._dropped = [*self._dropped, self._taken][-len(self.fragments) :]
        elif self._relay.leads and not self.fragments[one.fragment].kind:
            self._momentum.follow(one.fragment, update, one.settings, self._states()[one.fragment])
        self._taken += 1

    @override
    def _on_gradient(self, number: int) -> None:
        if self._failure:
            return
        try:
            super()._on_gradient(number)
        except PacketError:
            raise
        except CommunicationError as error:  # in a user's backward(): the step deals with it
            self._failure = str(error)

    # Meetings

    def _together(self, action: Callable[[], None]) -> None:
        """Do it with the others, in as many generations as that takes."""

        def act() -> None:
            if reason := self.membership.why_meet(self._failure):
                raise CommunicationError(reason)
            action()

        until_done(act, self._meet)

    @torch.no_grad()
    def _meet(self, failure: CommunicationError | None = None) -> None:
        """Be in the next generation that can work together."""
        meet_and_join(
            self.membership,
            None if isinstance(failure, _WorkerWaits) else failure,
            lambda: asdict(self._standing()) if self._in_the_job else None,
            lambda found: self._move_to(found.index, Plan.of([entry.record for entry in found.entries])),
            lambda: f"from step {self.steps} on",
        )

    def _standing(self) -> Standing:
        arrived = sum(one.arrived is not None for one in self.under_way)
        mine = Standing(self._taken, arrived, self.steps, self._dropped, self.index, self._resumed_from)
        saved = None if self._loaded is None else self._loaded.place
        if saved is None:
            return mine
        return replace(mine, place=saved.place, resumes=saved.workers, claimed=saved.claimed)

    def _move_to(self, me: int, plan: Plan) -> None:
        """Bring all of a generation, this worker as number `me`, to the same outer step, and exchange with them."""
        if not any(plan.standings) and self.membership.begun:
            raise MembershipError("no rank is left that has the job's weights: start a new job, from a checkpoint")
        self._in_the_job = stays = plan.standings[me] is not None
        if stays and not plan.as_saved:
            self._take_in_arrived()
        if me == plan.order[0] and self._relay.leads and plan.claimed:
            claims = self.membership.claims
            claims.claim(max(0, plan.claimed - claims.claim(0)))
        if not plan.top and not plan.as_saved:
            self._shared.cut({})  # not all may know what was agreed
        group = self.membership.connect(plan.order, "exchange")
        try:
            if plan.lacking and me in (plan.source, *plan.lacking):
                self._hand_over(me, plan)
        except CommunicationError:
            group.close()
            raise
        self._part()
        if not (stays and plan.as_saved):
            self.under_way.clear()
        self._group = self._shared.group = group
        self.workers, self.index = len(plan.order), plan.order.index(me)
        self.uncompressed_step_bytes = ring_bytes(self.workers * self.comm.size, self._trained)
        self._warns = self.index == 0 and self._relay.leads
        states = self._states()
        for number, (fragment, before) in enumerate(zip(self.fragments, states, strict=True)):
            guard = self.outer_steps[number].guard
            after = self._shared.make_step(fragment, number, self._shared.least(fragment) is not None)
            if guard is not None and after.guard is not None:
                after.guard.known = guard.known
            self._momentum.hand_on(number, before, after.state, with_residuals=stays)
            self.outer_steps[number] = after
        self._failure, self._loaded, self._resumed_from = "", None, plan.of_source.checkpoint
        self._in_the_job = True
        self.membership.begin()

    def _take_in_arrived(self) -> None:
        """Take in early what has arrived, as others count it as taken."""
        while self.under_way and self.under_way[0].arrived is not None:
            one = self.under_way[0]
            super()._take_in(one, 0.0 if self._at_the_end else self._mix)
            assert one.arrived is not None
            self._count(one, one.arrived.update)

    def _hand_over(self, me: int, plan: Plan) -> None:
        """Give those who lack outer steps, or have nothing, what the source has. Collective of these."""
        group = self.membership.connect([plan.source, *plan.lacking], "state")
        outer, momentum = hand_over(group, plan, me, self.names, self._shared, self._momentum)
        if me != plan.source and plan.standings[me] is None:
            for fragment, values in outer.items():
                in_common = not self.fragments[fragment].kind or bool(values.any())
                self.weights.set(fragment, values, values if in_common else None)
            for fragment, values in enumerate(momentum):
                self._momentum.of(fragment).copy_(values)
            self._taken, self.steps, self._dropped = plan.top, plan.steps, list(plan.of_source.dropped)
        elif me != plan.source:
            while self._taken < plan.top:
                finite = self._taken not in plan.of_source.dropped
                self._catch_up(outer[self._shared.fragment(self._taken)], finite=finite)
        self._bytes_earlier += group.bytes_sent
        group.close()

    def _catch_up(self, outer: Tensor, *, finite: bool) -> None:
        """Take an outer step that others have taken, on which this worker had sent its part: `outer` is its end."""
        one = self.under_way.pop(0)
        before = self.weights.outer(one.fragment).clone()
        self.outer_steps[one.fragment].settle(finite)
        mix = 0.0 if self._at_the_end or not finite or self.fragments[one.fragment].kind else self._mix
        own = torch.lerp(outer, self.weights.replica(one.fragment), mix) if mix else outer
        self.weights.set(one.fragment, outer, own)
        self._count(one, before - outer if finite else None)

    def _part(self) -> None:
        """Leave the communicator of the last generation."""
        group = self._group
        self._bytes_earlier += group.bytes_sent
        if isinstance(group.comm, GenerationCommunicator):
            group.comm.abandon()
        else:
            group.close()

    # Checkpoints

    @override
    def counters(self) -> dict[str, Any]:
        owned = [[one.own.start, one.own.stop] for one in self._states()]
        said = {"place": self.index, "workers": self.workers, "owned": owned, "taken": self._taken}
        place = self._relay.ask(lambda: {**said, "claimed": self.membership.claims.taken})
        return {**super().counters(), ELASTIC: place}

    @override
    def load(self, source: SliceSource) -> None:
        """At the beginning of a job, which then goes on as the workers that load go on."""
        if self.steps or self._taken or self._is_over:
            raise RuntimeError(
                f"this worker is in a job that is at step {self.steps}: load a state at step 0, on workers of a new "
                "job. A worker that joins gets the job's weights by itself"
            )
        self._shared.cut_saved(source.counters(), self._timetable)
        self._loaded = loaded = load_worker(source, self._checkpoint, self._momentum, leads=self._relay.leads)
        self.steps, self.under_way, self._resumed_from = loaded.steps, loaded.under_way, loaded.run
        self._taken = self._shared.count(self._timetable.count(self.steps)) - len(self.under_way)
        self._in_the_job = True
        self._meet(CommunicationError("a state was loaded"))

    @override
    def load_weights(self, source: SliceSource) -> None:
        """Raise RuntimeError."""
        raise RuntimeError(
            "the weights of an elastic job are not one worker's to change: load them into the model before the "
            "optimizer is built, and those of the job's first worker count"
        )

    @override
    def reset_state(self) -> None:
        """Raise RuntimeError."""
        raise RuntimeError("an elastic job's state is not one worker's to forget: build a new optimizer in a new job")

    @override
    def _states(self) -> list[OuterState]:
        return super()._states() if self._loaded is None else self._loaded.states

    @override
    def _saved_states(self) -> list[OuterState]:
        return saved_states(self.fragments, self._states(), self._momentum, leads=self._relay.leads)

    @override
    def _bring_all(self) -> None:
        # Not where all is here, so that no worker meets between two calls that save.
        if not self._is_over and (self._left < self._due or any(one.arrived is None for one in self.under_way)):
            self._together(self._bring_due)

    def _bring_due(self) -> None:
        self._leave_due()
        super()._bring_all()
