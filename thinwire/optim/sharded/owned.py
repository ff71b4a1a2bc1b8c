"""Sharded state of forms that do not pack: master weights, variance and owners' residuals on their owners, momentum and
what else a rank's own steps need whole on every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.calls import StoreRounded
from thinwire.compress.kernels.loading import execute
from thinwire.optim.algorithm import Agreement, Keep, LocalSteps
from thinwire.optim.bucket import Bucket, Shared, place_of
from thinwire.optim.options import HomeOptions
from thinwire.optim.step import Members, MembersByGroup, Send
from thinwire.optim.storage import Change, Storage, counted_bytes, slots_with_elements
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.master_weights import FlatBucket, MasterWeights, Run, ShardedParameters
from thinwire.zero.rank_checks import compare_replicas
from thinwire.zero.sharded_home import ComparisonTimes


class OwnedStorage(Storage):
    """ZeRO stage 1 for algorithms with local steps, or whose step is not linear in what comes back.

    Weights that all ranks have in common are moved alike on every rank. 16-bit ones have fp32 master weights on the
    owner; every rank rounds its copy stochastically with one seed, and takes it from the owners' master weights again
    at every exact step, and after `resync_interval` steps at the next that sends; see `resynchronized_at`. Published
    state and residuals are then bf16.
    """

    shards_state = True

    def __init__(self, sharded: ShardedParameters, shared: Shared, options: HomeOptions) -> None:
        self.resynchronized_at = 0
        self.comparisons = ComparisonTimes(options.resync_interval)
        self._comm = sharded.comm
        self._options = options
        self._published = shared.algorithm.published if isinstance(shared.algorithm, LocalSteps) else ()
        self._common_weights = [_CommonWeights(master_weights) for master_weights in sharded.master_weights]
        super().__init__(shared, {one.index: one.layout for one in sharded.buckets})

    @override
    def new_state(self, name: str, bucket: int, layout: BucketLayout) -> Tensor:
        flat = self._common_weights[bucket].bucket.flat
        owned = self._algorithm.state.get(name) is Keep.OWNER
        dtype = torch.bfloat16 if name in self._published and flat.dtype != torch.float32 else torch.float32
        return torch.zeros(layout.shard if owned else layout.padded_numel, dtype=dtype, device=flat.device)

    @override
    def absorb(self, local: LocalSteps, groups: Sequence[Members], absent: Collection[int], agree: Agreement) -> None:
        self._absorb_owned(local, absent)
        self.hold_masked(self._algorithm.form.denominators, math.inf)
        self._algorithm.exact(groups, self._clock, agree)
        self._settle(local, absent)

    def _absorb_owned(self, algorithm: LocalSteps, absent: Collection[int]) -> None:
        """Have averages taken into the state of owners, and give what they publish to every rank."""
        owned = MembersByGroup(self._parameters)
        published: list[dict[str, Tensor]] = []
        for bucket, weights in zip(self.buckets, self._common_weights, strict=True):
            master_weights = weights.master_weights
            average = bucket.exchange.payload[master_weights.held]
            of_bucket = {
                name: bucket.state[name][master_weights.held].to(torch.float32, copy=True) for name in self._published
            }
            state = {name: bucket.state[name] for name in bucket.owned} | of_bucket
            published.append(of_bucket)
            for run, view in zip(master_weights.runs, master_weights.views, strict=True):
                if run.parameter not in absent:
                    of_run = {name: values[run.place] for name, values in state.items()}
                    owned.add(run.parameter, view, average[run.place], of_run)
        algorithm.absorb_owned(owned.in_order(), self._clock)
        for bucket, weights, of_bucket in zip(self.buckets, self._common_weights, published, strict=True):
            for name, values in of_bucket.items():
                weights.bucket.gathering.all_gather(bucket.state[name], values.to(bucket.state[name].dtype))

    def _settle(self, algorithm: LocalSteps, absent: Collection[int]) -> None:
        """Have what takes whole parameters done to published state, in fp32 and the parameters' shapes."""
        for bucket in self.buckets:
            for slot in slots_with_elements(bucket, absent):
                shape = self._parameters.parameters[slot.parameter].shape
                views = {name: bucket.state[name][place_of(slot)].view(shape) for name in self._published}
                whole = {name: view.float() for name, view in views.items()}
                members = MembersByGroup(self._parameters)
                nothing = bucket.exchange.payload[:0]
                members.add(slot.parameter, nothing, nothing, whole)
                algorithm.settle(members.in_order(), self._clock)
                for name, view in views.items():
                    view.copy_(whole[name])

    @override
    @torch.no_grad()
    def change(self, change: Change, groups: Sequence[Members]) -> None:
        """Cut by cut: master weights and every rank's copy of them, the latter rounded to 16 bits with one seed."""
        moving = {parameter for members in groups for parameter in members.parameters}
        for bucket, weights in zip(self.buckets, self._common_weights, strict=True):
            master_weights = weights.master_weights
            first = master_weights.held.start
            for run, view in (
                zip(master_weights.runs, master_weights.views, strict=True) if master_weights.separate else ()
            ):
                if run.parameter in moving:
                    place = slice(first + run.place.start, first + run.place.stop)
                    self._change_cut(change, bucket, run.parameter, place, view)
            seed = (self._clock.steps << 20) + master_weights.bucket.seed
            for number, slot in enumerate(bucket.layout.slots):
                if slot.parameter in moving:
                    copy = weights.values[place_of(slot)]
                    moved = copy.float()
                    self._change_cut(change, bucket, slot.parameter, place_of(slot), moved)
                    if moved is not copy:
                        execute(StoreRounded(copy, moved, (seed << 24) + number), [copy])

    def _change_cut(self, change: Change, bucket: Bucket, parameter: int, place: slice, weights: Tensor) -> None:
        members = MembersByGroup(self._parameters)
        of_cut = {name: one[place].float() for name, one in bucket.whole_state.items()}
        members.add(parameter, weights, bucket.exchange.payload[place], of_cut)
        change(members.in_order(), self._clock)

    @override
    def receive_and_move(self, bucket: Bucket) -> None:
        raise NotImplementedError("whole sharded state has no form that moves weights: give `compressed` and `move`")

    def end_step(self, send: Send) -> None:
        """Take 16-bit weights from the owners' master weights, between no local steps; now and then see whether all
        ranks hold the same weights, and give them their owners' where not."""
        steps, options = self._clock.steps, self._options
        due = send is Send.EXACT or steps - self.resynchronized_at >= options.resync_interval
        if send is not Send.LOCAL and due:
            self.resynchronized_at = steps
            self._publish([weights for weights in self._common_weights if weights.master_weights.separate])
        in_sync = not isinstance(self._algorithm, LocalSteps) or self._algorithm.in_sync
        if self.comparisons.due(steps, in_sync):
            replicas = [weights.bucket.flat for weights in self._common_weights]
            if not compare_replicas(self._comm, replicas, steps, options.on_drift, "their owners'"):
                self._publish(self._common_weights)

    # Weights

    @override
    def show_common(self) -> None:
        for weights in self._common_weights:
            weights.show()

    @override
    def common(self, bucket: Bucket, slot: Slot) -> Tensor:
        return self._common_weights[bucket.index].values[place_of(slot)]

    @override
    def show(self, bucket: Bucket, slot: Slot, weight: Tensor) -> None:
        self._common_weights[bucket.index].bucket.flat[place_of(slot)].copy_(weight)

    @override
    def keep_common(self) -> None:
        for weights in self._common_weights:
            weights.keep_apart()

    @override
    @torch.no_grad()
    def take_over_written(self, in_sync: bool) -> list[tuple[Bucket, Slot]]:
        found = []
        for bucket, weights in zip(self.buckets, self._common_weights, strict=True):
            written = weights.bucket.take_written()
            if written and in_sync:
                weights.adopt()
                weights.master_weights.take_over({slot.parameter for slot in written})
            elif written:
                found += [(bucket, slot) for slot in written]
        return found

    @override
    def holds(self, bucket: Bucket, slot: Slot, weight: Tensor) -> bool:
        shown = self._common_weights[bucket.index].bucket.flat[place_of(slot)]
        return torch.equal(shown, weight.to(shown.dtype))

    @override
    def weights_rewritten(self, bucket: int) -> None:
        self._common_weights[bucket].adopt()

    def _publish(self, of_buckets: Sequence[_CommonWeights]) -> None:
        for wait in [weights.master_weights.publish() for weights in of_buckets]:
            wait()
        for weights in of_buckets:
            weights.adopt()

    # Checkpoints

    @override
    def saved(self, bucket: Bucket, run: Run, own: bool) -> dict[str, Tensor]:
        weights = self._common_weights[bucket.index]
        found = {"weight": weights.bucket.shard_of(weights.values)[run.place]}
        return found | (
            {"master": weights.master_weights.weights[run.place]} if weights.master_weights.separate else {}
        )

    def counters(self) -> dict[str, Any]:
        """Tell what else a checkpoint holds, as plain values."""
        return {"resynchronized_at": self.resynchronized_at, "shared_at": self.comparisons.shared_at}

    def load_counters(self, saved: Mapping[str, Any]) -> None:
        """Take over what `counters` returned."""
        self.resynchronized_at = saved.get("resynchronized_at", 0)
        self.comparisons.shared_at = saved.get("shared_at", saved["step"])

    def model_state_bytes(self) -> dict[str, float]:
        """Count the bytes that this rank holds, by what they are for."""
        weights = [one.bucket.flat for one in self._common_weights]
        apart = [one.values for one in self._common_weights if one.values is not one.bucket.flat]
        master_weights = [one.master_weights.weights for one in self._common_weights if one.master_weights.separate]
        states = [values for bucket in self.buckets for values in bucket.state.values()]
        return counted_bytes(weights, [*master_weights, *apart], states, self.buckets)


class _CommonWeights:
    """One bucket's weights that all ranks have in common: the parameters themselves, until `keep_apart` gives them
    memory of their own, in their dtype."""

    def __init__(self, master_weights: MasterWeights) -> None:
        self.bucket: FlatBucket = master_weights.bucket
        self.master_weights = master_weights
        self._apart: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """[padded_numel], in the parameters' dtype: those of the last sync, or the present ones."""
        return self.bucket.flat if self._apart is None else self._apart

    def keep_apart(self) -> None:
        """Keep them where they are whatever becomes of the parameters."""
        if self._apart is None:
            self._apart = self.bucket.flat.clone()

    def show(self) -> None:
        """Write them into the parameters."""
        if self._apart is not None:
            self.bucket.flat.copy_(self._apart)

    def adopt(self) -> None:
        """Take the parameters as they are for the common weights; master weights are the caller's."""
        if self._apart is not None:
            self._apart.copy_(self.bucket.flat)
