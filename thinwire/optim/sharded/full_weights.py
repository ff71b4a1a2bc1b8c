"""Weights whose fp32 master weights are sharded, of a freeze group whose other state every rank holds whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from thinwire.optim.algorithm import Algorithm, Clock, Keep
from thinwire.optim.bucket import AlgorithmBucket, place_of
from thinwire.optim.group_weights import Change, GroupWeights, slots_with_elements
from thinwire.optim.members import Members, MembersByGroup
from thinwire.optim.sharded.common_weights import CommonWeights
from thinwire.optim.step_under_way import Parameters
from thinwire.zero import Slot
from thinwire.zero.flat_bucket import Run

__all__ = ["FullWeights"]


class FullWeights(GroupWeights):
    """`common_weights`, one for each bucket. 16-bit ones are taken from the owners' master weights at every exact step,
    and after `resync_interval` steps at the next that sends; see `resynchronized_at`."""

    def __init__(
        self,
        parameters: Parameters,
        buckets: Sequence[AlgorithmBucket],
        common_weights: Sequence[CommonWeights],
        resync_interval: int,
    ) -> None:
        super().__init__(parameters, buckets)
        self.of_bucket = {bucket.index: one for bucket, one in zip(buckets, common_weights, strict=True)}
        self.resynchronized_at = 0
        self._resync_interval = resync_interval

    def weight(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        """See GroupWeights; nothing that an algorithm needs for its state."""
        return bucket.exchange.payload[place_of(slot)]

    def view(self, bucket: AlgorithmBucket, values: Tensor, slot: Slot) -> Tensor:
        """See GroupWeights; flat."""
        return values[place_of(slot)]

    def absorb_owned(
        self, algorithm: Algorithm, clock: Clock, groups: Sequence[Members], absent: Collection[int]
    ) -> None:
        """See GroupWeights."""
        owned = MembersByGroup(self._parameters.settings)
        published: dict[int, dict[str, Tensor]] = {}
        for bucket in self._buckets:
            masters = self.of_bucket[bucket.index].masters
            average = bucket.exchange.payload[masters.held]
            state = {name: bucket.state[name] for name, keep in algorithm.state.items() if keep is Keep.OWNER}
            published[bucket.index] = {
                name: bucket.state[name][masters.held].to(torch.float32, copy=True) for name in algorithm.published
            }
            state |= published[bucket.index]
            for run, view in zip(masters.runs, masters.views, strict=True):
                if run.parameter not in absent:
                    group = self._parameters.group_number(run.parameter)
                    of_run = {name: values[run.place] for name, values in state.items()}
                    owned.add(group, run.parameter, view, average[run.place], of_run)
        algorithm.absorb_owned(owned.in_order(), clock)
        for bucket in self._buckets:
            comm = self.of_bucket[bucket.index].bucket.comm
            for name, values in published[bucket.index].items():
                comm.all_gather(bucket.state[name], values.to(bucket.state[name].dtype))

    def settle(self, algorithm: Algorithm, clock: Clock, groups: Sequence[Members], absent: Collection[int]) -> None:
        """See GroupWeights; of published state, in fp32 and the parameters' shapes."""
        for bucket in self._buckets:
            for slot in slots_with_elements(bucket, absent):
                views = {name: bucket.view(bucket.state[name], slot) for name in algorithm.published}
                whole = {name: view.float() for name, view in views.items()}
                members = MembersByGroup(self._parameters.settings, self._parameters.mask)
                nothing = bucket.exchange.payload[:0]
                members.add(self._parameters.group_number(slot.parameter), slot.parameter, nothing, nothing, whole)
                algorithm.settle(members.in_order(), clock)
                for name, view in views.items():
                    view.copy_(whole[name])

    def change(self, change: Change, groups: Sequence[Members], steps: int) -> None:
        """See GroupWeights; cut by cut: master weights and every rank's copy of them."""
        moving = {parameter for members in groups for parameter in members.parameters}
        for bucket in self._buckets:
            payload, state = bucket.exchange.payload, bucket.whole_state

            def move(
                parameter: int,
                place: slice,
                values: Tensor,
                payload: Tensor = payload,
                state: dict[str, Tensor] = state,
            ) -> None:
                members = MembersByGroup(self._parameters.settings)
                of_cut = {name: one[place].float() for name, one in state.items()}
                group = self._parameters.group_number(parameter)
                members.add(group, parameter, values, payload[place], of_cut)
                change(members.in_order())

            self.of_bucket[bucket.index].move(move, moving, (steps << 20) + bucket.index)

    def show_common(self) -> None:
        """See GroupWeights."""
        for weights in self.of_bucket.values():
            weights.show()

    def common(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        """See GroupWeights."""
        return self.of_bucket[bucket.index].values[place_of(slot)]

    def show(self, bucket: AlgorithmBucket, slot: Slot, weight: Tensor) -> None:
        """See GroupWeights."""
        self.of_bucket[bucket.index].bucket.flat[place_of(slot)].copy_(weight)

    def stand_apart(self) -> None:
        """See GroupWeights."""
        for weights in self.of_bucket.values():
            weights.stand_apart()

    def take_over_written(self, in_sync: bool) -> list[tuple[AlgorithmBucket, Slot]]:
        """See GroupWeights."""
        return [
            (bucket, slot)
            for bucket in self._buckets
            for slot in self.of_bucket[bucket.index].take_over_written(in_sync)
        ]

    def holds(self, bucket: AlgorithmBucket, slot: Slot, weight: Tensor) -> bool:
        """See GroupWeights."""
        shown = self.of_bucket[bucket.index].bucket.flat[place_of(slot)]
        return torch.equal(shown, weight.to(shown.dtype))

    def saved(self, bucket: AlgorithmBucket, run: Run, own: bool) -> dict[str, Tensor]:
        """See GroupWeights."""
        weights = self.of_bucket[bucket.index]
        found = {"weight": weights.bucket.shard_of(weights.values)[run.place]}
        return found | ({"master": weights.masters.weights[run.place]} if weights.masters.separate else {})

    def end_step(self, sent: bool, exact: bool, steps: int) -> None:
        """See GroupWeights: take 16-bit weights from the owners' master weights; between no local steps."""
        if not sent or not (exact or steps - self.resynchronized_at >= self._resync_interval):
            return
        self.resynchronized_at = steps
        self.take_from_masters()

    def take_from_masters(self) -> None:
        """Take 16-bit weights of every rank from the owners' master weights. Collective."""
        rounded = [weights for weights in self.of_bucket.values() if weights.masters.separate]
        for wait in [weights.masters.publish() for weights in rounded]:
            wait()
        for weights in rounded:
            weights.adopt()
