"""The sharded home of algorithms whose frozen stage takes whole state on every rank: master weights, variance and owners'
residuals on their owners, momentum and what else a rank's own steps need on all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from thinwire.optim.algorithm import Keep, Send
from thinwire.optim.algorithm_home import check_may_leave_out
from thinwire.optim.bucket import AlgorithmBucket, place_of
from thinwire.optim.formulas import AdamSettings
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.home_options import HomeOptions
from thinwire.optim.members import MembersByGroup
from thinwire.optim.options import check_same_freeze
from thinwire.optim.recipe import Recipe
from thinwire.optim.sharded import full_checkpoint
from thinwire.optim.sharded.common_weights import CommonWeights
from thinwire.optim.sharded.home import AlgorithmShardedHome
from thinwire.optim.sharded.low_memory_wire import LowMemoryWire
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.flat_bucket import FlatBucket
from thinwire.zero.home import NO_GRADIENTS, StepResult
from thinwire.zero.saved_slices import Piece, PieceSource
from thinwire.zero.sharded_home import NOT_FINITE, Vote
from thinwire.zero.sharded_parameters import ShardedParameters

__all__ = ["FullHome"]

_LEFT_OUT_STEPS = "left_out_steps"


class FullHome(AlgorithmShardedHome):
    """ZeRO stage 1 for algorithms with local steps, or whose step is not linear in what comes back.

    16-bit parameters have fp32 master weights on the owner; every rank keeps the common weights in 16 bits, rounded
    stochastically with one seed on all ranks, and taken from the master weights at every exact step and after
    `resync_interval` steps. Published state and residuals are then bf16.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        options: HomeOptions,
        recipe: Recipe,
        make_rule: Callable[[], FreezeRule | None],
    ) -> None:
        super().__init__(parameters, options, recipe, make_rule)
        self._wire = LowMemoryWire(parameters.exchange_comm, parameters.buckets, options.block_size)
        self._weights = [CommonWeights(masters) for masters in parameters.masters]
        self._resynchronized_at = 0
        self._begin()

    # The parameters, as buckets ask for them

    def group_number(self, index: int) -> int:
        """Which parameter group a parameter is in."""
        return self._parameters.order.group_of[index]

    def settings(self, group: int) -> AdamSettings:
        """The hyperparameters of a parameter group now."""
        return self._settings(group)

    # One step

    def step(self) -> StepResult:
        """See Home."""
        send = self._send
        vote = self._begin_step()
        applied = vote.finite and (send is Send.LOCAL or len(vote.absent) < len(self.parameters))
        norm = vote.norm / self.loss_scale
        if applied:
            norm = self._apply(send, vote)
        self._end_step()
        self._prepare()
        return StepResult(applied, norm, "" if applied else NO_GRADIENTS if vote.finite else NOT_FINITE)

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """See Home."""
        check_may_leave_out(self._algorithm)
        super().leave_out(parameters)

    @property
    def _send(self) -> Send:
        return self._algorithm.next_send(self._clock)

    @property
    def _sends_payloads(self) -> bool:
        return self._send is not Send.EXACT

    def _find_vote(self) -> Vote:
        if self._send is Send.LOCAL:
            return Vote(True, math.nan, frozenset())
        outcomes = [outcome for outcome in (bucket.outcome() for bucket in self._buckets) if outcome is not None]
        absent = frozenset[int]()
        if any(outcome.incomplete for outcome in outcomes):
            absent = self._parameters.agree_on_absent(self._watcher.missing)
        finite = all(outcome.finite for outcome in outcomes)
        return Vote(finite, self._norm if finite else math.inf, absent)

    def _apply(self, send: Send, vote: Vote) -> float:
        """Take the step; the averaged gradient's norm where it was found."""
        self._take_over_written()
        decision = self._algorithm.decision()
        self._clock.steps += 1
        if send is Send.EXACT:
            self._exact_step(vote.absent)
        elif send is Send.LOCAL:
            self._local_step()
        else:
            self._compressed_step(send)
        if send is not Send.LOCAL:
            self._resynchronize(now=send is Send.EXACT)
        froze = self._has_ended_warmup(lambda: math.nan)
        if froze:
            self._freeze()
        if decision is not None and (froze or decision != self._algorithm.decision()):
            check_same_freeze(self._parameters.exchange_comm, self.frozen, self._rates())
        return self._norm / self.loss_scale

    def _exact_step(self, absent: frozenset[int]) -> None:
        for bucket in self._buckets:
            bucket.receive()
            average = bucket.exchange.payload
            if self.loss_scale != 1.0:
                average.div_(self.loss_scale)
        self._clip_averages()
        owned = MembersByGroup(self._settings)
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            masters = weights.masters
            average = bucket.exchange.payload[masters.held]
            for run, view in zip(masters.runs, masters.views, strict=True):
                if run.parameter not in absent:
                    state = {name: values[run.place] for name, values in self._held(bucket, weights).items()}
                    owned.add(self.group_number(run.parameter), run.parameter, view, average[run.place], state)
        self._algorithm.absorb_owned(owned.in_order(), self._clock)
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            self._publish(bucket, weights)
        everyone = self._members(absent)
        self._algorithm.absorb_exact(everyone.in_order(), self._clock, self._agreement(absent))
        self._settle(absent)
        self._move(absent)
        for bucket in self._buckets:
            bucket.find_zero_variance()

    def _held(self, bucket: AlgorithmBucket, weights: CommonWeights) -> dict[str, Tensor]:
        """What owners work on: their state, and fp32 copies of their share of what they publish, kept for `_publish`."""
        if bucket.index not in self._publishing:
            held = weights.masters.held
            self._publishing[bucket.index] = {
                name: bucket.state[name][held].to(torch.float32, copy=True) for name in self._algorithm.published
            }
        owned = {name: bucket.state[name] for name, keep in self._algorithm.state.items() if keep is Keep.OWNER}
        return owned | self._publishing[bucket.index]

    def _publish(self, bucket: AlgorithmBucket, weights: CommonWeights) -> None:
        """Give every rank what owners have worked out."""
        for name in self._algorithm.published:
            values = self._held(bucket, weights)[name].to(bucket.state[name].dtype)
            self._parameters.exchange_comm.all_gather(bucket.state[name], values)
        self._publishing.pop(bucket.index, None)

    def _settle(self, absent: frozenset[int]) -> None:
        """What takes whole parameters of the published state, in fp32."""
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            for slot in self._present(bucket, absent):
                views = {name: weights.bucket.view(bucket.state[name], slot) for name in self._algorithm.published}
                whole = {name: view.float() for name, view in views.items()}
                members = MembersByGroup(self._settings, self._mask)
                some = next(iter(whole.values()))
                members.add(self.group_number(slot.parameter), slot.parameter, some, some, whole)
                self._algorithm.settle(members.in_order(), self._clock)
                for name, view in views.items():
                    view.copy_(whole[name])

    def _clip_averages(self) -> None:
        """Clip exactly averaged gradients by their norm, which the owners' shards add up to. Collective."""
        if not self._options.max_norm:
            return
        square = torch.zeros((), dtype=torch.float64, device=self._parameters.device)
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            own = bucket.exchange.payload[weights.masters.held]
            square += torch.linalg.vector_norm(own, dtype=torch.float32).double().square()
        self._parameters.exchange_comm.all_reduce(square)
        self._take_norm(math.sqrt(float(square)) * self.loss_scale)
        for bucket in self._buckets if self._under_way.clip < 1.0 else ():
            bucket.exchange.payload.mul_(self._under_way.clip)

    def _compressed_step(self, send: Send) -> None:
        if send is Send.SYNC:
            self._count_local()
        for bucket in self._buckets:
            bucket.receive()
        self._algorithm.absorb_compressed(self._members().in_order(), self._clock, self._agreement())
        self._move(frozenset())
        if send is Send.SYNC:
            self._algorithm.end_sync()

    def _local_step(self) -> None:
        if self._sketch is not None:
            self._take_norm(self._sketch.own_norm())
            for bucket in self._buckets if self._under_way.clip < 1.0 else ():
                bucket.clip_own(self._under_way.clip)
            self._norm = math.nan  # of this rank alone
        finite = self._own_is_finite()
        self._count_local()
        if any(self._settings(group).weight_decay for group in set(self._parameters.order.group_of)):
            self._change_weights(lambda members: self._algorithm.decay_common(members.in_order(), self._clock))
        self._algorithm.absorb_local(self._members().in_order(), self._clock, finite)
        self.show_own_weights(True)

    def _own_is_finite(self) -> bool:
        if all(bucket.own_is_finite() for bucket in self._buckets):
            return True
        self._left_out_steps += 1
        warnings.warn(
            f"local step {self.steps} adds nothing on rank {self.comm.rank}: a gradient was NaN or infinite there. The "
            "other ranks go on",
            RuntimeWarning,
            stacklevel=7,
        )
        return False

    def _count_local(self) -> None:
        groups = sorted(set(self._parameters.order.group_of))
        self._algorithm.count_local({group: self._settings(group) for group in groups}, self._clock)

    # Weights

    def _move(self, absent: frozenset[int]) -> None:
        self._change_weights(lambda members: self._algorithm.move(members.in_order(), self._clock), absent)
        for weights in self._weights:
            weights.show()

    def _change_weights(self, change: Callable[[MembersByGroup], None], absent: Collection[int] = ()) -> None:
        """Have `change` move the common weights, cut by cut: master weights and every rank's copy of them."""
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            average = bucket.exchange.payload
            whole = bucket.whole_state

            def move(
                parameter: int,
                place: slice,
                values: Tensor,
                average: Tensor = average,
                whole: Mapping[str, Tensor] = whole,
            ) -> None:
                members = MembersByGroup(self._settings)
                state = {name: one[place].float() for name, one in whole.items()}
                members.add(self.group_number(parameter), parameter, values, average[place], state)
                change(members)

            weights.move(move, absent, ((self.steps << 20) + bucket.index))

    @torch.no_grad()
    def synchronize_weights(self) -> None:
        """See Home."""
        if self._watcher.in_step:
            raise RuntimeError("synchronize_weights() was called between backward() and step(): call step() first")
        if self.in_sync:
            return
        self._take_over_written()
        for bucket in self._buckets:
            for slot in bucket.layout.slots:
                out = bucket.compressed.payload[place_of(slot)]
                self._algorithm.begin_meeting(bucket.contribution(slot), out)
            bucket.compressed.start(self.steps)
            bucket.compressed.advance()
            bucket.compressed.wait()
            bucket.compressed.outcome()
        for bucket in self._buckets:
            bucket.prepare(Send.SYNC)
            bucket.receive()
        self._algorithm.absorb_compressed(self._members().in_order(), self._clock, self._agreement())
        self._change_weights(lambda members: self._algorithm.meet(members.in_order(), self._clock))
        for weights in self._weights:
            weights.show()
        self._algorithm.end_sync()
        self._prepare()

    @torch.no_grad()
    def show_own_weights(self, own: bool) -> None:
        """See Home."""
        if not (self._algorithm.local_steps and self.frozen):
            return
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            if not own:
                weights.show()
            for slot in bucket.layout.slots if own else ():
                weights.bucket.flat[place_of(slot)].copy_(self._own_weight(bucket, weights, slot))

    def _own_weight(self, bucket: AlgorithmBucket, weights: CommonWeights, slot: Slot) -> Tensor:
        return self._algorithm.own_weight(weights.values[place_of(slot)], bucket.contribution(slot))

    def _take_over_written(self) -> None:
        """Take over weights that somebody wrote into the parameters.

        Raises RuntimeError where those were this rank's own: what was written need not be the same on other ranks.
        """
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            for slot in weights.take_over_written(self.in_sync):
                own = self._own_weight(bucket, weights, slot).to(weights.bucket.dtype)
                if not torch.equal(weights.bucket.flat[place_of(slot)], own):
                    raise RuntimeError(
                        f"{self._parameters.order.describe(slot.parameter)} was changed between local steps, in which "
                        "ranks hold weights of their own: call optimizer.synchronize_weights() on every rank before you "
                        "change weights"
                    )

    def _resynchronize(self, *, now: bool) -> None:
        """Take 16-bit weights from the owners' master weights; between no local steps."""
        if not now and self.steps - self._resynchronized_at < self._options.resync_interval:
            return
        self._resynchronized_at = self.steps
        rounded = [weights for weights in self._weights if weights.masters.separate]
        for wait in [weights.masters.publish() for weights in rounded]:
            wait()
        for weights in rounded:
            weights.adopt()

    # Stages

    def _begin(self) -> None:
        self._publishing: dict[int, dict[str, Tensor]] = {}
        self._buckets = [
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
        self._watched: tuple[list[AlgorithmBucket], object] = ([], None)
        self._prepare()

    def _new_state(self, bucket: FlatBucket, name: str, layout: BucketLayout) -> Tensor:
        owned = self._algorithm.state.get(name) is Keep.OWNER
        published = name in self._algorithm.published
        dtype = torch.bfloat16 if published and bucket.dtype != torch.float32 else torch.float32
        numel = layout.shard if owned else layout.padded_numel
        values = torch.zeros(numel, dtype=dtype, device=bucket.flat.device)
        values[: numel if owned else layout.numel].fill_(self._algorithm.fills.get(name, 0.0))
        return values

    def _freeze(self) -> None:
        self._begin_frozen_state()
        members = MembersByGroup(self._settings)
        for bucket in self._buckets:
            for slot in (one for one in bucket.layout.slots if one.numel):
                place = place_of(slot)
                state = {name: values[place] for name, values in bucket.state.items()}
                momentum = state["exp_avg"]
                members.add(self.group_number(slot.parameter), slot.parameter, momentum, momentum, state)
        self._algorithm.freeze(members.in_order(), self._clock, self._agreement())
        self._clock.frozen_at = self.steps
        for bucket in self._buckets:
            bucket.begin_compression()

    def _begin_frozen_state(self) -> None:
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            bucket.rename_state()
            if self._algorithm.local_steps:
                weights.stand_apart()

    def _prepare(self) -> None:
        """Be ready for the kind of step that comes next."""
        self._under_way.number = self.steps
        self._under_way.clip = 1.0
        self._norm = math.nan
        send = self._send
        for bucket in self._buckets:
            bucket.prepare(send)
        sketched = self._sketch is not None and send is not Send.EXACT
        self._under_way.sketch = self._sketch if sketched else None
        if self._sketch is not None:
            self._sketch.discard()
        holds = self._sketch_clip if sketched and send is not Send.LOCAL else None
        if (self._buckets, holds) != self._watched:
            self._watched = (self._buckets, holds)
            self._watcher.use(self._buckets, True, holds)

    def _sketch_clip(self) -> None:
        assert self._sketch is not None
        self._take_norm(self._sketch.norm())

    def _members(self, absent: Collection[int] = ()) -> MembersByGroup:
        """Whole parameters, flat, with what came back; their weights are not among it."""
        members = MembersByGroup(self._settings, self._mask)
        for bucket in self._buckets:
            average = bucket.exchange.payload
            whole = bucket.whole_state
            for slot in self._present(bucket, absent):
                place = place_of(slot)
                state = {name: values[place] for name, values in whole.items()}
                members.add(self.group_number(slot.parameter), slot.parameter, average[place], average[place], state)
        return members

    def _present(self, bucket: AlgorithmBucket, absent: Collection[int]) -> list[Slot]:
        return [slot for slot in bucket.layout.slots if slot.numel and slot.parameter not in absent]

    def _mask(self, group: int) -> Tensor | None:
        mask: Tensor | None = self._parameters.groups[group].get("exp_avg_mask")
        return mask

    # Checkpoints

    def pieces(self) -> list[Piece]:
        """See Home; between two syncs the weights are those of the last."""
        return full_checkpoint.slices(
            self._buckets, self._weights, self._algorithm, self.frozen, self._parameters.names
        )

    def rank_tensors(self) -> dict[str, Tensor]:
        """See Home."""
        found = full_checkpoint.rank_tensors(self._buckets, self._algorithm, self.frozen, self._parameters.names)
        return found | {_LEFT_OUT_STEPS: torch.tensor([self._left_out_steps])}

    def counters(self) -> dict[str, object]:
        """See Home."""
        return super().counters() | {"resynchronized_at": self._resynchronized_at}

    def load(self, source: PieceSource) -> None:
        """See Home."""
        saved = source.counters()
        self._load_counters(saved)
        self._load_weights_of(source)
        self._resynchronized_at = saved.get("resynchronized_at", 0)
        if self.frozen and self._algorithm.freezes:
            self._begin_frozen_state()
        ranks = self._ranks_to_resume(source)
        full_checkpoint.load(
            self._buckets, self._weights, self._algorithm, self.frozen, self._parameters.names, source, ranks
        )
        self.show_own_weights(True)
        if ranks == [self.comm.rank]:
            try:
                self._left_out_steps = int(source.read_rank(_LEFT_OUT_STEPS, self.comm.rank).sum())
            except KeyError:  # from a home without local steps
                self._left_out_steps = 0
        self._prepare()

    def load_weights(self, source: PieceSource) -> None:
        """See Home; local progress is dropped: all ranks hold what was saved."""
        super().load_weights(source)
        self._algorithm.end_sync()
        for bucket, weights in zip(self._buckets, self._weights, strict=True):
            weights.adopt()
            if "mean_momentum" in bucket.state:
                bucket.state["mean_momentum"].zero_()

    def reset_state(self) -> None:
        """See Home; the weights are those of the last sync."""
        for weights in self._weights:
            weights.reset()
        self._resynchronized_at = self._left_out_steps = 0
        self._begin_again()
        self._begin()

    def model_state_bytes(self) -> dict[str, float]:
        """See Home."""
        state = sum(values.nbytes for bucket in self._buckets for values in bucket.state.values())
        weights = float(sum(weights.bucket.flat.nbytes for weights in self._weights))
        apart = sum(one.values.nbytes for one in self._weights if one.values is not one.bucket.flat)
        residuals = [bucket.compressed for bucket in self._buckets]
        return {
            "weights": weights,
            "masters": float(sum(one.masters.weights.nbytes for one in self._weights if one.masters.separate)) + apart,
            "gradients": weights,
            "residuals": float(
                sum(
                    one.nbytes for ex in residuals for one in (ex.worker_residual, ex.owner_residual) if one is not None
                )
            ),
            "optimizer state": float(state),
        }
