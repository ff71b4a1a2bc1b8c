"""The synchronised backward of parameters whose state every rank holds: which of them lie in which bucket of which
freeze group, what becomes of it, the same on every rank, and how it is clipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.packet import Flags, Outcome
from thinwire.optim.algorithm import Algorithm, FreezeRule
from thinwire.optim.bucket import Bucket, Shared
from thinwire.optim.freeze_group import (
    FreezeGroup,
    clip_local_step,
    new_clock,
    next_send,
    read_outcomes,
    sends_by_scale,
)
from thinwire.optim.home import AlgorithmHome
from thinwire.optim.options import HomeOptions
from thinwire.optim.replicated.parameters import ParameterTable, WholeStorage
from thinwire.optim.step import Send, Step
from thinwire.optim.wire import Wire
from thinwire.zero import BucketLayout, bucket_numel, partition
from thinwire.zero.backward import BackwardWatcher
from thinwire.zero.bucket_layout import partition_whole
from thinwire.zero.home import ring_bytes
from thinwire.zero.rank_checks import NormSketch, agree_on_absent, agree_on_order, clip_coefficient, find_overflowing
from thinwire.zero.replica import kind_of

_FP32_BYTES = 4


@dataclass(eq=False)
class FreezeGroups:
    """`groups`, in the order in which they entered, each with one of `storages`.

    `buckets`: of all groups, in the order in which they leave. `uncompressed_bytes`: what a ring all-reduce of their
    gradients sends. `step`: what the buckets of a step share.
    """

    table: ParameterTable
    wire: Wire
    _options: HomeOptions
    _make_algorithm: Callable[[], Algorithm]
    _make_rule: Callable[[], FreezeRule | None]
    groups: list[FreezeGroup] = field(default_factory=list)
    storages: list[WholeStorage] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    uncompressed_bytes: int = 0
    _given: list[int] = field(default_factory=list)  # elements that each owner has, of buckets with owners

    def __post_init__(self) -> None:
        self.comm = self.wire.comm
        self.step = Step(self.table.groups, self._options.averaging.divide_first, self._options.clips_to)

    @property
    def trainable_unplaced(self) -> list[int]:
        """The parameters that lie in no bucket yet and require a gradient."""
        return [index for index in self.step.unplaced if self.table.parameters[index].requires_grad]

    def sends(self) -> set[Send]:
        """The kinds of the next step, the first one of parameters that lie in no bucket yet included."""
        found = {group.send for group in self.groups}
        if self.trainable_unplaced:
            algorithm = self._make_algorithm()
            found.add(next_send(algorithm, new_clock(algorithm)))
        return found

    def place(self, order: Sequence[int]) -> FreezeGroup:
        """Add a freeze group of the parameters `order`, in buckets of `bucket_bytes`."""
        self.step.unplaced = [index for index in self.step.unplaced if index not in set(order)]
        return self._add(self._cut(order))

    def restore(self, freeze_groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Lay parameters out anew: for each freeze group, each bucket's parameters; others wait for a gradient."""
        placed = {index for group in freeze_groups for order in group for index in order}
        self.step.unplaced = [index for index in range(len(self.table)) if index not in placed]
        self.groups.clear()
        self.storages.clear()
        self.buckets = []
        self._given = [0] * self.comm.size
        for buckets in freeze_groups:
            self._add([self._cut(order, whole=True)[0] for order in buckets])

    def all_trainable(self) -> list[list[int]]:
        """Buckets of all trainable parameters, last ones first, as backward is likely to bring them."""
        order = [index for index in reversed(range(len(self.table))) if self.table.parameters[index].requires_grad]
        return [[slot.parameter for slot in layout.slots] for layout in self._cut(order)]

    def owners(self, size: int) -> list[set[int]]:
        """Which parameters each of so many ranks owns, of those with one owner."""
        found, given = [set[int]() for _ in range(size)], [0] * size
        for layout in (bucket.layout for bucket in self.buckets if bucket.layout.whole):
            numels = [parameter.numel() for parameter in self.table.parameters]
            order, most = [slot.parameter for slot in layout.slots], layout.numel + 1
            (cut,) = partition_whole(
                numels, order, world_size=size, block_size=layout.block_size, bucket_numel=most, given=given
            )
            for slot in cut.slots:
                found[slot.offset // cut.shard].add(slot.parameter)
        return found

    def _cut(self, order: Sequence[int], *, whole: bool = False) -> list[BucketLayout]:
        """Buckets of the parameters `order`, of one kind each; one of all of them where they stay `whole`."""
        numels = [parameter.numel() for parameter in self.table.parameters]
        numel = sum(numels[parameter] for parameter in order)
        most = numel + 1 if whole else bucket_numel(self._options.bucket_bytes, numel, _FP32_BYTES)
        owned = () if self._options.owned is None else self._options.owned.shapes
        kinds = [(kind_of(parameter), number in owned) for number, parameter in enumerate(self.table.parameters)]
        found: list[BucketLayout] = []
        for kind in sorted({kinds[number] for number in order}, reverse=True):
            of_kind = [number for number in order if kinds[number] == kind]
            given: Any = {"block_size": self._options.block_size, "bucket_numel": most, "world_size": self.comm.size}
            if not kind[1]:
                found += partition(numels, of_kind, **given)
            elif whole:
                found += partition_whole(numels, of_kind, given=self._given, **given)
            elif self._options.elastic is not None:  # in buckets that suit as many as begin
                found += partition_whole(numels, of_kind, **given | {"world_size": self._options.elastic.workers})
        return found

    def cut_anew(self, wire: Wire) -> list[FreezeGroup]:
        """Lay all out for the ranks of another wire, between steps; return the groups as they were, whose state and
        residuals the new ones do not have yet, but for the clock and what the algorithm remembers."""
        before, self.wire, self.comm = self.groups[:], wire, wire.comm
        self.groups.clear()
        self.storages.clear()
        self.buckets = []
        self._given = [0] * self.comm.size
        for group in before:
            orders = [[slot.parameter for slot in bucket.layout.slots] for bucket in group.buckets]
            self._add([self._cut(order, whole=True)[0] for order in orders], group)
        return before

    def _add(self, layouts: Sequence[BucketLayout], before: FreezeGroup | None = None) -> FreezeGroup:
        algorithm = self._make_algorithm() if before is None else before.algorithm
        clock = new_clock(algorithm) if before is None else before.clock
        shared = Shared(self.table, algorithm, clock, self.wire, self.step)
        numbered = dict(enumerate(layouts, len(self.buckets)))
        storage = WholeStorage(self.table, shared, numbered, bare=before is not None)
        group = FreezeGroup(storage, self._make_rule() if before is None else before.rule)
        self.groups.append(group)
        self.storages.append(storage)
        self.buckets = [*self.buckets, *storage.buckets]
        placed = (self.table.parameters[slot.parameter] for bucket in self.buckets for slot in bucket.layout.slots)
        self.uncompressed_bytes = ring_bytes(self.comm.size, placed)
        return group


@dataclass(frozen=True)
class SynchronizedBackward:
    """One synchronised backward, the same on every rank.

    `absent`: the parameters that had no gradient on any rank. `overflowing`: if the averages are not finite, the ranks
    whose own gradients were not. `calls`: MEET and TELL of any rank.
    """

    finite: bool = True
    absent: frozenset[int] = frozenset()
    overflowing: tuple[int, ...] = ()
    calls: Flags = Flags.NONE


class Synchronizer:
    """Brings backwards to their end, in the buckets of `layout`.

    Buckets hold parameters in the order in which rank 0 saw their gradients arrive: early buckets are then whole early,
    whatever order the parameter groups list them in. The first backward is therefore exchanged as a whole, at its end.
    """

    watcher_kind = BackwardWatcher
    _between_all_legs: Callable[[], None] | None = None  # called once every bucket has left, before any begins leg 2

    def __init__(self, home: AlgorithmHome, table: ParameterTable, layout: FreezeGroups) -> None:
        self.outcome: SynchronizedBackward | None = None  # of the step in flight, once it is known
        self.capturing = False  # into a graph: nothing can be read at the end of a backward
        self.watcher = self.watcher_kind(table.describe, self._on_whole)
        self._home = home
        self._comm = home.comm
        self._table = table
        self._layout = layout
        self._step = layout.step
        self._sketch: NormSketch | None = None
        self._watched: tuple[list[Bucket], Callable[[], None] | None] = ([], None)

    def finish(self) -> SynchronizedBackward:
        """Send what has not left yet, wait for everything and say what became of it. Collective.

        Raises PacketError where the ranks have lost step, and ValueError, on every rank, where some rank has no
        gradient for a parameter that has one on others.
        """
        if self.outcome is not None:
            return self.outcome
        try:
            self.watcher.finish()
            found = read_outcomes(self._step, self._comm, self._layout.buckets)
            if not self._layout.buckets or found.unplaced:
                placed = len(self._layout.buckets)
                self._place_in_order_of_arrival()
                self.watcher.finish()
                more = read_outcomes(self._step, self._comm, self._layout.buckets[placed:])
                found = Outcome(found.finite and more.finite, found.incomplete or more.incomplete)
            self.outcome = self._judge(found, self.watcher.arrived)
        except BaseException:
            self.give_up()
            raise
        self.watcher.usually_absent = self.outcome.absent
        if self.watcher.left_out:
            self.watcher.usually_absent -= self.watcher.left_out
            self.outcome = replace(self.outcome, absent=self.outcome.absent | self.watcher.left_out)
        return self.outcome

    def give_up(self) -> None:
        """Forget a step that did not come to its end."""
        self.end_step()

    def finish_replay(self) -> None:
        """Say what became of a backward, and of legs, that a graph's replay has brought; `finish` then knows.
        Collective, and raises, as `finish`."""
        try:
            brought = {index for index, one in enumerate(self._table.parameters) if one.grad is not None}
            self.outcome = self._judge(read_outcomes(self._step, self._comm, self._layout.buckets), brought)
        except BaseException:
            self.end_step()
            raise

    def finish_as_it_is(self) -> SynchronizedBackward:
        """The same for a step, sent again where payloads left as if this step's scale, or settings, were other ones.
        Collective.

        They change rarely, and alike on every rank; nothing is committed yet. Raises RuntimeError, on every rank, if an
        overflow of this step has been kept from some GradScalers.
        """
        scaler_has_seen = self.outcome is not None or not self._home.scaled or self._home.scales_apart
        outcome = self.finish()
        if not scaler_has_seen and 0 < len(outcome.overflowing) < self._comm.size:
            self.end_step()
            raise RuntimeError(
                f"a gradient overflowed on ranks {list(outcome.overflowing)} in a step that some parameters took no "
                "part in, so that the GradScalers of other ranks could not see it and would keep their scale. Give "
                "every parameter a gradient in each backward, or train in bf16 without a GradScaler"
            )
        if outcome.finite and self._is_outdated():
            self._step.send_again()
            self.outcome = None
            self.watcher.send_again()
            outcome = self.finish()
        self._step.sent_scale = self._step.loss_scale
        return outcome

    def drop(self) -> None:
        """Forget gradients that have left, as every rank does. Collective."""
        self.finish()
        self.end_step()

    def end_step(self) -> None:
        """Forget the step; the next backward begins another."""
        self.watcher.end_step()
        self.outcome = None
        self._step.sent_scale = self._step.loss_scale
        self.prepare()

    def prepare(self) -> None:
        """Be ready for the next step: where its averaged gradient's norm has to be known before leg 2, hold that."""
        self.watcher.held_back = self._home.scales_apart
        self._step.begin()
        sends = self._layout.sends() if self._step.max_norm else set[Send]()
        sketched = bool(sends - {Send.EXACT})
        if self._layout.buckets != self._watched[0]:
            self._sketch = None
        self._step.sketch = self._begin_sketch() if sketched else None
        clip = self._step.clip_by_sketch if sketched and Send.LOCAL not in sends else None
        between_legs = self._between_all_legs or clip
        if (buckets := self._layout.buckets, between_legs) != self._watched:
            self._watched = (buckets, between_legs)
            self.watcher.use(buckets, keeps_gradients=True, between_legs=between_legs)

    def _begin_sketch(self) -> NormSketch:
        if self._sketch is None:
            every, slots = self._table.parameters, (slot for one in self._layout.buckets for slot in one.layout.slots)
            placed = {slot.parameter: every[slot.parameter] for slot in slots}
            self._sketch = NormSketch(self._layout.comm, placed, every[0].device, self._home.replica)
        self._sketch.begin(self._step.number)
        return self._sketch

    def find_clip(self, absent: frozenset[int]) -> None:
        """The clip of steps in which averaged gradients are there, or only this rank's own. Collective."""
        step = self._step
        exact = [group for group in self._layout.groups if group.send is Send.EXACT]
        local = [group for group in self._layout.groups if group.send is Send.LOCAL]
        if exact and len(exact) + len(local) == len(self._layout.groups):
            shares = None if self._home.replica is None else self._table.shares
            square = _square_of_averages(exact, absent, shares).to(self._table.parameters[0].device)
            self._layout.wire.decisions.broadcast(square)
            if self._home.replica is not None:
                self._home.replica.all_reduce(square)
            step.norm = math.sqrt(float(square))
            norm = step.norm / step.loss_scale
            step.clip = clip_coefficient(step.max_norm, norm) if math.isfinite(norm) else 1.0
        if local:
            clip_local_step(step, [bucket for group in local for bucket in group.buckets])

    def _on_whole(self) -> None:
        if not self.capturing and not self.finish().finite:
            # Where another rank's gradients are not finite: a GradScaler must see it on every rank.
            for index in self.watcher.arrived:
                gradient = self._table.parameters[index].grad
                if gradient is not None and gradient.numel():
                    gradient[(0,) * gradient.dim()] = math.inf
                    return

    def _judge(self, found: Outcome, arrived: Collection[int]) -> SynchronizedBackward:
        absent: frozenset[int] = frozenset()
        if self._home.replica is not None:
            found = replace(found, finite=self._table.everywhere(found.finite))
        if found.incomplete:
            absent = agree_on_absent(self._comm, len(self._table), set(arrived), self._table.describe)
        overflowing = () if found.finite else find_overflowing(self._comm, self._table.parameters)
        return SynchronizedBackward(found.finite, absent, overflowing, found.calls)

    def _is_outdated(self) -> bool:
        """Whether what left is not what would be sent now, on every rank alike."""
        for group, settings in self._step.settings_sent.items():
            if settings != self._table.settings(group):
                return True
        changed = self._step.loss_scale != self._step.sent_scale
        return changed and any(map(sends_by_scale, self._layout.groups))

    def _place_in_order_of_arrival(self) -> None:
        trainable = self._layout.trainable_unplaced
        order = agree_on_order(self._comm, trainable, self.watcher.arrived, self._table.describe)
        if order:
            placed = self._layout.place(order).buckets
            if self._step.sketch is not None:
                self._sketch = None  # of what was there before
                self._step.sketch = self._begin_sketch()
            self.watcher.add(placed)


def _square_of_averages(
    groups: Sequence[FreezeGroup], absent: frozenset[int], shares: Sequence[float] | None
) -> Tensor:
    """What this rank counts of the square of the averaged gradients' 2-norm, times that of the loss scale, in an EXACT
    step: fp64 []. `shares`: of each parameter, the part that it counts; None for all."""
    members = [one for group in groups for one in group.storage.members(absent)]
    norms = [norm for one in members for norm in torch._foreach_norm(one.averages)]
    squares = torch.stack(norms).double().square() if norms else torch.zeros((), dtype=torch.float64)
    if shares is not None and norms:
        squares = squares * squares.new_tensor([shares[number] for one in members for number in one.parameters])
    return squares.sum()
