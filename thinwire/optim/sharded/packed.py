"""Sharded state of forms that pack: moments on their owners until the freeze; from then on one bit an element on the
wire, and momentum as signs and preconditioner as 8 bits on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.codecs import make_codec
from thinwire.optim.algorithm import AdamSettings, Members, MembersByGroup, variance_of
from thinwire.optim.checkpoint import load_counters
from thinwire.optim.home import check_averages, check_plain
from thinwire.optim.options import check_same_freeze
from thinwire.optim.sharded import packed_checkpoint
from thinwire.optim.sharded.packed_bucket import PackedBucket
from thinwire.optim.sharded.packing import FrozenState, Packing, hold_masked, variance_norms
from thinwire.optim.sharded.storage import ShardAgreement, ShardedRun, Storage
from thinwire.zero.bucket_layout import frozen_state_formula, model_state_formula
from thinwire.zero.gradients import averaging_gradients
from thinwire.zero.home import Held
from thinwire.zero.master_weights import FlatBucket, bring_beside
from thinwire.zero.rank_checks import compare_replicas
from thinwire.zero.saved_state import SavedSlice, SliceSource
from thinwire.zero.sharded_home import Vote, clip_coefficient, own_fragments

__all__ = ["PackedStorage"]


class PackedStorage(Storage):
    """Sharded state until the freeze, packed state from then on; see PackedBucket for what that is."""

    def __init__(self, run: ShardedRun) -> None:
        super().__init__(run)
        self._codec = make_codec("sign1", run.options.block_size)
        self._masters = run.sharded.masters
        self._gradients = averaging_gradients(run.sharded, run.watcher.seal)
        self._packed: list[PackedBucket] = []
        self._state = [
            {name: torch.zeros_like(masters.weights) for name in run.algorithm.state} for masters in self._masters
        ]
        run.step.sketch = None
        run.watcher.use(self._gradients, run.sharded.sharding.stage < 2)

    # A step

    @property
    @override
    def sends_payloads(self) -> bool:
        return self.run.clock.frozen

    @override
    def prepare(self) -> None:
        """Everything is, as only the freeze changes what a step sends."""

    @override
    def vote(self) -> Vote:
        if self._packed:
            return self.run.read_headers(self._packed)
        vote = self.run.vote_on_averages(self._gradients)
        self.run.step.norm = vote.norm
        return vote

    @override
    def apply(self, vote: Vote) -> None:
        run = self.run
        run.sharded.take_over_written()
        run.clock.steps += 1
        if run.clock.frozen:
            self._frozen_step()
            return
        self._warmup_step(vote.norm / run.step.loss_scale, vote.absent)
        if self._has_ended_warmup():
            self._freeze()

    def _warmup_step(self, norm: float, absent: frozenset[int]) -> None:
        """Move the weights of all ranks by the exactly averaged gradients."""
        run = self.run
        coefficient = clip_coefficient(run.options.clips_to, norm) / run.step.loss_scale
        filled = [number for number, gradients in enumerate(self._gradients) if gradients.filled]
        averages = [self._gradients[number].average.to(torch.float32) for number in filled]
        for average in averages if coefficient != 1.0 else ():
            average.mul_(coefficient)
        beside = bring_beside([self._masters[number] for number in filled], averages)
        of_bucket = {
            number: self._members(number, average, absent) for number, average in zip(filled, beside, strict=True)
        }
        groups = [members for one in of_bucket.values() for members in one]
        run.algorithm.exact(groups, run.clock, self._agreement(absent))
        run.sharded.move_and_publish(filled, lambda number: run.algorithm.move(of_bucket[number], run.clock))

    def _members(self, number: int, average: Tensor, absent: frozenset[int]) -> list[Members]:
        """The own shard's cuts of a bucket's parameters, with their averaged gradients, fp32 [shard]."""
        masters, state = self._masters[number], self._state[number]
        members = MembersByGroup(self.run.settings)
        for run, weight in zip(masters.runs, masters.views, strict=True):
            if run.parameter not in absent:
                of_run = {name: values[run.place] for name, values in state.items()}
                group = self.run.group_number(run.parameter)
                members.add(group, run.parameter, weight, average[run.place], of_run)
        return members.in_order()

    def _frozen_step(self) -> None:
        clock, algorithm = self.run.clock, self.run.algorithm
        if algorithm.form.update is None:
            members = MembersByGroup(self.run.settings)
            for bucket in self._packed:
                bucket.take_over_into(members)
            algorithm.compressed(members.in_order(), clock, self._agreement())
        else:
            for bucket in self._packed:
                bucket.take_over()
        for bucket in self._packed:
            bucket.move(seed=((clock.steps - 1) << 20) + bucket.bucket.index)
        assert clock.frozen_at is not None
        if (clock.steps - clock.frozen_at) % self.run.options.resync_interval == 0:
            self._resynchronize()

    def _resynchronize(self) -> None:
        replicas = (bucket.bucket.flat for bucket in self._packed)
        on_drift, steps = self.run.options.on_drift, self.run.clock.steps
        same = compare_replicas(self.run.comm, replicas, steps, on_drift, "the owners' master weights")
        if not same or any(masters.separate for masters in self._masters):
            for wait in [masters.publish() for masters in self._masters]:
                wait()

    def _agreement(self, absent: frozenset[int] = frozenset()) -> ShardAgreement:
        run = self.run

        def settings() -> dict[int, AdamSettings]:
            of_group = [run.settings(group) for group in range(len(run.sharded.groups))]
            numbers = enumerate(zip(run.sharded.order.group_of, run.parameters, strict=True))
            return {number: of_group[group] for number, (group, one) in numbers if one.numel() and number not in absent}

        return ShardAgreement(run.sharded, settings)

    # The freeze

    def _has_ended_warmup(self) -> bool:
        """Whether the step that was counted last is the last one before the freeze. Collective."""
        run = self.run
        if run.rule is None:
            return False
        reached = run.rule.reached(run.clock.steps, run.rates(), self._variance_norms)
        if run.rule.looks_at(run.clock.steps):
            check_same_freeze(run.comm, reached, run.rates())
        return reached

    def _variance_norms(self) -> list[float]:
        run = self.run

        def beta2(number: int) -> float:
            return run.settings_of(number).beta2

        return variance_norms(
            run.comm,
            self._masters,
            self._state,
            variance_of(run.algorithm) or "",
            beta2,
            run.clock.steps,
            len(run.parameters),
        )

    def _freeze(self) -> None:
        run = self.run
        buckets, algorithm = run.sharded.buckets, run.algorithm
        for bucket, state in zip(buckets, self._state, strict=True):
            hold_masked(bucket, bucket.own_runs, state[variance_of(algorithm) or ""], self._mask_of)
        renamed = [self._renamed(*one) for one in zip(buckets, self._state, strict=True)]
        packing = Packing(run.comm, buckets, renamed, algorithm.form, len(run.parameters))
        members = MembersByGroup(run.settings)
        for bucket, of_bucket in zip(buckets, renamed, strict=True):
            for one in bucket.own_runs:
                of_run = {name: values[one.place] for name, values in of_bucket.items()}
                nothing = bucket.flat[:0]
                members.add(run.group_number(one.parameter), one.parameter, nothing, nothing, of_run)
        algorithm.freeze(members.in_order(), run.clock, self._agreement(), packing.precondition)
        run.clock.frozen_at = run.clock.steps
        self._begin_frozen_stage(packing.publish(self._codec))

    def _renamed(self, bucket: FlatBucket, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The own shard's state under the names of the frozen stage, on the parameters' device."""
        device = bucket.flat.device
        zeros = partial(torch.zeros, bucket.layout.shard, device=device)
        renamed = self.run.algorithm.frozen_state.items()
        return {new: zeros() if old is None else state[old].to(device) for new, old in renamed}

    def _begin_frozen_stage(self, states: Sequence[FrozenState]) -> None:
        run, options = self.run, self.run.options
        scaled = run.scaled or any(bucket.dtype == torch.float16 for bucket in run.sharded.buckets)
        reversible = options.reversible if options.reversible is not None else scaled or bool(options.clips_to)
        self._packed = [
            PackedBucket(
                masters,
                run.comm,
                self._codec,
                run.algorithm,
                run.clock,
                run.step,
                run,
                state,
                reversible=reversible,
            )
            for masters, state in zip(self._masters, states, strict=True)
        ]
        self._state = []
        for gradients in self._gradients:
            gradients.release()
        if run.sketch is not None:
            run.sketch.begin(run.clock.steps)
        run.step.sketch = run.sketch
        run.watcher.use(self._packed, True, run.clip_by_sketch if run.sketch is not None else None)

    def _mask_of(self, number: int) -> Tensor | None:
        return self.run.mask(self.run.group_number(number))

    @property
    def _added(self) -> list[str]:
        """The state that the freeze adds."""
        return [name for name, old in self.run.algorithm.frozen_state.items() if old is None]

    # By bucket

    @override
    def check_gradients(self) -> None:
        check_averages(not self.run.clock.frozen)

    @override
    def average(self, bucket: int) -> Tensor | None:
        return self._gradients[bucket].average if self._gradients[bucket].filled else None

    @override
    def state(self, bucket: int, parameter: int, kind: str) -> Held:
        check_plain(self.run.algorithm, self.run.clock, kind)
        masters, values = self._masters[bucket], self._state[bucket].get(kind)
        views = [None if values is None else values[run.place] for run in masters.runs]
        return Held(own_fragments(masters, parameter, views), everywhere=False, known=values is not None)

    @override
    def kinds(self) -> list[str]:
        return [] if self.run.clock.frozen else sorted(self.run.algorithm.state)

    # Checkpoints

    @override
    def slices(self) -> list[SavedSlice]:
        """Once frozen, u, the preconditioner and the owners' residuals take the moments' place."""
        sharded = self.run.sharded
        if self.run.clock.frozen:
            return sharded.saved_slices() + packed_checkpoint.slices(self._packed, sharded.names)
        moments = packed_checkpoint.warmup_slices(self._masters, self._state, sharded.names)
        return sharded.saved_slices() + moments

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        """Residuals by parameter."""
        return packed_checkpoint.rank_tensors(self._packed, self.run.sharded.names)

    @override
    def load(self, saved: Mapping[str, Any], group: Mapping[str, Any] | None, source: SliceSource) -> None:
        run, names = self.run, self.run.sharded.names
        if group is not None:
            load_counters(run.clock, run.rule, run.algorithm, group, names)
            run.clock.frozen_at = group["frozen_at"]
        if not run.clock.frozen:
            packed_checkpoint.load_warmup(self._masters, self._state, names, source)
            return
        states = packed_checkpoint.read_states(run.sharded.buckets, names, source, self._codec, self._added)
        for bucket, state in zip(run.sharded.buckets, states, strict=True):
            hold_masked(bucket, bucket.runs(0, bucket.layout.numel), state.codes, self._mask_of)
        self._begin_frozen_stage(states)
        packed_checkpoint.load(self._packed, names, source, run.ranks_to_resume(source))

    @override
    def model_state_bytes(self) -> dict[str, float]:
        sharded, ranks = self.run.sharded, self.run.comm.size
        size, numel = sharded.buckets[0].dtype.itemsize, sum(one.numel() for one in self.run.parameters)
        if self.run.clock.frozen:
            return frozen_state_formula(numel, ranks, element_bytes=size, fresh_variance=bool(self._added))
        held = sharded.gradient_bytes
        stage = sharded.sharding.stage
        return model_state_formula(stage, numel, ranks, element_bytes=size, state_bytes=8, gradient_bytes=held)
