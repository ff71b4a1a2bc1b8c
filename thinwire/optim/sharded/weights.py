"""Weights that all ranks have in common, moved alike on every rank, with the fp32 master weights of 16-bit ones on
their owners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.calls import StoreRounded
from thinwire.compress.kernels.loading import execute
from thinwire.optim.algorithm import Clock, LocalSteps, Members, MembersByGroup
from thinwire.optim.bucket import AlgorithmBucket, place_of
from thinwire.optim.group_weights import Change, GroupWeights, slots_with_elements
from thinwire.optim.step import Parameters
from thinwire.zero import Slot
from thinwire.zero.master_weights import FlatBucket, MasterWeights, Run

__all__ = ["CommonWeights", "FullWeights"]

ChangeOfRun = Callable[[int, slice, Tensor], None]
"""Changes fp32 weights, those of a run of one parameter, in place; given the parameter's number and the run's place in
the bucket."""


class CommonWeights:
    """One bucket's: the parameters themselves, until `stand_apart` gives them memory of their own, in their dtype.

    Every rank rounds its copy of 16-bit weights at random, with one seed; `publish` takes it from the owners' master
    weights again.
    """

    def __init__(self, masters: MasterWeights) -> None:
        self.bucket: FlatBucket = masters.bucket
        self.masters = masters
        self._apart: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """[padded_numel], in the parameters' dtype: those of the last sync, or the present ones."""
        return self.bucket.flat if self._apart is None else self._apart

    def stand_apart(self) -> None:
        """Keep them where they are whatever becomes of the parameters."""
        if self._apart is None:
            self._apart = self.bucket.flat.clone()

    def reset(self) -> None:
        """Go back to them, and let the parameters be them again."""
        self.show()
        self._apart = None

    def show(self) -> None:
        """Write them into the parameters."""
        if self._apart is not None:
            self.bucket.flat.copy_(self._apart)

    def adopt(self) -> None:
        """Take the parameters as they are for the common weights; master weights are the caller's."""
        if self._apart is not None:
            self._apart.copy_(self.bucket.flat)

    @torch.no_grad()
    def move(self, change: ChangeOfRun, parameters: Collection[int], seed: int) -> None:
        """Change those of `parameters`, the same bits on every rank; `seed` of the rounding to 16 bits."""
        if self.masters.separate:
            first = self.masters.held.start
            for run, view in zip(self.masters.runs, self.masters.views, strict=True):
                if run.parameter in parameters:
                    change(run.parameter, slice(first + run.place.start, first + run.place.stop), view)
        for number, slot in enumerate(self.bucket.layout.slots):
            if slot.parameter in parameters:
                copy = self.values[place_of(slot)]
                weights = copy.float()
                change(slot.parameter, place_of(slot), weights)
                if weights is not copy:
                    execute(StoreRounded(copy, weights, (seed << 24) + number), [copy])

    @torch.no_grad()
    def take_over_written(self, in_sync: bool) -> list[Slot]:
        """Take over what other code has written into parameters; without `in_sync` the slots of those instead."""
        written = self.bucket.take_written()
        if not written or not in_sync:
            return written
        self.adopt()
        self.masters.take_over({slot.parameter for slot in written})
        return []


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

    @override
    def weight(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        """Nothing that an algorithm needs for its state."""
        return bucket.exchange.payload[place_of(slot)]

    @override
    def view(self, bucket: AlgorithmBucket, values: Tensor, slot: Slot) -> Tensor:
        """Flat."""
        return values[place_of(slot)]

    @override
    def absorb_owned(
        self, algorithm: LocalSteps, clock: Clock, groups: Sequence[Members], absent: Collection[int]
    ) -> None:
        owned = MembersByGroup(self._parameters.settings)
        published: dict[int, dict[str, Tensor]] = {}
        for bucket in self._buckets:
            masters = self.of_bucket[bucket.index].masters
            average = bucket.exchange.payload[masters.held]
            state = {name: bucket.state[name] for name in bucket.owned}
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

    @override
    def settle(self, algorithm: LocalSteps, clock: Clock, groups: Sequence[Members], absent: Collection[int]) -> None:
        """Of published state, in fp32 and the parameters' shapes."""
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

    @override
    def change(self, change: Change, groups: Sequence[Members], steps: int) -> None:
        """Cut by cut: master weights and every rank's copy of them."""
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

    @override
    def to_move(self, bucket: AlgorithmBucket) -> tuple[list[Tensor | None], list[Tensor | None]]:
        raise NotImplementedError("whole sharded state has no form that moves weights: give `compressed` and `move`")

    @override
    def moved(self, bucket: AlgorithmBucket) -> None:
        raise NotImplementedError

    @override
    def moves_in_place(self, bucket: AlgorithmBucket) -> bool:
        return False

    @override
    def show_common(self) -> None:
        for weights in self.of_bucket.values():
            weights.show()

    @override
    def common(self, bucket: AlgorithmBucket, slot: Slot) -> Tensor:
        return self.of_bucket[bucket.index].values[place_of(slot)]

    @override
    def show(self, bucket: AlgorithmBucket, slot: Slot, weight: Tensor) -> None:
        self.of_bucket[bucket.index].bucket.flat[place_of(slot)].copy_(weight)

    @override
    def stand_apart(self) -> None:
        for weights in self.of_bucket.values():
            weights.stand_apart()

    @override
    def take_over_written(self, in_sync: bool) -> list[tuple[AlgorithmBucket, Slot]]:
        return [
            (bucket, slot)
            for bucket in self._buckets
            for slot in self.of_bucket[bucket.index].take_over_written(in_sync)
        ]

    @override
    def holds(self, bucket: AlgorithmBucket, slot: Slot, weight: Tensor) -> bool:
        shown = self.of_bucket[bucket.index].bucket.flat[place_of(slot)]
        return torch.equal(shown, weight.to(shown.dtype))

    @override
    def saved(self, bucket: AlgorithmBucket, run: Run, own: bool) -> dict[str, Tensor]:
        weights = self.of_bucket[bucket.index]
        found = {"weight": weights.bucket.shard_of(weights.values)[run.place]}
        return found | ({"master": weights.masters.weights[run.place]} if weights.masters.separate else {})

    @override
    def end_step(self, sent: bool, exact: bool, steps: int) -> None:
        """Take 16-bit weights from the owners' master weights; between no local steps."""
        if not sent or not (exact or steps - self.resynchronized_at >= self._resync_interval):
            return
        self.resynchronized_at = steps
        rounded = [weights for weights in self.of_bucket.values() if weights.masters.separate]
        for wait in [weights.masters.publish() for weights in rounded]:
            wait()
        for weights in rounded:
            weights.adopt()
