"""Sharded state of forms that pack: moments on their owners until the freeze; from then on momentum as the packets that
came back, with sign1 one bit an element, and preconditioner as 8 bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.packet_layout import CODE_BITS, VALUE_BYTES
from thinwire.optim import storage
from thinwire.optim.bucket import Bucket, Shared
from thinwire.optim.options import HomeOptions
from thinwire.optim.sharded.packed_bucket import PackedBucket, publish, ranges_of, read_packed
from thinwire.optim.step import Members, MembersByGroup, Send
from thinwire.optim.storage import Change, Storage, fill_masked
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.bucket_layout import frozen_state_formula, model_state_formula
from thinwire.zero.gradient_seal import Seal
from thinwire.zero.gradients import averaging_gradients
from thinwire.zero.master_weights import Run, ShardedParameters, bring_beside, runs_in
from thinwire.zero.rank_checks import compare_replicas
from thinwire.zero.saved_state import SliceSource


class PackedStorage(Storage):
    """ZeRO stages 1 and 2: sharded state until the freeze, packed state from then on.

    In the warmup each rank averages, and steps by, what it owns; the new weights are gathered. What averages exactly
    are `gradients`; what rounds them, and keeps the residuals of that, are the buckets.
    """

    shards = True
    buckets: list[PackedBucket]  # type: ignore[assignment]

    def __init__(
        self,
        sharded: ShardedParameters,
        shared: Shared,
        options: HomeOptions,
        seal: Seal,
        reversible: Callable[[], bool],
    ) -> None:
        """`reversible`: whether to keep the residuals of before a step, asked at the freeze."""
        self._sharded = sharded
        self._options = options
        self._reversible = reversible
        self._moving: dict[int, list[Members]] = {}
        self._codes: list[Tensor] = []
        super().__init__(shared, {one.index: one.layout for one in sharded.buckets})
        if not shared.wire.rounds_averages:
            self.gradients = self.transports = averaging_gradients(sharded, seal)

    @override
    def _make_bucket(self, index: int, layout: BucketLayout) -> PackedBucket:
        state = {name: self.new_state(name, index, layout) for name in self._algorithm.state}
        return PackedBucket(self._sharded.master_weights[index], self.shared, state)

    @override
    def new_state(self, name: str, bucket: int, layout: BucketLayout) -> Tensor:
        master_weights = self._sharded.master_weights[bucket]
        beside = master_weights.weights if name in self._algorithm.state else master_weights.bucket.flat
        return torch.zeros(layout.shard, device=beside.device)

    # A step

    @override
    def average(self, bucket: int) -> Tensor | None:
        if not self.gradients:
            return super().average(bucket)
        return self.gradients[bucket].average if self.gradients[bucket].filled else None

    @override
    def members(
        self, absent: Collection[int] = (), *, trained: bool = False, state_only: bool = False
    ) -> list[Members]:
        """Cuts of the own shard; in compressed steps the momentum is u before, the averages u after."""
        if self._clock.frozen_at is not None:
            return self._frozen_members(trained)
        filled, averages = [], []
        for bucket in self.buckets:
            average = bucket.flat.flat[:0] if state_only else self.average(bucket.index)
            if average is not None:
                filled.append(bucket)
                averages.append(average.float())
        if not state_only:
            averages = bring_beside([one.master_weights for one in filled], averages)
        found: dict[int, list[Members]] = {}
        for bucket, average in zip(filled, averages, strict=True):
            members = MembersByGroup(self._parameters)
            for run, weight in zip(bucket.master_weights.runs, bucket.master_weights.views, strict=True):
                if run.parameter not in absent:
                    state = {name: values[run.place] for name, values in bucket.state.items()}
                    members.add(run.parameter, weight, average if state_only else average[run.place], state)
            found[bucket.index] = members.in_order()
        self._moving = {} if state_only else found
        return [members for of_bucket in found.values() for members in of_bucket]

    def _frozen_members(self, trained: bool) -> list[Members]:
        members, form = MembersByGroup(self._parameters), self._algorithm.form
        for bucket in self.buckets:
            assert bucket.own_momenta is not None
            before, after = bucket.own_momenta
            # They move only after the host has waited for what is found with them.
            weights = bucket.master_weights.weights.to(after.device, non_blocking=True)
            for run in bucket.flat.own_runs:
                if trained and not self._parameters.parameters[run.parameter].requires_grad:
                    continue
                state = {form.momentum: before[run.place], form.denominators or "": bucket.denominators(run)}
                state |= {name: values[run.place] for name, values in bucket.state.items()}
                members.add(run.parameter, weights[run.place], after[run.place], state)
        return members.in_order()

    @override
    def change(self, change: Change, groups: Sequence[Members]) -> None:
        """In the warmup bucket by bucket, and give the weights to all ranks; once frozen all ranks move theirs by u."""
        if self._clock.frozen_at is not None:
            for bucket in self.buckets:
                bucket.move()
        else:
            moving, self._moving = self._moving, {}  # averages are let go
            self._sharded.move_and_publish(moving, lambda one: change(moving[one], self._clock))

    @override
    def receive_and_move(self, bucket: Bucket) -> None:
        assert isinstance(bucket, PackedBucket)
        bucket.receive()
        bucket.move()

    def end_step(self, send: Send) -> None:
        """Now and then see whether all ranks hold the same weights, and give them their owners' again."""
        clock, options = self._clock, self._options
        if send is Send.EXACT or clock.frozen_at is None or (clock.steps - clock.frozen_at) % options.resync_interval:
            return
        replicas = (bucket.flat.flat for bucket in self.buckets)
        same = compare_replicas(self._wire.comm, replicas, clock.steps, options.on_drift, "the owners' master weights")
        if not same or any(bucket.master_weights.separate for bucket in self.buckets):
            for wait in [bucket.master_weights.publish() for bucket in self.buckets]:
                wait()

    @override
    def take_over_written(self, in_sync: bool) -> list[tuple[Bucket, Slot]]:
        self._sharded.take_over_written()
        return []

    # The freeze

    @override
    def hold_masked(self, name: str | None, value: float) -> None:
        for bucket in self.buckets:
            if name in bucket.state:
                fill_masked(self._parameters, bucket.state[name], bucket.flat.own_runs, value)

    @override
    def precondition(self) -> None:
        """Raise denominators to a hundredth of their parameter's mean, round their inverses to 8 bits, multiply the
        momentum by these, and have the denominators be what they stand for."""
        form, every = self._algorithm.form, self._parameters.parameters
        denominators = [bucket.state[form.denominators or ""] for bucket in self.buckets]
        pairs = list(zip(self.buckets, denominators, strict=True))
        cuts = [(run.parameter, values[run.place]) for bucket, values in pairs for run in bucket.flat.own_runs]
        self._ranges = ranges_of(self._wire.comm, cuts, len(every), every[0].device)
        self._codes = []
        for bucket, values in pairs:
            codes = torch.zeros(bucket.layout.shard, dtype=torch.uint8, device=bucket.device)
            runs = bucket.flat.own_runs
            ranges = self._ranges[[run.parameter for run in runs]]
            tables = storage.table(ranges[:, 0], ranges[:, 1])
            for run, of_run, (low, high) in zip(runs, tables, ranges.tolist(), strict=True):
                codes[run.place] = storage.quantize(1 / values[run.place], low, high)
                inverse = of_run[codes[run.place].int()]
                bucket.state[form.momentum][run.place].mul_(inverse)
                values[run.place].copy_(inverse.reciprocal_())
            self._codes.append(codes)

    @override
    def begin_compression(self, *, anew: bool = True) -> None:
        """Give every bucket's codes and u to all ranks."""
        for bucket, codes in zip(self.buckets, self._codes, strict=True) if anew else ():
            u = bucket.state[self._algorithm.form.momentum]
            frozen = publish(bucket.flat, self._wire.codec, u, codes, self._ranges)
            bucket.begin_packed(frozen, reversible=self._reversible())
        if self._clock.frozen:
            for gradients in self.gradients:
                gradients.release()
            self.gradients, self.transports, self._codes = (), self.buckets, []

    # Checkpoints

    @override
    def saved(self, bucket: Bucket, run: Run, own: bool) -> dict[str, Tensor]:
        assert isinstance(bucket, PackedBucket)
        master_weights = bucket.master_weights
        found = {"weight": master_weights.bucket.shard_of(master_weights.bucket.flat)[run.place]}
        if master_weights.separate:
            found["master"] = master_weights.weights[run.place]
        if self._clock.frozen_at is not None and not run.start:
            low, high = bucket.range_of(run.parameter).view(2, 1)
            found |= {storage.PRECONDITIONER_LOW: low, storage.PRECONDITIONER_HIGH: high}
        return found

    @override
    def saved_state(self, bucket: Bucket, own: slice) -> dict[str, Tensor]:
        """Once frozen u and the preconditioner take the moments' place."""
        assert isinstance(bucket, PackedBucket)
        if self._clock.frozen_at is None:
            return bucket.state
        packed = {storage.PACKED_MOMENTUM: bucket.saved_momentum(), storage.PACKED_PRECONDITIONER: bucket.codes[own]}
        return {**bucket.state, **packed}

    @override
    def load_state(
        self, bucket: Bucket, names: Sequence[str], source: SliceSource, ranks: Sequence[int] | None
    ) -> None:
        assert isinstance(bucket, PackedBucket)
        if not self._clock.frozen:
            bucket.averaging = None  # and what it has lost
            super().load_state(bucket, names, source, ranks)
            return
        read = storage.as_packed(source, self._algorithm.form)
        frozen = read_packed(bucket.flat, self._wire.codec, names, read)
        fill_masked(self._parameters, frozen.codes, runs_in(bucket.layout, slice(0, bucket.layout.numel)), 0)
        bucket.begin_packed(frozen, reversible=self._reversible())
        self._load_owned(bucket, names, source)

    def model_state_bytes(self) -> dict[str, float]:
        """Compute the bytes that a rank holds, by what they are for."""
        sharded, ranks = self._sharded, self._wire.ranks
        lanes = 1 if sharded.links is None else sharded.links.lanes
        size, numel = sharded.buckets[0].dtype.itemsize, sum(one.numel() for one in self._parameters.parameters)
        if self._clock.frozen:
            added = any(old is None for old in self._algorithm.frozen_state.values())
            name = self._wire.codec.name
            bits = CODE_BITS[name] if name in CODE_BITS else 8 * VALUE_BYTES[name]
            return frozen_state_formula(
                numel, ranks, element_bytes=size, fresh_variance=added, momentum_bits=bits, lanes=lanes
            )
        held, stage = sharded.gradient_bytes, sharded.sharding.stage
        found = model_state_formula(stage, numel, ranks, element_bytes=size, state_bytes=8, gradient_bytes=held)
        rounds = self._wire.rounds_averages  # from a payload, which becomes the next residual, to the own average
        lost = 4.0 * numel * (2 / lanes if lanes > 1 else 1)  # of a lane, and the sum that becomes the next
        return found | ({"gradients": 4.0 * numel * (1 + 1 / ranks), "residuals": lost} if rounds else {})
