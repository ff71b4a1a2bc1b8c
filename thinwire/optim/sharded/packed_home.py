"""The sharded home of algorithms whose frozen stage is linear: master weights, variance and owners' residuals on their
owners, one bit an element on the wire, and momentum and preconditioner packed on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.codecs import make_codec
from thinwire.optim.algorithm import AdamSettings, Members, MembersByGroup
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.options import HomeOptions, Recipe, naming_differences
from thinwire.optim.sharded import packed_checkpoint
from thinwire.optim.sharded.home import AlgorithmShardedHome, ShardAgreement
from thinwire.optim.sharded.packed_bucket import PackedBucket
from thinwire.optim.sharded.packing import FrozenState, Packing, hold_masked, variance_norms
from thinwire.optim.sharded.parameter_state import WarmupState
from thinwire.zero.bucket_layout import frozen_state_formula, model_state_formula
from thinwire.zero.home import NO_GRADIENTS, StepResult
from thinwire.zero.master_weights import FlatBucket, bring_beside
from thinwire.zero.rank_checks import compare_replicas
from thinwire.zero.saved_state import SavedSlice, SliceSource
from thinwire.zero.sharded_home import NOT_FINITE, StateOfBuckets, Vote, clip_coefficient
from thinwire.zero.sharded_parameters import ShardedParameters

__all__ = ["PackedHome"]


class PackedHome(AlgorithmShardedHome):
    """Sharded state until the freeze, packed state from then on; see PackedBucket for what that is."""

    def __init__(
        self,
        parameters: ShardedParameters,
        options: HomeOptions,
        recipe: Recipe,
        make_rule: Callable[[], FreezeRule | None],
    ) -> None:
        super().__init__(parameters, options, recipe, make_rule)
        self._codec = make_codec("sign1", options.block_size)
        self._gradients = parameters.averaging_gradients()
        self._packed: list[PackedBucket] = []
        self._begin_warmup()

    # One step

    @override
    def step(self) -> StepResult:
        vote = self._begin_step()
        self._parameters.take_over_written()
        norm = vote.norm / self.loss_scale
        applied = vote.finite and len(vote.absent) < len(self.parameters)
        if applied:
            self._clock.steps += 1
            if self.frozen:
                self._frozen_step()
            else:
                self._warmup_step(norm, vote.absent)
                if self._has_ended_warmup(self._variance_norms):
                    self._freeze()
        self._end_step()
        return StepResult(applied, norm, "" if applied else NO_GRADIENTS if vote.finite else NOT_FINITE)

    @property
    def _sends_payloads(self) -> bool:
        return self.frozen

    def _find_vote(self) -> Vote:
        if not self.frozen:
            return self._vote_on_averages(self._gradients)
        with naming_differences(self.comm, self._parameters.groups):
            self._hear(bucket.exchange for bucket in self._packed)
            outcomes = [bucket.outcome() for bucket in self._packed]
        absent = self._watcher.left_out
        if any(outcome.incomplete for outcome in outcomes):
            absent |= self._parameters.agree_on_absent(self._watcher.missing)
        finite = all(outcome.finite for outcome in outcomes)
        return Vote(finite, self._norm if finite else math.inf, absent)

    def _warmup_step(self, norm: float, absent: frozenset[int]) -> None:
        """Move the weights of all ranks by the exactly averaged gradients."""
        coefficient = clip_coefficient(self._options.clips_to, norm) / self.loss_scale
        filled = [number for number, gradients in enumerate(self._gradients) if gradients.filled]
        averages = [self._gradients[number].average.to(torch.float32) for number in filled]
        for average in averages if coefficient != 1.0 else ():
            average.mul_(coefficient)
        beside = bring_beside([self._parameters.masters[number] for number in filled], averages)
        of_bucket = {
            number: self._members(number, average, absent) for number, average in zip(filled, beside, strict=True)
        }
        groups = [members for one in of_bucket.values() for members in one]
        self._algorithm.exact(groups, self._clock, self._agreement(absent))
        self._parameters.move_and_publish(filled, lambda number: self._algorithm.move(of_bucket[number], self._clock))

    def _members(self, number: int, average: Tensor, absent: frozenset[int]) -> list[Members]:
        """The own shard's cuts of a bucket's parameters, with their averaged gradients, fp32 [shard]."""
        masters, state = self._parameters.masters[number], self._state[number]
        members = MembersByGroup(self._settings)
        for run, weight in zip(masters.runs, masters.views, strict=True):
            if run.parameter not in absent:
                of_run = {name: values[run.place] for name, values in state.items()}
                members.add(self._group_of[run.parameter], run.parameter, weight, average[run.place], of_run)
        return members.in_order()

    def _frozen_step(self) -> None:
        if self._algorithm.form.update is None:
            members = MembersByGroup(self._settings)
            for bucket in self._packed:
                bucket.take_over_into(members, self._group_of)
            self._algorithm.compressed(members.in_order(), self._clock, self._agreement())
        else:
            for bucket in self._packed:
                bucket.take_over()
        for bucket in self._packed:
            bucket.move(seed=((self._clock.steps - 1) << 20) + bucket.bucket.index)
        assert self.frozen_at is not None
        if (self.steps - self.frozen_at) % self._options.resync_interval == 0:
            self._resynchronize()

    def _resynchronize(self) -> None:
        replicas = (bucket.bucket.flat for bucket in self._packed)
        comm = self._parameters.exchange_comm
        same = compare_replicas(comm, replicas, self.steps, self._options.on_drift, "the owners' master weights")
        if not same or any(masters.separate for masters in self._parameters.masters):
            for wait in [masters.publish() for masters in self._parameters.masters]:
                wait()

    # Stages

    def _begin_warmup(self) -> None:
        self._packed = []
        self._state = [
            {name: torch.zeros_like(masters.weights) for name in self._algorithm.state}
            for masters in self._parameters.masters
        ]
        self._under_way.sketch = None
        self._watcher.use(self._gradients, self._keeps_gradients)

    def _freeze(self) -> None:
        buckets, algorithm = self._parameters.buckets, self._algorithm
        for bucket, state in zip(buckets, self._state, strict=True):
            hold_masked(bucket, bucket.own_runs, state[self._variance], self._mask_of)
        renamed = [self._renamed(*one) for one in zip(buckets, self._state, strict=True)]
        packing = Packing(
            self._parameters.exchange_comm, buckets, renamed, algorithm.form, len(self._parameters.order.parameters)
        )
        members = MembersByGroup(self._settings)
        for bucket, state in zip(buckets, renamed, strict=True):
            for run in bucket.own_runs:
                of_run = {name: values[run.place] for name, values in state.items()}
                nothing = bucket.flat[:0]
                members.add(self._group_of[run.parameter], run.parameter, nothing, nothing, of_run)
        algorithm.freeze(members.in_order(), self._clock, self._agreement(), packing.precondition)
        self._clock.frozen_at = self.steps
        self._begin_frozen_stage(packing.publish(self._codec))

    def _renamed(self, bucket: FlatBucket, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The own shard's state under the names of the frozen stage, on the parameters' device."""
        device = bucket.flat.device
        zeros = partial(torch.zeros, bucket.layout.shard, device=device)
        return {
            new: zeros() if old is None else state[old].to(device) for new, old in self._algorithm.frozen_state.items()
        }

    @property
    def _variance(self) -> str:
        """The state that becomes denominators."""
        name = self._algorithm.frozen_state[self._algorithm.form.denominators or ""]
        assert name is not None
        return name

    @property
    def _added(self) -> list[str]:
        """The state that the freeze adds."""
        return [name for name, old in self._algorithm.frozen_state.items() if old is None]

    def _mask_of(self, number: int) -> Tensor | None:
        of_group: Tensor | None = self._parameters.group(number).get("exp_avg_mask")
        return of_group

    def _begin_frozen_stage(self, states: Sequence[FrozenState]) -> None:
        options = self._options
        scaled = bool(self.scaled) or any(bucket.dtype == torch.float16 for bucket in self._parameters.buckets)
        reversible = options.reversible if options.reversible is not None else scaled or bool(options.clips_to)
        comm = self._parameters.exchange_comm
        self._packed = [
            PackedBucket(
                masters,
                comm,
                self._codec,
                self._algorithm,
                self._clock,
                self._under_way,
                self._settings_of,
                state,
                reversible=reversible,
            )
            for masters, state in zip(self._parameters.masters, states, strict=True)
        ]
        self._state = []
        for gradients in self._gradients:
            gradients.release()
        if self._sketch is not None:
            self._sketch.begin(self.steps)
        self._under_way.sketch = self._sketch
        self._watcher.use(self._packed, True, self._clip_by_sketch if self._sketch is not None else None)

    def _variance_norms(self) -> list[float]:
        return variance_norms(
            self._parameters.exchange_comm,
            self._parameters.masters,
            self._state,
            self._variance,
            lambda number: self._settings_of(number).beta2,
            self.steps,
            len(self._parameters.order.parameters),
        )

    def _agreement(self, absent: frozenset[int] = frozenset()) -> ShardAgreement:
        def settings() -> dict[int, AdamSettings]:
            of_group = [self._settings(group) for group in range(len(self._parameters.groups))]
            numbers = enumerate(zip(self._group_of, self.parameters, strict=True))
            return {number: of_group[group] for number, (group, one) in numbers if one.numel() and number not in absent}

        return ShardAgreement(self._parameters, settings)

    @property
    def _group_of(self) -> Sequence[int]:
        return self._parameters.order.group_of

    def _state_of_buckets(self) -> StateOfBuckets:
        return WarmupState(self._algorithm, self._clock, self._parameters.masters, self._state, self._gradients)

    # Checkpoints

    @override
    def saved_slices(self) -> list[SavedSlice]:
        """Once frozen, u, the preconditioner and the owners' residuals take the moments' place."""
        names = self._parameters.names
        if self.frozen:
            return super().saved_slices() + packed_checkpoint.slices(self._packed, names)
        return super().saved_slices() + packed_checkpoint.warmup_slices(self._parameters.masters, self._state, names)

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        """Residuals by parameter."""
        return packed_checkpoint.rank_tensors(self._packed, self._parameters.names)

    @override
    def load(self, source: SliceSource) -> None:
        self._load_counters(source.counters())
        self._load_weights_of(source)
        names = self._parameters.names
        if not self.frozen:
            packed_checkpoint.load_warmup(self._parameters.masters, self._state, names, source)
            return
        states = packed_checkpoint.read_states(self._parameters.buckets, names, source, self._codec, self._added)
        for bucket, state in zip(self._parameters.buckets, states, strict=True):
            hold_masked(bucket, bucket.runs(0, bucket.layout.numel), state.codes, self._mask_of)
        self._begin_frozen_stage(states)
        ranks = self._ranks_to_resume(source)
        packed_checkpoint.load(self._packed, names, source, ranks)

    @override
    def reset_state(self) -> None:
        self._begin_again()
        self._begin_warmup()

    @override
    def model_state_bytes(self) -> dict[str, float]:
        size, ranks, stage = self._parameters.buckets[0].dtype.itemsize, self.comm.size, self._parameters.sharding.stage
        if self.frozen:
            return frozen_state_formula(self._numel, ranks, element_bytes=size, fresh_variance=bool(self._added))
        held = self._parameters.gradient_bytes
        return model_state_formula(stage, self._numel, ranks, element_bytes=size, state_bytes=8, gradient_bytes=held)
