"""The parameters that entered the optimizer together: they warm up together, freeze together, and turn what the ranks
exchanged into steps of an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.optim.algorithm import Algorithm, Clock, Send
from thinwire.optim.bucket import AlgorithmBucket, StepUnderWay, place_of
from thinwire.optim.formulas import AdamSettings, variance_norm
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.members import Members, MembersByGroup
from thinwire.optim.options import check_same_freeze
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.wire import Wire
from thinwire.zero import BucketLayout, Slot

__all__ = ["FreezeGroup"]


class FreezeGroup:
    """Buckets with one step count and one freeze; a parameter group added later begins its own.

    Where the algorithm takes local steps, master weights are those of the last sync once it is frozen, the same bits on
    every rank, and what a parameter shows is this rank's own.

    `left_out_steps`: local steps to which this rank added nothing, as its gradient was not finite.
    """

    def __init__(
        self,
        table: ParameterTable,
        wire: Wire,
        algorithm: Algorithm,
        rule: FreezeRule | None,
        step: StepUnderWay,
        layouts: Sequence[BucketLayout],
        first_index: int,
    ) -> None:
        self.algorithm = algorithm
        self.rule = rule
        self.clock = Clock(frozen_at=None if algorithm.freezes else 0)
        self.left_out_steps = 0
        self._table = table
        self._wire = wire
        self._comm = wire.comm
        self.buckets = [
            AlgorithmBucket(
                index,
                layout,
                table,
                wire,
                algorithm,
                self.clock,
                step,
                new_state=self._new_state,
                shards_state=False,
            )
            for index, layout in enumerate(layouts, first_index)
        ]
        self._show_state()
        self._prepare()

    @property
    def send(self) -> Send:
        """What the step under way, or that comes next, sends."""
        return self.algorithm.next_send(self.clock)

    # One step

    def update(self, absent: frozenset[int], loss_scale: float, clip: float) -> None:
        """Apply what the exchanges of this step brought; `absent` parameters had no gradient on any rank. Collective.

        Averages of an EXACT step are there already; see `receive_averages`.
        """
        send, decision = self.send, self.algorithm.decision()
        if self.shows_own_weights:
            self._take_over_written()
        self.clock.steps += 1
        if send is Send.EXACT:
            self._exact_step(absent, loss_scale, clip)
        elif send is Send.LOCAL:
            self._local_step()
        else:
            self._compressed_step(send)
        self._decide_on_freeze(decision)
        self._prepare()

    def receive_averages(self) -> None:
        """Write averaged gradients into the payloads, if this is an EXACT step."""
        for bucket in self.buckets if self.send is Send.EXACT else ():
            bucket.receive()

    def square_of_averages(self, absent: frozenset[int]) -> float:
        """The square of the averaged gradients' 2-norm, times that of the loss scale, in an EXACT step."""
        averages = [
            bucket.view(bucket.exchange.payload, slot)
            for bucket in self.buckets
            for slot in bucket.layout.slots
            if slot.parameter not in absent
        ]
        return float(torch.stack(torch._foreach_norm(averages)).double().square().sum()) if averages else 0.0

    @torch.no_grad()
    def meet(self, step: int) -> None:
        """Meet the other ranks now, as a sync would, without a gradient of its own; `step` is for the packets' headers.
        Collective unless the ranks are in sync."""
        if self.algorithm.in_sync:
            return
        self._take_over_written()
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                out = bucket.compressed.payload[place_of(slot)]
                self.algorithm.begin_meeting(bucket.contribution(slot), out)
            bucket.compressed.start(step)
            bucket.compressed.advance()
            bucket.compressed.wait()
            bucket.compressed.outcome()
        for bucket in self.buckets:
            bucket.prepare(Send.SYNC)
            bucket.receive()
        agree = self._agreement({})
        self.algorithm.absorb_compressed(self._members(self._with_elements), self.clock, agree)
        self.algorithm.meet(self._members(self._trained), self.clock)
        self._end_sync()
        self._prepare()

    def show_own_weights(self, own: bool) -> None:
        """Show this rank's own weights, or those of the last sync."""
        if self.shows_own_weights:
            for bucket in self.buckets:
                for slot in self._trained(bucket):
                    master = self._table.state(slot.parameter)["master"]
                    self._table.show(slot.parameter, self._own_weight(bucket, slot) if own else master)

    @property
    def shows_own_weights(self) -> bool:
        """Whether parameters may show other weights than those that all ranks have in common."""
        return self.algorithm.local_steps and self.clock.frozen

    @property
    def compresses(self) -> bool:
        """Whether there are residuals, or will be at the next step."""
        return self.clock.frozen or self.algorithm.local_steps

    def restore(self) -> None:
        """Go on with what a checkpoint put into the state and the clock."""
        for bucket in self.buckets:
            bucket.find_zero_variance()
        if self.shows_own_weights:
            self._keep_masters()
            self.show_own_weights(True)
        self._prepare()

    # Kinds of steps

    def _exact_step(self, absent: frozenset[int], loss_scale: float, clip: float) -> None:
        def present(bucket: AlgorithmBucket) -> Iterable[Slot]:
            return (slot for slot in self._with_elements(bucket) if slot.parameter not in absent)

        groups = self._members(present)
        for members in groups:
            if loss_scale != 1.0:
                torch._foreach_div_(members.averages, loss_scale)
            if clip < 1.0:
                torch._foreach_mul_(members.averages, clip)
        self.algorithm.absorb_owned(groups, self.clock)
        self.algorithm.absorb_exact(groups, self.clock, self._agreement(_settings(groups)))
        self.algorithm.settle(groups, self.clock)
        self._move(groups)
        if self.algorithm.published:
            for bucket in self.buckets:
                bucket.find_zero_variance()

    def _compressed_step(self, send: Send) -> None:
        if send is Send.SYNC:
            self._count_local()
        for bucket in self.buckets:
            bucket.receive()
        trained = self._members(self._trained)
        self.algorithm.absorb_compressed(
            self._members(self._with_elements), self.clock, self._agreement(_settings(trained))
        )
        self._move(trained)
        if send is Send.SYNC:
            self._end_sync()

    def _local_step(self) -> None:
        finite = self._own_is_finite()
        self._count_local()
        self.algorithm.decay_common(self._members(self._trained), self.clock)
        self.algorithm.absorb_local(self._members(self._with_elements), self.clock, finite)
        self.show_own_weights(True)

    def _move(self, groups: Sequence[Members]) -> None:
        self.algorithm.move(groups, self.clock)
        for members in groups:
            for parameter in members.parameters:
                self._table.publish(parameter)

    def _end_sync(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                self._table.publish(slot.parameter)
        self.algorithm.end_sync()

    def _count_local(self) -> None:
        self.algorithm.count_local(
            {number: self._table.settings(number) for number in self._group_numbers()}, self.clock
        )

    def _own_is_finite(self) -> bool:
        """Whether this rank can take its local step; warns where it cannot."""
        if all(bucket.own_is_finite() for bucket in self.buckets):
            return True
        self.left_out_steps += 1
        warnings.warn(
            f"local step {self.clock.steps} adds nothing on rank {self._comm.rank}: a gradient was NaN or infinite "
            "there. The other ranks go on",
            RuntimeWarning,
            stacklevel=8,
        )
        return False

    # The freeze

    def _decide_on_freeze(self, decision: object) -> None:
        rates = [float(group["lr"]) for group in self._table.groups()]
        if self.rule is not None and not self.clock.frozen:
            reached = self.rule.reached(self.clock.steps, rates, self._variance_norm)
            if self.rule.looks_at(self.clock.steps):
                check_same_freeze(self._comm, reached, rates)
            if reached:
                self._freeze()
        if decision is not None:
            froze = self.clock.frozen_at == self.clock.steps
            if froze or decision != self.algorithm.decision():
                check_same_freeze(self._comm, self.clock.frozen, rates)

    def _freeze(self) -> None:
        self.rename_state()
        groups = self._members(self._with_elements)
        self.algorithm.freeze(groups, self.clock, self._agreement(_settings(groups)))
        self.clock.frozen_at = self.clock.steps
        for bucket in self.buckets:
            bucket.begin_compression()
        if self.algorithm.local_steps:
            self._keep_masters()

    def _keep_masters(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                self._table.keep_apart(slot.parameter)

    def _variance_norm(self) -> float:
        return sum(
            float(variance_norm(members["exp_avg_sq"], members.settings, self.clock.steps))
            for members in self._members(self._with_elements)
        )

    # Weights that somebody else has written

    def _take_over_written(self) -> None:
        """Take over weights that somebody wrote into the parameters.

        Raises RuntimeError where those were this rank's own: what was written need not be the same on other ranks.
        """
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                if self._table.changed(slot.parameter):
                    self._accept_written(bucket, slot)

    def _accept_written(self, bucket: AlgorithmBucket, slot: Slot) -> None:
        parameter = self._table.parameters[slot.parameter]
        if self.algorithm.in_sync:
            self._table.make_master(slot.parameter)
        elif torch.equal(parameter, self._own_weight(bucket, slot).to(parameter.dtype)):
            self._table.accept(slot.parameter)
        else:
            raise RuntimeError(
                f"{self._table.describe(slot.parameter)} was changed between local steps, in which ranks hold weights of "
                "their own: call optimizer.synchronize_weights() on every rank before you change weights, or load the "
                "model before the optimizer"
            )

    def _own_weight(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        """What a parameter shows between syncs, fp32, in the parameter's shape."""
        master: Tensor = self._table.state(slot.parameter)["master"]
        own = self.algorithm.own_weight(master.reshape(-1), bucket.contribution(slot))
        return own.view(master.shape)

    # Parts

    def rename_state(self) -> None:
        """Have the frozen stage's state."""
        for bucket in self.buckets:
            bucket.rename_state()
        self._show_state()

    def _new_state(self, name: str, layout: BucketLayout) -> Tensor:
        device = self._table.parameters[layout.slots[0].parameter].device
        values = torch.zeros(self._wire.padded_numel(layout), device=device)
        values[: layout.numel].fill_(self.algorithm.fills.get(name, 0.0))
        return values

    def _show_state(self) -> None:
        """Let every parameter's entry in the optimizer's state be views of the buckets' state."""
        shown = set(self.algorithm.state) | set(self.algorithm.frozen_state)
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                entry = self._table.state(slot.parameter)
                for name in shown - set(bucket.state):
                    entry.pop(name, None)
                entry |= {name: bucket.view(values, slot) for name, values in bucket.state.items()}

    def _prepare(self) -> None:
        for bucket in self.buckets:
            bucket.prepare(self.send)

    def _members(self, slots: Callable[[AlgorithmBucket], Iterable[Slot]]) -> list[Members]:
        members = MembersByGroup(self._table.settings, self._table.mask)
        for bucket in self.buckets:
            payload = bucket.exchange.payload
            for slot in slots(bucket):
                members.add(
                    self._table.group_number(slot.parameter),
                    slot.parameter,
                    self._table.weight(slot.parameter),
                    bucket.view(payload, slot),
                    {name: bucket.view(values, slot) for name, values in bucket.state.items()},
                )
        return members.in_order()

    def _with_elements(self, bucket: AlgorithmBucket) -> Iterable[Slot]:
        return (slot for slot in bucket.layout.slots if slot.numel)

    def _trained(self, bucket: AlgorithmBucket) -> Iterable[Slot]:
        trains = (slot for slot in self._with_elements(bucket) if self._table.parameters[slot.parameter].requires_grad)
        return list(trains)

    def _group_numbers(self) -> list[int]:
        return sorted({self._table.group_number(slot.parameter) for b in self.buckets for slot in b.layout.slots})

    def _agreement(self, settings: dict[int, AdamSettings]) -> _RankZeros:
        return _RankZeros(self._comm, [parameter.numel() for parameter in self._table.parameters], settings)


class _RankZeros:
    """An Agreement on what every rank has found for whole parameters: rank 0's numbers.

    Norms are sums, which another CPU or number of threads adds up in another order: weights that must be the same bits
    on every rank cannot depend on each rank's own.
    """

    def __init__(self, comm: Communicator, numels: Sequence[int], settings: dict[int, AdamSettings]) -> None:
        self._comm = comm
        self.numels = numels
        self.settings = settings

    def zeros(self, kinds: int) -> Tensor:
        return torch.zeros(len(self.numels), kinds, dtype=torch.float64)

    def __call__(self, sums: Tensor, greatest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        together = torch.cat([sums, torch.zeros_like(sums[:, :1]) if greatest is None else greatest[:, None]], dim=1)
        self._comm.broadcast(together)
        return together[:, :-1], together[:, -1]


def _settings(groups: Sequence[Members]) -> dict[int, AdamSettings]:
    return {parameter: members.settings for members in groups for parameter in members.parameters}
