"""Replicated state on workers that come and go: a death costs no step.

A step has two parts. What it brings leaves in packets, and nothing that must outlive it moves: it can be sent again,
from the gradients that each worker still holds, to however many are left. Who has all of it applies it, by numbers that
all decide together (`comm/decisions.py`), and keeps it until the next one is there: survivors who lack some of it take
it over. docs/internals/elastic.md says why that holds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch

from thinwire.comm import CommunicationError, Communicator, threads
from thinwire.comm.attendance import in_background
from thinwire.comm.decisions import Bystander, Decisions
from thinwire.comm.elastic import Elastic, MembershipError, until_done
from thinwire.comm.membership import Generation, Record
from thinwire.comm.relay import GenerationCommunicator
from thinwire.compress.kernels.loading import compiled_backend
from thinwire.compress.packet import Flags
from thinwire.optim.elastic_job import (
    Position,
    StepPhase,
    enter_elastic_job,
    first_and_late,
    may_be_joined,
    meet_and_join,
    positions,
)
from thinwire.optim.options import HomeOptions
from thinwire.optim.replicated.elastic_buckets import Arrival, ElasticSynchronizer, Owned, cut_anew, owned_residuals
from thinwire.optim.replicated.joining import CommonState, Onlooker, Step, Telling, Told
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.synchronizer import FreezeGroups, SynchronizedBackward
from thinwire.optim.step import Send
from thinwire.optim.wire import Wire
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.saved_state import SavedSlice, SliceSource, take_over_settings

_ATTEMPTS = 3
"""To look on, which ends if a worker dies."""

_SYNC = SynchronizedBackward()
"""Stands for the backward of a sync without one."""


class ElasticWorkers:
    """One worker's part in a job that goes on without workers that died, and with those that come.

    `dealt_to`: the workers, by name and in their order, among whom the next step's data are dealt. `shared_data`: what
    a sampler has all workers know, which newcomers get. `on_step`: called with those to whom a step's data were dealt,
    and those whose gradients it has, None while that is not known. `in_use`: whether this worker has begun a step.
    `comm`: of the workers that the buckets are cut for. `decisions`: see Decisions.
    Construction waits until this worker is in the job, and then has its weights and state.
    """

    def __init__(
        self,
        elastic: Elastic,
        options: HomeOptions,
        layout: FreezeGroups,
        synchronizer: ElasticSynchronizer,
        compared: Mapping[str, Any],
        state: CommonState,
        apply: Callable[[SynchronizedBackward], object],
    ) -> None:
        """`compared`: what all workers must have alike. `apply`: takes a step of which all is there."""
        self._options, self._layout, self._synchronizer = options, layout, synchronizer
        self._table: ParameterTable = layout.table
        self._state, self._apply = state, apply
        self._onlooker: Onlooker | None = None
        self.comm = self._group = threads.single(elastic.timeout)
        self.decisions = Decisions(self._group, self._meet)
        self.dealt_to: list[str] = []
        self.shared_data: dict[str, Any] = {}
        self.on_step: Callable[[list[str], list[str] | None], None] = lambda dealt_to, took_part: None
        self.in_use = False
        self._brought, self._decided, self._phase, self._calls = 0, 0, StepPhase.BETWEEN, Flags.NONE
        self._arrival: Arrival | None = None  # of the last step that was sent
        self._begins_at = ""
        self._names_now: list[str] = []  # of `_group`
        self._names_sent: list[str] = []  # of `comm`
        self._moved = self._in_the_job = self._is_over = False
        self._owned: Owned = {}  # as the last step left it, however often the buckets are cut after it
        self._bytes_earlier = 0
        settings = json.loads(json.dumps(compared, default=repr))
        table = self._table
        self.membership = enter_elastic_job(
            elastic, self._group, settings, table.names, table.parameters, may_be_joined
        )
        self._telling = Telling(self.membership, state)
        self._look_on()
        self._meet()
        self._go_on()

    @property
    def bytes_sent(self) -> int:
        """Bytes this worker has sent to others."""
        return self._bytes_earlier + self._group.traffic.bytes_sent + self._telling.bytes_sent

    # One step

    def bring(self) -> SynchronizedBackward:
        """Have what a step brings on every worker that is left, from where it counts for all. Collective."""
        if self._is_over:
            raise RuntimeError("this worker's part in the job has ended, by synchronize_weights() or close()")
        if (scale := self._layout.step.loss_scale) != 1.0:
            raise ValueError(
                f"elastic workers take no loss scale, got {scale:g}, as those who join would have another: train in "
                "bf16 or fp32, without a GradScaler"
            )
        self.in_use = True
        before = self._brought

        def send() -> SynchronizedBackward:
            if self._brought == before:  # else it has been taken over
                if self._synchronizer.outcome is None:
                    self._look_around()
                    self._move()
                backward = self._synchronizer.finish_as_it_is()
                if all(group.send is Send.LOCAL for group in self._layout.groups):
                    return backward
                self._take(self._synchronizer.arrival(backward))
            assert self._arrival is not None
            return self._arrival.backward

        try:
            backward = until_done(send, self._meet)
        except CommunicationError:
            self._synchronizer.end_step()
            raise
        if self._brought == before:
            self.on_step(self.dealt_to, None)
        else:
            self.on_step(self.dealt_to, self._names_sent)
            self.dealt_to = self._names_sent
        return backward

    def end_step(self) -> None:
        """Let workers join that wait for it."""
        if self._phase is not StepPhase.APPLYING:  # a local step
            return
        self._phase = StepPhase.BETWEEN
        assert self._arrival is not None
        self._telling.go_on(self._arrival, lambda: self.decisions.kept_since(self._decided), self.shared_data)
        if Flags.TELL in self._calls and Flags.MEET not in self._calls:
            self._telling.begin(self._told())
        while Flags.MEET in self._calls and self._meet():
            pass
        self._go_on()

    def _take(self, arrival: Arrival) -> None:
        """Note that all of a step is there: every other worker has applied the one before, or it had sent nothing."""
        self._brought, self._phase, self._calls = self._brought + 1, StepPhase.APPLYING, arrival.backward.calls
        self._arrival, self._owned, self._decided = arrival, {}, self.decisions.passed
        self.decisions.forget()

    def _look_around(self) -> None:
        """Raise CommunicationError if the workers have to meet."""
        if reason := self.membership.why_meet(self._synchronizer.watcher.lost):
            raise CommunicationError(reason)

    def _go_on(self) -> None:
        self._phase = StepPhase.SENDING
        self.membership.takes(self._brought + 1)
        self._move()

    # Resuming

    def check_may_load(self) -> None:
        """Raise RuntimeError if this worker has begun."""
        if self.in_use or self._brought:
            raise RuntimeError(
                "this worker's job has begun: load a state before the first step, on all workers of a new job. Who "
                "joins gets the job's state by itself"
            )

    def own_slices(self) -> list[SavedSlice]:
        """State that lies here, and not with all workers."""
        return []

    def begin_at(self, state: str, source: SliceSource) -> None:
        """Go on from a state that was loaded, of `source`, as all other workers do. Collective."""
        self._begins_at, self._owned = state, {}
        self._meet(CommunicationError("a state was loaded"))
        self._go_on()

    # The end

    def end(self, step: int) -> None:
        """End this worker's part in the job, after step number `step`, with all weights alike. Collective."""
        before = self._brought
        self.membership.takes(before)

        def meet_weights() -> None:
            if self._brought == before:
                self._look_around()
                self._move()
            for group in self._layout.groups:
                arrived = self._brought > before
                group.meet(step, lambda: self._take(self._synchronizer.arrival(_SYNC)), arrived=arrived)
            self._phase = StepPhase.SENDING
            if not self.membership.finish(self._brought):
                raise CommunicationError("the workers have to meet once more before they end")

        if not self._is_over:
            until_done(meet_weights, self._meet)
            self._is_over = True

    def close(self) -> None:
        """Leave; the others go on without this worker."""
        if not self._is_over:
            self.membership.leave()
            self._is_over = True
        self._telling.end()
        self._part()

    # Meetings

    @torch.no_grad()
    def _meet(self, failure: CommunicationError | None = None) -> bool:
        """Be in the next generation that can work together; whether some of it have still to come to where this worker
        is between two steps."""
        generation = meet_and_join(
            self.membership, failure, self._stand, self._join, lambda: f"after {self._brought} steps sent"
        )
        here = (self._brought, self._phase)
        return any(one.at < here for one in positions(generation).values())

    def _stand(self) -> Record | None:
        at = self._brought, self._phase, self.decisions.passed, self._begins_at
        return asdict(Position(*at)) if self._in_the_job else None

    def _join(self, generation: Generation) -> None:
        """Connect with the workers of a generation, and have all decisions, and newcomers all state, of those who have
        most."""
        said = positions(generation)
        looks_on = [one.looks_on for one in generation.entries]
        new = [number for number, one in enumerate(looks_on) if number not in said and not one]
        self._telling.end()
        if not said and self.membership.begun:
            raise MembershipError("no worker is left that has the job's weights: start a new job, from a checkpoint")
        begin = Counter(one.begins_at for one in said.values()).most_common(1)
        if self._in_the_job and begin and begin[0][0] != self._begins_at:
            self.membership.leave()
            raise MembershipError(
                f"this worker begins at {self._begins_at or 'step 0'}, and others at {begin[0][0] or 'step 0'}: load "
                "what one worker saved, or each what it saved after the same step, on all workers of a new job"
            )
        if new or any(looks_on):  # then all are between the same two steps
            self.dealt_to = generation.names
        group = self.membership.connect(range(len(looks_on)), "exchange").comm
        assert group is not None, "a worker is one process"
        try:
            # Before decisions, as those of the step before are forgotten by it.
            self._share_step(generation)
            self.decisions.share(group, {number: one.decided for number, one in said.items()})
            source = min(said, default=0)
            if new and generation.index in (source, *new):
                self._hand_over([source, *(number for number in new if number != source)])
            if any(looks_on):
                last = max(one.brought for one in said.values())
                while self._onlooker is not None and self._brought < last:
                    self._follow(self._onlooker.next_step())
                self._state.check_alike(group, generation.names)
        except CommunicationError:
            group.close()
            raise
        finally:
            self.membership.looks_on, self._onlooker = False, None
        self._part()
        self._group, self._names_now, self._moved = group, generation.names, True
        self.decisions.follow(group)
        self._synchronizer.watcher.lost = ""  # as all is sent again
        self._in_the_job = True
        self.membership.begin()

    def _share_step(self, generation: Generation) -> None:
        """Have all who lack some of the last step that was sent take it over."""
        members = first_and_late(generation, lambda one: one.brought)
        if not members:
            return
        with self._among(members, "step") as group:
            mine = self._arrival if group.rank == 0 else self._synchronizer.arrival(_SYNC)
            assert mine is not None, "who is a step ahead has had it"
            told = group.all_gather_bytes(mine.but_packets(), "share a step")[0]
            packets = mine.packets if group.rank == 0 else list(map(torch.empty_like, mine.packets))
            broadcast_from_rank_0(group, packets)
        if group.rank:
            arrival = Arrival.of(told, packets)
            self._synchronizer.take_over(arrival)
            self._take(arrival)

    @contextmanager
    def _among(self, members: Sequence[int], purpose: str) -> Iterator[Communicator]:
        """Of these workers alone, the first of which has what others lack; no one leaves before all have it."""
        group = self.membership.connect(members, purpose).comm
        assert group is not None, "a worker is a process"
        yield group
        group.barrier()
        self._bytes_earlier += group.traffic.bytes_sent
        group.close()

    def _part(self) -> None:
        """Leave the communicator of the last generation, whatever is in flight."""
        self._bytes_earlier += self._group.traffic.bytes_sent
        if isinstance(self._group, GenerationCommunicator):
            self._group.abandon()
        else:
            self._group.close()

    def _move(self) -> None:
        """Cut all buckets for the workers that there are by now."""
        few = len(self._names_now) < self.membership.settings.min_workers
        meet = Flags.MEET if few or self.membership.wanted else Flags.NONE
        self._layout.step.flags = meet | (Flags.TELL if self.membership.heart.watched else Flags.NONE)
        if not self._moved:
            return
        if not self._owned:
            self._owned = owned_residuals(self._layout.groups)
        cut_anew(self._layout, Wire(self._group, self._options, decisions=self.decisions), self._owned)
        self.comm, self._names_sent, self._moved = self._group, self._names_now, False
        self._synchronizer.move(self._group)

    # Newcomers

    @torch.no_grad()
    def _look_on(self) -> None:
        """Have weights and state beside the others' training, and take the steps that they take meanwhile, up to the
        last few; nothing if that does not come about: the others then wait at the meeting."""
        for _ in range(_ATTEMPTS if all(group.local is None for group in self._layout.groups) else 0):
            try:
                link = self.membership.look_on() if self.membership.begun else None
                if link is None:
                    return
                # Loading takes a second or two, which else the first step that is followed takes.
                kernels = in_background(lambda: compiled_backend(self._table.parameters[0].device.type))
                self._onlooker, ranks = Onlooker(link), Bystander(link.size - 1, self.comm.timeout)
                self.decisions.follow(ranks)
                cut_anew(self._layout, Wire(ranks, self._options, decisions=self.decisions), {})
                self._be_as(self._onlooker.take_state(self._state))
                self._synchronizer.move(ranks)
                kernels.result()
                while self._follow(self._onlooker.next_step()) > 1:
                    pass
            except MembershipError:
                raise
            except CommunicationError:
                self._onlooker = None
            else:
                self.membership.looks_on, self.membership.idle = True, self._follow_on
                return

    def _follow_on(self) -> None:
        with suppress(CommunicationError):  # which ends what `_join` waits for
            while self._onlooker is not None and self._onlooker.has_step:
                self._follow(self._onlooker.next_step())

    @torch.no_grad()
    def _follow(self, step: Step) -> int:
        """Take a step as others have; how many more were waiting when they told of it."""
        told, packets = step
        arrival = Arrival.of(told["arrival"].encode(), packets)
        take_over_settings(told, self._state.groups)
        for bucket in self._layout.buckets:
            bucket.sent = bucket.exchange
        self._synchronizer.take_over(arrival)
        self._take(arrival)
        self.decisions.adopt(self.decisions.passed, told["decisions"])
        self._apply(arrival.backward)
        self._synchronizer.end_step()
        self._phase, self.shared_data = StepPhase.BETWEEN, told["shared_data"]
        return int(told["behind"])

    def _told(self) -> dict[str, Any]:
        counted = {"brought": self._brought, "decided": self.decisions.passed, "onlookers": self.membership.heart.told}
        return {**counted, "shared_data": self.shared_data, "begins_at": self._begins_at}

    def _be_as(self, told: Told) -> None:
        self._brought, self.decisions.passed = told["brought"], told["decided"]
        self.shared_data, self._begins_at = told["shared_data"], told["begins_at"]
        self.membership.heart.told = told["onlookers"]

    def _hand_over(self, members: Sequence[int]) -> None:
        """Give the workers `members` what the first of them has. Collective of these."""
        with self._among(members, "state") as group:
            told = self._state.hand_over(group, self._told())
        if group.rank:
            self._state.end()
            self._be_as(told)
