"""The sharded home of algorithms: one freeze group of parameters in flat buckets, whose state a storage holds, owned or
packed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.optim.bucket import Shared
from thinwire.optim.freeze_group import FreezeGroup, clip_local_step, new_clock, read_outcomes, sends_by_scale
from thinwire.optim.home import AlgorithmHome, check_in_sync, check_settings, slices
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.sharded.owned import OwnedStorage
from thinwire.optim.sharded.packed import PackedStorage
from thinwire.optim.step import Parameters, Send, Step
from thinwire.optim.wire import Wire
from thinwire.zero.gradients import BucketTransport
from thinwire.zero.home import NO_GRADIENTS, Held, ParameterState, StepResult
from thinwire.zero.master_weights import ShardedParameters
from thinwire.zero.rank_checks import NormSketch, clip_of_norm
from thinwire.zero.saved_state import SavedSlice, SliceSource, check_saved, merged_scalars
from thinwire.zero.sharded_home import (
    NOT_FINITE,
    BucketParameterState,
    ShardedHome,
    Vote,
    of_whole_bucket,
    own_fragments,
)

_RESTARTS = ", and residuals of error feedback begin again from zero (reversible=True keeps them)"


class AlgorithmShardedHome(AlgorithmHome, ShardedHome):
    """An algorithm's parameters, all of which entered together, at ZeRO stages 1 and 2."""

    def __init__(self, parameters: ShardedParameters, options: HomeOptions, recipe: Recipe) -> None:
        super().__init__(parameters)
        self._recipe = recipe
        self._options = options
        dtypes = [torch.float32 if one.dtype == torch.float32 else torch.bfloat16 for one in parameters.buckets]
        self._wire = Wire(parameters.exchange_comm, options, parameters.links, residual_dtypes=dtypes)
        self._watched: tuple[Sequence[BucketTransport], object] = ([], None)
        of_all = parameters.exchange_comm, dict(enumerate(parameters.order.parameters)), parameters.device
        self._sketch = NormSketch(*of_all, self.replica) if options.clips_to else None
        self.in_flight = Step(parameters.groups, options.averaging.divide_first, options.clips_to)
        options.averaging.prepare(self.parameters)
        self._begin_again()

    def _begin_again(self) -> None:
        sharded, options, recipe = self._parameters, self._options, self._recipe
        algorithm, order = recipe.algorithm(), sharded.order
        of_order = order.parameters, order.group_of, sharded.groups
        parameters = Parameters(*of_order, recipe.hyperparameters, order.describe, self.replica)
        shared = Shared(parameters, algorithm, new_clock(algorithm), self._wire, self.in_flight)
        self._storage: OwnedStorage | PackedStorage
        if algorithm.form.packs:
            self._storage = PackedStorage(sharded, shared, options, self.watcher.seal, self._reversible)
        else:
            self._storage = OwnedStorage(sharded, shared, options)
        self.groups = [FreezeGroup(self._storage, self._make_rule())]
        self._prepare()

    def _reversible(self) -> bool:
        """Whether packed state keeps the residuals of before a step."""
        options, dtypes = self._options, {bucket.dtype for bucket in self._parameters.buckets}
        wanted = bool(self.scaled) or torch.float16 in dtypes or bool(options.max_norm)
        return wanted if options.reversible is None else options.reversible

    # One step

    def _prepare(self) -> None:
        (group,), step = self.groups, self.in_flight
        step.begin()
        step.number = group.clock.steps
        if self._sketch is not None:
            self._sketch.begin(step.number)
        sketched = self._sketch is not None and group.send is not Send.EXACT
        step.sketch = self._sketch if sketched else None
        holds = step.clip_by_sketch if sketched and group.send is not Send.LOCAL else None
        transports = self._storage.transports
        if (transports, holds) != self._watched:
            self._watched = (transports, holds)
            self.watcher.use(transports, self._keeps_gradients or transports is self._storage.buckets, holds)
        self.watcher.held_back = bool(self.scaled) and group.shows_own_weights

    @override
    def step(self) -> StepResult:
        vote = self._begin_step()
        (group,), step = self.groups, self.in_flight
        local = group.send is Send.LOCAL
        applied = local or (vote.finite and len(vote.absent) < len(self.parameters))
        if applied:
            self.watcher.turn.moving = True
            for bucket in group.buckets if group.send is Send.EXACT else ():
                bucket.receive()
            if self._sketch is not None:
                self._find_clip()
            send = group.send
            group.update(vote.absent, step.loss_scale, float(step.clip))
            self._storage.end_step(send)
        norm = step.norm / step.loss_scale if vote.finite else math.inf
        self.end_step()
        reason = ""
        if not applied:
            reason = NO_GRADIENTS if vote.finite else NOT_FINITE + _RESTARTS * self._forgets_residuals
        return StepResult(applied, norm, reason)

    def _find_clip(self) -> None:
        """The clip of steps in which averaged gradients are there, or only this rank's own."""
        (group,), step = self.groups, self.in_flight
        if group.send is Send.LOCAL:
            clip_local_step(step, group.buckets)
        elif group.send is Send.EXACT:
            if not self._storage.shards:
                square = torch.zeros((), dtype=torch.float64, device=self._parameters.device)
                for bucket, master_weights in zip(group.buckets, self._parameters.master_weights, strict=True):
                    own = bucket.exchange.payload[master_weights.held]
                    own_square = torch.linalg.vector_norm(own, dtype=torch.float32).double().square()
                    square += own_square if self.replica is None else own_square * self._parameters.shares[bucket.index]
                self._parameters.exchange_comm.all_reduce(square)
                if self.replica is not None:
                    self.replica.all_reduce(square)
                step.norm = math.sqrt(float(square))
            step.clip = clip_of_norm(step.max_norm, torch.tensor(step.norm / step.loss_scale, dtype=torch.float64))

    @override
    def _find_vote(self) -> Vote:
        (group,), step = self.groups, self.in_flight
        if self._storage.shards and group.send is Send.EXACT:
            if not self._storage.gradients:
                read_outcomes(step, self.comm, group.buckets)
            averages: dict[int, Tensor] = {}
            for number in range(len(group.buckets)):
                if (average := self._storage.average(number)) is not None:  # of a bucket that was sent
                    averages[number] = average
            vote = self._vote_on_averages(averages)
            step.norm = vote.norm
            return vote
        if group.send is Send.LOCAL:
            return Vote(True, math.nan, frozenset())
        outcome = read_outcomes(step, self.comm, group.buckets)
        absent = self.watcher.left_out
        if outcome.incomplete:
            absent |= self._parameters.agree_on_absent(self.watcher.missing)
        finite = outcome.finite
        if self.replica is not None:
            finite = self.replica.everywhere(finite, self._parameters.device)
        return Vote(finite, step.norm, absent)

    @override
    def _begin_step(self) -> Vote:
        step = self.in_flight
        vote = super()._begin_step()
        if vote.finite and step.loss_scale != step.sent_scale and sends_by_scale(self.groups[0]):
            # They left as if gradients were times the scale before. It changes rarely, and alike on every rank;
            # nothing is committed yet, so all is simply sent again.
            step.send_again()
            self._vote = None
            self.watcher.send_again()
            vote = self._finish()
        step.sent_scale = step.loss_scale
        return vote

    @override
    def end_step(self) -> None:
        super().end_step()
        self._prepare()
        # A GradScaler has to see them, and may change its scale: then they are sent again.
        self.in_flight.frees_gradients = self.scaled is False

    @override
    def drop(self) -> None:
        if self.watcher.arrived and self.comm.rank == 0 and self._forgets_residuals:
            warnings.warn(
                "a compressed backward() is thrown away, by zero_grad() without a step() or by a load: the residuals "
                "of error feedback have taken its gradients up, and begin again from zero. reversible=True keeps those "
                "of before, in a second copy of 2 bytes an element, or 4 in fp32",
                RuntimeWarning,
                stacklevel=3,
            )
        super().drop()
        if self._sketch is not None:
            self._sketch.begin(self.steps)

    @property
    def _forgets_residuals(self) -> bool:
        """Whether residuals begin again from zero if what is sent now is not applied."""
        if self.groups[0].send is not Send.COMPRESSED:
            return False
        return not all(bucket.compressed.reversible for bucket in self.groups[0].buckets)

    @override
    def parameter_state(self) -> ParameterState:
        return _State(self)

    @override
    def synchronize_weights(self) -> None:
        if not self._storage.shards:  # else ranks never hold weights of their own
            super().synchronize_weights()

    # Checkpoints

    @override
    def saved_slices(self) -> list[SavedSlice]:
        """Between two syncs the weights are those of the last."""
        self._parameters.wait_for_weights()
        (group,) = self.groups
        if group.local is None or group.local.in_sync:
            self._storage.take_over_written(in_sync=True)
        return slices(group, self.names, self._parameters.exchange_comm.rank)

    @override
    def counters(self) -> dict[str, Any]:
        storage = self._storage
        found = super().counters() | {"nodes": self._parameters.saved_nodes}
        return found | (storage.counters() if isinstance(storage, OwnedStorage) else {})

    @override
    def check(self, source: SliceSource, nodes: Sequence[int] | None = None) -> None:
        saved = source.counters()
        check_settings(saved["settings"], self._recipe.settings)
        if len({(group["steps"], group["frozen_at"]) for group in saved["freeze_groups"]}) > 1:
            raise ValueError(
                "this state has parameters that entered later and freeze on their own, which sharded state cannot do: "
                "load it at stage 0"
            )
        super().check(source, self._parameters.saved_nodes)
        for one in self._parameters.master_weights if "weight" not in source.kinds() else ():
            for run in one.runs if one.separate else ():
                check_saved(source, "master", self.names[run.parameter])

    @override
    def load(self, source: SliceSource) -> None:
        saved = source.counters()
        groups = saved["freeze_groups"]
        if not self._can_go_on_as(groups):
            self.reset_state()
        _load_weights_of(self._parameters, source)
        if isinstance(self._storage, OwnedStorage):
            self._storage.load_counters(saved)
        if groups:  # else the run had not begun
            of_all = {**groups[0], "scalars": merged_scalars(groups)}
            self._load_groups(source, [of_all], self._parameters.saved_nodes)
        self._prepare()

    def _can_go_on_as(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether saved freeze groups can be written over all of the present state: packed, of the same stage."""
        (group,) = self.groups
        if not isinstance(self._storage, PackedStorage) or len(groups) != 1:
            return False
        saved_rule, rule = groups[0]["rule"] or {}, {} if group.rule is None else group.rule.state()
        return group.clock.frozen is (groups[0]["frozen_at"] is not None) and rule.keys() == saved_rule.keys()

    @override
    def load_weights(self, source: SliceSource) -> None:
        """Local progress is dropped: all ranks hold what was saved."""
        super().load_weights(source)
        self.groups[0].drop_local_progress()
        for bucket in self.groups[0].buckets:
            self._storage.weights_rewritten(bucket.index)

    @override
    def reset_state(self) -> None:
        """The weights are those of the last sync."""
        self._storage.show_common()
        self._begin_again()

    @override
    def model_state_bytes(self) -> dict[str, float]:
        return self._storage.model_state_bytes()


class _State(BucketParameterState):
    """With the state of one freeze group."""

    _home: AlgorithmShardedHome

    @property
    def _group(self) -> FreezeGroup:
        return self._home.groups[0]

    @override
    def check_weights(self) -> None:
        check_in_sync(self._group.in_sync)

    @override
    def weights_rewritten(self, bucket: int) -> None:
        self._group.storage.weights_rewritten(bucket)

    @override
    def check_gradients(self) -> None:
        self._group.check_averages()

    @override
    def average(self, bucket: int) -> Tensor | None:
        return self._group.storage.average(bucket)

    @override
    def gradients_rewritten(self, bucket: int) -> None:
        if not self._group.storage.gradients:  # whose votes look at the averages in any case
            self._group.buckets[bucket].rewritten = True

    @override
    def check_may_write_state(self, kind: str) -> None:
        self._group.check_may_write(kind)

    @override
    def state_in(self, bucket: int, number: int, kind: str) -> Held:
        self._group.check_plain(kind)
        kept, master_weights = self._group.buckets[bucket], self._parameters.master_weights[bucket]
        if kind in kept.whole_state:
            return of_whole_bucket(master_weights.bucket, number, kept.whole_state[kind])
        values = kept.state.get(kind)
        views = [None if values is None else values[run.place] for run in master_weights.runs]
        return Held(own_fragments(master_weights, number, views), everywhere=False, known=values is not None)

    @override
    def kinds(self) -> list[str]:
        return [] if self._group.storage.shards and self._group.clock.frozen else sorted(self._group.buckets[0].state)


def _load_weights_of(parameters: ShardedParameters, source: SliceSource) -> None:
    """Take the weights over where they were saved; else the parameters have them, and the source the master weights."""
    if "weight" in source.kinds():
        parameters.load_weights(source)
        return
    for one in parameters.master_weights:
        for run, view in zip(one.runs, one.views, strict=True) if one.separate else ():
            view.copy_(source.read("master", parameters.names[run.parameter], run.start, run.numel))
    parameters.accept_written()
