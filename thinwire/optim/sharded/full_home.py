"""The sharded home of algorithms whose frozen stage takes whole state on every rank: master weights, variance and
owners' residuals on their owners, momentum and what else a rank's own steps need on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.optim import checkpoint
from thinwire.optim.algorithm import AdamSettings, Keep, LocalSteps, Send
from thinwire.optim.bucket import AlgorithmBucket
from thinwire.optim.checkpoint import LEFT_OUT_STEPS, read_left_out_steps
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.home import check_may_leave_out
from thinwire.optim.options import HomeOptions, Recipe, naming_differences
from thinwire.optim.sharded.home import AlgorithmShardedHome, ShardAgreement
from thinwire.optim.sharded.parameter_state import GroupState
from thinwire.optim.sharded.weights import CommonWeights, FullWeights, LowMemoryWire
from thinwire.optim.step import may_clip
from thinwire.zero import BucketLayout
from thinwire.zero.home import NO_GRADIENTS, StepResult
from thinwire.zero.master_weights import FlatBucket
from thinwire.zero.rank_checks import ComparisonTimes, compare_replicas
from thinwire.zero.saved_state import SavedSlice, SliceSource
from thinwire.zero.sharded_home import NOT_FINITE, StateOfBuckets, Vote, clip_of_norm
from thinwire.zero.sharded_parameters import ShardedParameters

__all__ = ["FullHome"]


class FullHome(AlgorithmShardedHome):
    """ZeRO stage 1 for algorithms with local steps, or whose step is not linear in what comes back.

    16-bit parameters have fp32 master weights on the owner; every rank keeps the common weights in 16 bits, rounded
    stochastically with one seed on all ranks: see FullWeights. Published state and residuals are then bf16.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        options: HomeOptions,
        recipe: Recipe,
        make_rule: Callable[[], FreezeRule | None],
    ) -> None:
        super().__init__(parameters, options, recipe, make_rule)
        self._wire = LowMemoryWire(
            parameters.exchange_comm, parameters.buckets, options.block_size, options.exact_codec
        )
        self._watched: tuple[Sequence[AlgorithmBucket], object] = ([], None)
        self._common_weights = [CommonWeights(masters) for masters in parameters.masters]
        self._begin()

    # The parameters, as buckets ask for them

    def group_number(self, index: int) -> int:
        """Which parameter group a parameter is in."""
        return self._parameters.order.group_of[index]

    def settings(self, group: int) -> AdamSettings:
        """The hyperparameters of a parameter group now."""
        return self._settings(group)

    def mask(self, group: int) -> Tensor | None:
        """A parameter group's `exp_avg_mask`, if it has one."""
        mask: Tensor | None = self._parameters.groups[group].get("exp_avg_mask")
        return mask

    def describe(self, index: int) -> str:
        """How an error message calls a parameter."""
        return self._parameters.order.describe(index)

    # One step

    @property
    @override
    def left_out_steps(self) -> int:
        return self._group.left_out_steps

    @override
    def step(self) -> StepResult:
        vote = self._begin_step()
        applied = vote.finite and (self._group.send is Send.LOCAL or len(vote.absent) < len(self.parameters))
        if applied:
            self._group.receive_averages()
            self._find_clip()
            self._group.update(vote.absent, self.loss_scale, float(self._under_way.clip))
            self._compare_replicas()
        norm = self._norm / self.loss_scale if vote.finite else math.inf
        self._end_step()
        self._prepare()
        return StepResult(applied, norm, "" if applied else NO_GRADIENTS if vote.finite else NOT_FINITE)

    def _compare_replicas(self) -> None:
        """Now and then, see whether all ranks hold the same weights, and give them their owners' where not."""
        if not self._comparisons.due(self.steps, self.in_sync):
            return
        comm, replicas = self.comm, [one.bucket.flat for one in self._common_weights]
        if not compare_replicas(comm, replicas, self.steps, self._options.on_drift, "their owners'"):
            for weights in self._common_weights:
                weights.masters.publish()()
                weights.adopt()

    @override
    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        check_may_leave_out(self._algorithm)
        super().leave_out(parameters)

    @torch.no_grad()
    @override
    def synchronize_weights(self) -> None:
        if self._watcher.in_step:
            raise RuntimeError("synchronize_weights() was called between backward() and step(): call step() first")
        self._group.meet(self.steps)

    @override
    def show_own_weights(self, own: bool) -> None:
        self._group.show_own_weights(own)

    @property
    def _sends_payloads(self) -> bool:
        return self._group.send is not Send.EXACT

    def _find_vote(self) -> Vote:
        if self._group.send is Send.LOCAL:
            return Vote(True, math.nan, frozenset())
        with naming_differences(self.comm, self._parameters.groups):
            self._hear(bucket.sent for bucket in self._group.buckets if bucket.sent is not None)
            outcomes = [one for one in (bucket.outcome() for bucket in self._group.buckets) if one is not None]
        absent = self._watcher.left_out
        if any(outcome.incomplete for outcome in outcomes):
            absent |= self._parameters.agree_on_absent(self._watcher.missing)
        return Vote(all(outcome.finite for outcome in outcomes), math.nan, absent)

    def _find_clip(self) -> None:
        """The clip of steps in which averaged gradients are there, or only this rank's own."""
        if self._sketch is None:
            return
        if self._group.send is Send.EXACT:
            square = torch.zeros((), dtype=torch.float64, device=self._parameters.device)
            for bucket, masters in zip(self._group.buckets, self._parameters.masters, strict=True):
                own = bucket.exchange.payload[masters.held]
                square += torch.linalg.vector_norm(own, dtype=torch.float32).double().square()
            self._parameters.exchange_comm.all_reduce(square)
            self._norm = math.sqrt(float(square))
            norm = torch.tensor(self._norm / self._loss_scale, dtype=torch.float64)
            self._under_way.clip = clip_of_norm(self._options.clips_to, norm)
        elif self._group.send is Send.LOCAL:
            clip = clip_of_norm(self._options.clips_to, self._sketch.own_norm() / self._loss_scale)
            for bucket in self._group.buckets if may_clip(clip) else ():
                bucket.clip_own(clip)

    def _prepare(self) -> None:
        """Be ready for the kind of step that comes next."""
        self._under_way.number = self.steps
        self._norm = math.nan
        send = self._group.send
        sketched = self._sketch is not None and send is not Send.EXACT
        self._under_way.sketch = self._sketch if sketched else None
        if self._sketch is not None:  # which a load has taken to another step
            self._sketch.begin(self.steps)
        holds = self._clip_by_sketch if sketched and send is not Send.LOCAL else None
        if (self._group.buckets, holds) != self._watched:
            self._watched = (self._group.buckets, holds)
            self._watcher.use(self._group.buckets, True, holds)

    # Parts

    def _begin(self) -> None:
        buckets = [
            AlgorithmBucket(
                bucket.index,
                bucket.layout,
                self,
                self._wire,
                self._algorithm,
                self._clock,
                self._under_way,
                new_state=partial(self._new_state, bucket),
                shards_state=True,
            )
            for bucket in self._parameters.buckets
        ]
        self._weights = FullWeights(self, buckets, self._common_weights, self._options.resync_interval)
        self._group = FreezeGroup(
            self._parameters.exchange_comm,
            self,
            self._algorithm,
            self._rule,
            self._clock,
            buckets,
            self._weights,
            agreement=lambda settings: ShardAgreement(self._parameters, lambda: settings),
            rates=self._rates,
        )
        self._comparisons = ComparisonTimes(self._options.resync_interval)
        self._watched = ([], None)
        self._prepare()

    def _new_state(self, bucket: FlatBucket, name: str, layout: BucketLayout) -> Tensor:
        owned = self._algorithm.state.get(name) is Keep.OWNER
        published = isinstance(self._algorithm, LocalSteps) and name in self._algorithm.published
        dtype = torch.bfloat16 if published and bucket.dtype != torch.float32 else torch.float32
        numel = layout.shard if owned else layout.padded_numel
        return torch.zeros(numel, dtype=dtype, device=bucket.flat.device)

    def _state_of_buckets(self) -> StateOfBuckets:
        return GroupState(self._group, self._parameters.buckets, self._common_weights)

    # Checkpoints

    @override
    def saved_slices(self) -> list[SavedSlice]:
        """Between two syncs the weights are those of the last."""
        return checkpoint.slices(self._group, self._parameters.names, self.comm.rank)

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        left_out = {LEFT_OUT_STEPS: torch.tensor([self.left_out_steps])}
        return checkpoint.rank_tensors(self._group, self._parameters.names) | left_out

    @override
    def counters(self) -> dict[str, Any]:
        own = {"resynchronized_at": self._weights.resynchronized_at, "shared_at": self._comparisons.shared_at}
        return super().counters() | own

    @override
    def load(self, source: SliceSource) -> None:
        saved = source.counters()
        group = self._check_saved(saved)
        self.reset_state()
        self._load_weights_of(source)
        self._clock.frozen_at = self._clock.frozen_at if group is None else group["frozen_at"]
        ranks = self._ranks_to_resume(source)
        if group is not None:
            checkpoint.load(self._group, self._parameters.names, group, source, ranks)
        self._weights.resynchronized_at = saved.get("resynchronized_at", 0)
        self._comparisons.shared_at = saved.get("shared_at", saved["step"])
        if ranks == [self.comm.rank]:
            (self._group.left_out_steps,) = read_left_out_steps(source, self.comm.rank, 1)
        self._prepare()

    @override
    def load_weights(self, source: SliceSource) -> None:
        """Local progress is dropped: all ranks hold what was saved."""
        super().load_weights(source)
        self._group.drop_local_progress()
        for weights in self._common_weights:
            weights.adopt()

    @override
    def reset_state(self) -> None:
        """The weights are those of the last sync."""
        for weights in self._common_weights:
            weights.reset()
        self._begin_again()
        self._begin()

    @override
    def model_state_bytes(self) -> dict[str, float]:
        exchanges = [bucket.compressed for bucket in self._group.buckets]
        residuals = [one for ex in exchanges for one in (ex.worker_residual, ex.owner_residual) if one is not None]
        weights = float(sum(one.bucket.flat.nbytes for one in self._common_weights))
        apart = [one.values for one in self._common_weights if one.values is not one.bucket.flat]
        masters = [one.masters.weights for one in self._common_weights if one.masters.separate]
        return {
            "weights": weights,
            "masters": float(sum(one.nbytes for one in [*masters, *apart])),
            "gradients": weights,
            "residuals": float(sum(one.nbytes for one in residuals)),
            "optimizer state": float(
                sum(values.nbytes for bucket in self._group.buckets for values in bucket.state.values())
            ),
        }
