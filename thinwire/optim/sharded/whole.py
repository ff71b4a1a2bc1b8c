"""Sharded state of forms that do not pack: master weights, variance and owners' residuals on their owners, momentum and
what else a rank's own steps need whole on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.codecs import make_codec
from thinwire.optim import checkpoint
from thinwire.optim.algorithm import Keep, Send
from thinwire.optim.bucket import AlgorithmBucket
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.home import check_averages, check_in_sync, check_plain
from thinwire.optim.sharded.storage import ShardAgreement, ShardedRun, Storage
from thinwire.optim.sharded.weights import CommonWeights, FullWeights
from thinwire.optim.step import may_clip
from thinwire.optim.wire import LowMemoryWire
from thinwire.zero import BucketLayout
from thinwire.zero.home import Held
from thinwire.zero.master_weights import FlatBucket
from thinwire.zero.rank_checks import ComparisonTimes, compare_replicas
from thinwire.zero.saved_state import SavedSlice, SliceSource
from thinwire.zero.sharded_home import Vote, clip_of_norm, of_whole_bucket, own_fragments

__all__ = ["WholeStorage"]


class WholeStorage(Storage):
    """ZeRO stage 1 for algorithms with local steps, or whose step is not linear in what comes back.

    16-bit parameters have fp32 master weights on the owner; every rank keeps the common weights in 16 bits, rounded
    stochastically with one seed on all ranks: see FullWeights. Published state and residuals are then bf16.
    """

    def __init__(self, run: ShardedRun) -> None:
        super().__init__(run)
        sharded, options = run.sharded, run.options
        codec, exact = (make_codec(name, options.block_size) for name in (options.codec, options.exact_codec))
        wire = LowMemoryWire(run.comm, sharded.buckets, codec, exact)
        self._watched: tuple[Sequence[AlgorithmBucket], object] = ([], None)
        self._common_weights = [CommonWeights(masters) for masters in sharded.masters]
        buckets = [
            AlgorithmBucket(
                bucket.index,
                bucket.layout,
                run,
                wire,
                run.algorithm,
                run.clock,
                run.step,
                new_state=partial(_new_state, run, bucket),
                shards_state=True,
            )
            for bucket in sharded.buckets
        ]
        self._weights = FullWeights(run, buckets, self._common_weights, options.resync_interval)
        self._group = FreezeGroup(
            run.comm,
            run,
            run.algorithm,
            run.rule,
            run.clock,
            buckets,
            self._weights,
            agreement=lambda settings: ShardAgreement(sharded, lambda: settings),
            rates=run.rates,
        )
        self._comparisons = ComparisonTimes(options.resync_interval)
        self.prepare()

    # A step

    @property
    @override
    def sends_payloads(self) -> bool:
        return self._group.send is not Send.EXACT

    @override
    def prepare(self) -> None:
        run, send = self.run, self._group.send
        sketched = run.sketch is not None and send is not Send.EXACT
        run.step.sketch = run.sketch if sketched else None
        holds = run.clip_by_sketch if sketched and send is not Send.LOCAL else None
        if (self._group.buckets, holds) != self._watched:
            self._watched = (self._group.buckets, holds)
            run.watcher.use(self._group.buckets, True, holds)

    @override
    def vote(self) -> Vote:
        if self._group.send is Send.LOCAL:
            return Vote(True, math.nan, frozenset())
        return self.run.read_headers(self._group.buckets)

    @override
    def applies(self, vote: Vote) -> bool:
        return self._group.send is Send.LOCAL or super().applies(vote)

    @override
    def apply(self, vote: Vote) -> None:
        self._group.receive_averages()
        self._find_clip()
        step = self.run.step
        self._group.update(vote.absent, step.loss_scale, float(step.clip))
        self._compare_replicas()

    def _find_clip(self) -> None:
        """The clip of steps in which averaged gradients are there, or only this rank's own."""
        run, scale = self.run, self.run.step.loss_scale
        if run.sketch is None:
            return
        if self._group.send is Send.EXACT:
            square = torch.zeros((), dtype=torch.float64, device=run.sharded.device)
            for bucket, masters in zip(self._group.buckets, run.sharded.masters, strict=True):
                own = bucket.exchange.payload[masters.held]
                square += torch.linalg.vector_norm(own, dtype=torch.float32).double().square()
            run.comm.all_reduce(square)
            run.step.norm = math.sqrt(float(square))
            norm = torch.tensor(run.step.norm / scale, dtype=torch.float64)
            run.step.clip = clip_of_norm(run.options.clips_to, norm)
        elif self._group.send is Send.LOCAL:
            clip = clip_of_norm(run.options.clips_to, run.sketch.own_norm() / scale)
            for bucket in self._group.buckets if may_clip(clip) else ():
                bucket.clip_own(clip)

    def _compare_replicas(self) -> None:
        """Now and then, see whether all ranks hold the same weights, and give them their owners' where not."""
        steps, group = self.run.clock.steps, self._group
        if not self._comparisons.due(steps, group.in_sync):
            return
        comm, replicas = self.run.sharded.comm, [one.bucket.flat for one in self._common_weights]
        if not compare_replicas(comm, replicas, steps, self.run.options.on_drift, "their owners'"):
            for weights in self._common_weights:
                weights.masters.publish()()
                weights.adopt()

    # Between steps

    @property
    @override
    def left_out_steps(self) -> int:
        return self._group.left_out_steps

    @override
    @torch.no_grad()
    def synchronize_weights(self) -> None:
        if self.run.watcher.in_step:
            raise RuntimeError("synchronize_weights() was called between backward() and step(): call step() first")
        self._group.meet(self.run.clock.steps)

    @override
    def show_own_weights(self, own: bool) -> None:
        self._group.show_own_weights(own)

    @override
    def weights_loaded(self) -> None:
        self._group.drop_local_progress()
        for weights in self._common_weights:
            weights.adopt()

    @override
    def release(self) -> None:
        for weights in self._common_weights:
            weights.reset()

    # By bucket

    @override
    def check_weights(self) -> None:
        check_in_sync(self._group.in_sync)

    @override
    def weights_rewritten(self, bucket: int) -> None:
        self._common_weights[bucket].adopt()

    @override
    def check_gradients(self) -> None:
        check_averages(self._group.send is Send.EXACT)

    @override
    def average(self, bucket: int) -> Tensor | None:
        return self._group.buckets[bucket].average()

    @override
    def gradients_rewritten(self, bucket: int) -> None:
        self._group.buckets[bucket].average_rewritten()

    @override
    def state(self, bucket: int, parameter: int, kind: str) -> Held:
        check_plain(self.run.algorithm, self.run.clock, kind)
        kept = self._group.buckets[bucket]
        if kind in kept.whole_state:
            return of_whole_bucket(self.run.sharded.buckets[bucket], parameter, kept.whole_state[kind])
        values, masters = kept.state.get(kind), self._common_weights[bucket].masters
        views = [None if values is None else values[run.place] for run in masters.runs]
        return Held(own_fragments(masters, parameter, views), everywhere=False, known=values is not None)

    @override
    def kinds(self) -> list[str]:
        return sorted(self._group.buckets[0].state)

    # Checkpoints

    @override
    def slices(self) -> list[SavedSlice]:
        """Between two syncs the weights are those of the last."""
        return checkpoint.slices(self._group, self.run.sharded.names, self.run.sharded.comm.rank)

    @override
    def rank_tensors(self) -> dict[str, Tensor]:
        left_out = {checkpoint.LEFT_OUT_STEPS: torch.tensor([self.left_out_steps])}
        return checkpoint.rank_tensors(self._group, self.run.sharded.names) | left_out

    @override
    def counters(self) -> dict[str, Any]:
        return {"resynchronized_at": self._weights.resynchronized_at, "shared_at": self._comparisons.shared_at}

    @override
    def load(self, saved: Mapping[str, Any], group: Mapping[str, Any] | None, source: SliceSource) -> None:
        if group is not None:
            self.run.clock.frozen_at = group["frozen_at"]
        ranks = self.run.ranks_to_resume(source)
        if group is not None:
            checkpoint.load(self._group, self.run.sharded.names, group, source, ranks)
        self._weights.resynchronized_at = saved.get("resynchronized_at", 0)
        self._comparisons.shared_at = saved.get("shared_at", saved["step"])
        rank = self.run.sharded.comm.rank
        if ranks == [rank]:
            (self._group.left_out_steps,) = checkpoint.read_left_out_steps(source, rank, 1)

    @override
    def model_state_bytes(self) -> dict[str, float]:
        exchanges = [bucket.compressed for bucket in self._group.buckets]
        residuals = [one for ex in exchanges for one in (ex.worker_residual, ex.owner_residual) if one is not None]
        weights = float(sum(one.bucket.flat.nbytes for one in self._common_weights))
        apart = [one.values for one in self._common_weights if one.values is not one.bucket.flat]
        masters = [one.masters.weights for one in self._common_weights if one.masters.separate]
        states = [values for bucket in self._group.buckets for values in bucket.state.values()]
        return {
            "weights": weights,
            "masters": float(sum(one.nbytes for one in [*masters, *apart])),
            "gradients": weights,
            "residuals": float(sum(one.nbytes for one in residuals)),
            "optimizer state": float(sum(one.nbytes for one in states)),
        }


def _new_state(run: ShardedRun, bucket: FlatBucket, name: str, layout: BucketLayout) -> Tensor:
    owned = run.algorithm.state.get(name) is Keep.OWNER
    published = run.local is not None and name in run.local.published
    dtype = torch.bfloat16 if published and bucket.dtype != torch.float32 else torch.float32
    return torch.zeros(layout.shard if owned else layout.padded_numel, dtype=dtype, device=bucket.flat.device)
