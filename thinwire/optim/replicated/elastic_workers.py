"""Replicated state on workers that come and go: a death costs no step.

A step has two parts. What it brings leaves in packets, and nothing that must outlive it moves: it can be sent again,
from the gradients that each worker still holds, to however many are left. Who has all of it applies it, by numbers that
all decide together (`comm/decisions.py`), and keeps it until the next one is there: survivors who lack some of it take
it over. docs/internals/elastic.md says why that holds.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import CommunicationError, Communicator, threads
from thinwire.comm.decisions import Decisions
from thinwire.comm.elastic import Elastic, MembershipError
from thinwire.comm.membership import Generation, Record
from thinwire.comm.torch_backend import GenerationCommunicator
from thinwire.compress.packet import Flags, PacketError
from thinwire.optim.elastic_job import enter_elastic_job, meet_and_join
from thinwire.optim.options import HomeOptions
from thinwire.optim.replicated.elastic_buckets import (
    Arrival,
    ElasticSynchronizer,
    Owned,
    hand_on,
    owned_residuals,
)
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.synchronizer import FreezeGroups, SynchronizedBackward
from thinwire.optim.step import Send
from thinwire.optim.wire import Wire
from thinwire.zero.rank_checks import broadcast_from_rank_0

_SYNC = SynchronizedBackward()
"""Stands for the backward of a sync without one."""


class StepPhase(IntEnum):
    """The part of a step that a worker is in, after the last of which it has had everything."""

    APPLYING = 0
    BETWEEN = 1  # steps, before the next one's data are chosen: here workers may join
    SENDING = 2


@dataclass(frozen=True)
class Position:
    """A worker's, as it says at a meeting: steps of which it has had everything, its phase since, and decisions that it
    knows. `begins_at`: what tells the state apart that it has loaded, if it has."""

    brought: int
    phase: int
    decided: int
    begins_at: str = ""

    @property
    def at(self) -> tuple[int, int]:
        """Comparable between workers."""
        return self.brought, self.phase


def _positions(generation: Generation) -> list[Position | None]:
    """Of its workers; None of those that are new."""
    return [None if one.record is None else Position(**one.record) for one in generation.entries]


def may_be_joined(records: Sequence[Record | None]) -> bool:
    """Whether workers that say so are all between the same two steps."""
    said = [Position(**one) for one in records if one is not None]
    return all(one.at == said[0].at and one.phase == StepPhase.BETWEEN for one in said)


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
        save: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
    ) -> None:
        """`compared`: what all workers must have alike. `save` and `load`: where the run is, but for what tensors
        hold, as JSON can hold it."""
        self._options, self._layout, self._synchronizer = options, layout, synchronizer
        self._table: ParameterTable = layout.table
        self._save, self._load = save, load
        self.comm = self._group = threads.single(elastic.timeout)
        self.decisions = Decisions(self._group, self._meet_in_a_decision)
        self.dealt_to: list[str] = []
        self.shared_data: dict[str, Any] = {}
        self.on_step: Callable[[list[str], list[str] | None], None] = lambda dealt_to, took_part: None
        self.in_use = False
        self._brought, self._phase, self._wanted = 0, StepPhase.BETWEEN, False
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
        self._meet(alarm=False)
        self._go_on()

    @property
    def bytes_sent(self) -> int:
        """Bytes this worker has sent to others."""
        return self._bytes_earlier + self._group.traffic.bytes_sent

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
        while self._brought == before:
            try:
                if self._synchronizer.outcome is None:
                    self._look_around()
                    self._move()
                backward = self._synchronizer.finish_as_it_is()
                if all(group.send is Send.LOCAL for group in self._layout.groups):
                    self.on_step(self.dealt_to, None)
                    return backward
                self._take(self._synchronizer.arrival(backward))
            except (PacketError, MembershipError):
                self._synchronizer.end_step()
                raise
            except CommunicationError:
                self._meet(alarm=True)
        self.on_step(self.dealt_to, self._names_sent)
        self.dealt_to = self._names_sent
        assert self._arrival is not None
        return self._arrival.backward

    def end_step(self) -> None:
        """Let workers join that wait for it."""
        if self._phase is not StepPhase.APPLYING:  # a local step
            return
        self._phase = StepPhase.BETWEEN
        while self._wanted and self._meet(alarm=False):
            pass
        self._go_on()

    def _take(self, arrival: Arrival) -> None:
        """Note that all of a step is there: every other worker has applied the one before, or it had sent nothing."""
        self._brought, self._phase, self._wanted = self._brought + 1, StepPhase.APPLYING, arrival.backward.meet
        self._arrival, self._owned = arrival, {}
        self.decisions.forget()

    def _look_around(self) -> None:
        """Raise CommunicationError if the workers have to meet."""
        if reason := self.membership.why_meet(self._synchronizer.watcher.lost):
            raise CommunicationError(reason)

    def _go_on(self) -> None:
        self._phase = StepPhase.SENDING
        self._move()

    # Resuming

    def check_may_load(self) -> None:
        """Raise RuntimeError if this worker has begun."""
        if self.in_use or self._brought:
            raise RuntimeError(
                "this worker's job has begun: load a state before the first step, on all workers of a new job. Who "
                "joins gets the job's state by itself"
            )

    def begin_at(self, state: str) -> None:
        """Go on from a state that was loaded, as all other workers do. Collective."""
        self._begins_at, self._owned = state, {}
        self._meet(alarm=True)
        self._go_on()

    # The end

    def end(self, step: int) -> None:
        """End this worker's part in the job, after step number `step`, with all weights alike. Collective."""
        before = self._brought
        while not self._is_over:
            try:
                if self._brought == before:
                    self._look_around()
                    self._move()
                for group in self._layout.groups:
                    arrived = self._brought > before
                    group.meet(step, lambda: self._take(self._synchronizer.arrival(_SYNC)), arrived=arrived)
                self._phase = StepPhase.SENDING
                if not self.membership.finish():
                    raise CommunicationError("the workers have to meet once more before they end")
                self._is_over = True
            except (PacketError, MembershipError):
                raise
            except CommunicationError:
                self._meet(alarm=True)

    def close(self) -> None:
        """Leave; the others go on without this worker."""
        if not self._is_over:
            self.membership.leave()
            self._is_over = True
        self._part()

    # Meetings

    def _meet_in_a_decision(self, error: CommunicationError) -> None:
        self._meet(alarm=True)

    @torch.no_grad()
    def _meet(self, *, alarm: bool) -> bool:
        """Be in the next generation that can work together; whether some of it have still to come to where this worker
        is between two steps."""
        generation, lost = meet_and_join(self.membership, self._stand, self._join, alarm=alarm)
        said = _positions(generation)
        if generation.index == 0 and generation.number > 1:
            new = f"{said.count(None)} of them new"
            line = "; ".join([f"{len(said)} workers after {self._brought} steps sent, {new}", *lost])
            print(f"thinwire: {line}", file=sys.stderr, flush=True)
        here = (self._brought, self._phase)
        return any(one is not None and one.at < here for one in said)

    def _stand(self) -> Record | None:
        at = self._brought, self._phase, self.decisions.passed, self._begins_at
        return asdict(Position(*at)) if self._in_the_job else None

    def _join(self, generation: Generation) -> None:
        """Connect with the workers of a generation, and have all decisions, and newcomers all state, of those who have
        most."""
        said = _positions(generation)
        stay = [number for number, one in enumerate(said) if one is not None]
        new = [number for number, one in enumerate(said) if one is None]
        if not stay and self.membership.begun:
            raise MembershipError("no worker is left that has the job's weights: start a new job, from a checkpoint")
        begin = Counter(one.begins_at for one in said if one is not None).most_common(1)
        if self._in_the_job and begin and begin[0][0] != self._begins_at:
            self.membership.leave()
            raise MembershipError(
                f"this worker begins at {self._begins_at or 'step 0'}, and others at {begin[0][0] or 'step 0'}: load "
                "what one worker saved, or each what it saved after the same step, on all workers of a new job"
            )
        if new:  # then all are between the same two steps
            self.dealt_to = generation.names
        group = self.membership.connect(range(len(said)), "exchange").comm
        assert group is not None, "a worker is one process"
        try:
            # Before decisions, as those of the step before are forgotten by it.
            self._share_step({number: one.brought for number, one in enumerate(said) if one is not None})
            self._share_decisions(group, {number: one.decided for number, one in enumerate(said) if one is not None})
            source = stay[0] if stay else 0
            if new and (generation.index == source or not self._in_the_job):
                self._hand_over([source, *(number for number in new if number != source)])
        except CommunicationError:
            group.close()
            raise
        self._part()
        self._group, self._names_now, self._moved = group, generation.names, True
        self.decisions.follow(group)
        self._synchronizer.watcher.lost = ""  # as all is sent again
        self._in_the_job = True
        self.membership.begin()

    def _share_decisions(self, group: Communicator, known: Mapping[int, int]) -> None:
        """Have all of `group` know the decisions that any does; `known`: how many, by worker."""
        first, last = min(known.values(), default=0), max(known.values(), default=0)
        if first < last:
            source = min(number for number, one in known.items() if one == last)
            mine = self.decisions.kept_since(first) if group.rank == source else ""
            self.decisions.adopt(first, group.all_gather_bytes(mine.encode(), "share decisions")[source].decode())

    def _share_step(self, brought: Mapping[int, int]) -> None:
        """Have all who lack some of the last step that was sent take it over; `brought`: how many were, by worker."""
        last = max(brought.values(), default=0)
        source = next((number for number, one in brought.items() if one == last), 0)
        members = [source, *(number for number, one in brought.items() if one < last)]
        generation = self.membership.generation
        assert generation is not None
        if len(members) == 1 or generation.index not in members:
            return
        group = self.membership.connect(members, "step").comm
        assert group is not None
        mine = self._arrival if group.rank == 0 else self._synchronizer.arrival(_SYNC)
        assert mine is not None, "who is a step ahead has had it"
        told = group.all_gather_bytes(mine.but_packets(), "share a step")[0]
        packets = mine.packets if group.rank == 0 else list(map(torch.empty_like, mine.packets))
        broadcast_from_rank_0(group, packets)
        group.barrier()
        if group.rank:
            arrival = Arrival.of(told, packets)
            self._synchronizer.take_over(arrival)
            self._take(arrival)
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
        self._layout.step.flags = Flags.MEET if few or self.membership.wanted else Flags.NONE
        if not self._moved:
            return
        if not self._owned:
            self._owned = owned_residuals(self._layout.groups)
        before = self._layout.cut_anew(Wire(self._group, self._options, decisions=self.decisions))
        for group in self._layout.groups:
            hand_on(before.pop(0), group, self._owned)
        self.comm, self._names_sent, self._moved = self._group, self._names_now, False
        self._synchronizer.move(self._group)

    # What newcomers get

    def _hand_over(self, members: Sequence[int]) -> None:
        """Give the workers `members` what the first of them has. Collective of these."""
        group = self.membership.connect(members, "state").comm
        assert group is not None
        counted = {"brought": self._brought, "decided": self.decisions.passed, "shared_data": self.shared_data}
        counted["begins_at"] = self._begins_at
        mine = json.dumps({**counted, "where": self._save()}).encode() if group.rank == 0 else b""
        told = json.loads(group.all_gather_bytes(mine, "hand over its state")[0])
        if group.rank:
            self._brought, self.decisions.passed = told["brought"], told["decided"]
            self.shared_data, self._begins_at = told["shared_data"], told["begins_at"]
            self._load(told["where"])
            self._begin_as(told["where"]["freeze_groups"])
        broadcast_from_rank_0(group, self._everything())
        group.barrier()  # all have all of it before its sender may go
        if group.rank:
            self._table.publish_all()
            for one in self._layout.groups:
                one.restore()
        self._bytes_earlier += group.traffic.bytes_sent
        group.close()

    def _begin_as(self, freeze_groups: Sequence[Mapping[str, Any]]) -> None:
        """Be as far as these, but for what tensors hold."""
        for group, saved in zip(self._layout.groups, freeze_groups, strict=True):
            group.clock.steps = saved["steps"]
            if group.rule is not None and saved["rule"]:
                group.rule.load(saved["rule"])
            group.algorithm.load_scalars(saved["scalars"], self._table.names)
            if saved["frozen_at"] is not None and group.clock.frozen_at is None:
                group.storage.begin_frozen_state()
            group.clock.frozen_at = saved["frozen_at"]
            if group.shows_own_weights:
                group.storage.keep_common()

    def _everything(self) -> list[Tensor]:
        """Weights and state that all workers have alike, in one order."""
        found = self._table.weights()
        for group in self._layout.groups:
            for bucket in group.buckets:
                found += [bucket.state[name][: bucket.layout.numel] for name in sorted(bucket.state)]
        return found
