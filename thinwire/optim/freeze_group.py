"""The parameters that entered the optimizer together: they warm up together, freeze together, and turn what the ranks
exchanged into steps of an algorithm, wherever their state lives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from thinwire.comm import Communicator
from thinwire.optim.algorithm import (
    AdamSettings,
    Agreement,
    Algorithm,
    Clock,
    LocalSteps,
    Members,
    Send,
    next_send,
    variance_of,
)
from thinwire.optim.bucket import AlgorithmBucket, place_of
from thinwire.optim.freeze_rule import FreezeRule, variance_norm
from thinwire.optim.group_weights import GroupWeights, slots_with_elements
from thinwire.optim.options import check_same_freeze
from thinwire.optim.step import Parameters
from thinwire.zero.norm_sketch import read_together

__all__ = ["FreezeGroup"]


class FreezeGroup:
    """Buckets with one step count and one freeze; a parameter group added later begins its own.

    `send`: what the step in flight, or the next one, sends. `left_out_steps`: local steps to which this rank added
    nothing, as its gradient was not finite.

    Args:
        agreement: makes an Agreement between parameters with these settings.
        rates: the learning rates of all parameter groups.
        changed: called when the state has other names than before.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Parameters,
        algorithm: Algorithm,
        rule: FreezeRule | None,
        clock: Clock,
        buckets: Sequence[AlgorithmBucket],
        weights: GroupWeights,
        *,
        agreement: Callable[[dict[int, AdamSettings]], Agreement],
        rates: Callable[[], list[float]],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.algorithm = algorithm
        self.local = algorithm if isinstance(algorithm, LocalSteps) else None
        self.rule = rule
        self.clock = clock
        self.buckets = list(buckets)
        self.weights = weights
        self.left_out_steps = 0
        self._comm = comm
        self._parameters = parameters
        self._agreement = agreement
        self._rates = rates
        self._changed = changed
        changed()
        self.prepare()

    @property
    def shows_own_weights(self) -> bool:
        """Whether parameters may show other weights than those that all ranks have in common."""
        return self.local is not None and self.clock.frozen

    @property
    def compresses(self) -> bool:
        """Whether there are residuals, or will be at the next step."""
        return self.clock.frozen or self.local is not None

    # One step

    def receive_averages(self) -> None:
        """Write averaged gradients into the payloads, if this is an EXACT step."""
        for bucket in self.buckets if self.send is Send.EXACT else ():
            bucket.receive()

    def update(self, absent: frozenset[int], loss_scale: float, clip: float) -> None:
        """Apply what the exchanges of this step brought; `absent` parameters had no gradient on any rank. Collective.

        Averages of an EXACT step are there already: see `receive_averages`.
        """
        send, decision = self.send, None if self.local is None else self.local.decision()
        self.take_over_written()
        self.clock.steps += 1
        if send is Send.EXACT:
            self._exact_step(absent, loss_scale, clip)
        elif send is Send.LOCAL:
            self._local_step()
        else:
            self._compressed_step(send)
        self.weights.end_step(send is not Send.LOCAL, send is Send.EXACT, self.clock.steps)
        self._decide_on_freeze(decision)
        self.prepare()

    @property
    def in_sync(self) -> bool:
        """Whether all ranks hold the same weights."""
        return self.local is None or self.local.in_sync

    @property
    def moves_in_place(self) -> bool:
        """Whether the form moves the weights where they lie."""
        kernels = all(bucket.compressed.codec.has_kernels for bucket in self.buckets)
        return (
            kernels and self.algorithm.form.update is not None and all(map(self.weights.moves_in_place, self.buckets))
        )

    def count_replay(self) -> None:
        """Count a COMPRESSED step whose weights a graph has moved, and take its residuals over."""
        self.clock.steps += 1
        for bucket in self.buckets:
            bucket.exchange.commit()
            weights, replicas = self.weights.to_move(bucket)
            torch.autograd.graph.increment_version([one for one in weights + replicas if one is not None])
            self.weights.moved(bucket)
        self.weights.end_step(True, False, self.clock.steps)
        self.prepare()

    def prepare(self) -> None:
        """Have every bucket ready for the kind of step that comes next, before its first gradient arrives."""
        self.send = next_send(self.algorithm, self.clock)
        for bucket in self.buckets:
            bucket.prepare(self.send)

    def _exact_step(self, absent: frozenset[int], loss_scale: float, clip: float) -> None:
        groups = self.weights.members(absent)
        for members in groups:
            if loss_scale != 1.0:
                torch._foreach_div_(members.averages, loss_scale)
            if clip < 1.0:
                torch._foreach_mul_(members.averages, clip)
        if self.local is not None:
            self.weights.absorb_owned(self.local, self.clock, groups, absent)
        self.algorithm.exact(groups, self.clock, self._agreement(_settings(groups)))
        if self.local is not None:
            self.weights.settle(self.local, self.clock, groups, absent)
        self._move(groups)
        if self.local is not None and self.local.published:
            for bucket in self.buckets:
                bucket.find_zero_variance()

    def _compressed_step(self, send: Send) -> None:
        if self.algorithm.form.update is not None:
            for bucket in self.buckets:
                bucket.receive_and_move(*self.weights.to_move(bucket))
                self.weights.moved(bucket)
            return
        if send is Send.SYNC:
            self._count_local()
        for bucket in self.buckets:
            bucket.receive()
        everyone = self.weights.members()
        slots = (slot for bucket in self.buckets for slot in bucket.layout.slots)
        all_train = all(self._parameters.parameters[slot.parameter].requires_grad for slot in slots)
        trained = everyone if all_train else self.weights.members(trained=True)
        self.algorithm.compressed(everyone, self.clock, self._agreement(_settings(trained)))
        self._move(trained)
        if send is Send.SYNC:
            self._end_sync()

    def _local_step(self) -> None:
        assert self.local is not None
        finite = self._own_is_finite()
        self._count_local()
        trained = self.weights.members(trained=True)
        if any(members.settings.weight_decay for members in trained):
            self._change(self.local.decay_common, trained)
        self.local.absorb_local(self.weights.members(), self.clock, finite)
        self.show_own_weights(True)

    def _move(self, groups: Sequence[Members]) -> None:
        self._change(self.algorithm.move, groups)
        self.weights.show_common()

    def _change(self, change: Callable[[Sequence[Members], Clock], None], groups: Sequence[Members]) -> None:
        self.weights.change(lambda members: change(members, self.clock), groups, self.clock.steps)

    def _count_local(self) -> None:
        numbers = {self._parameters.group_number(slot.parameter) for one in self.buckets for slot in one.layout.slots}
        assert self.local is not None
        self.local.count_local({one: self._parameters.settings(one) for one in sorted(numbers)}, self.clock)

    def _own_is_finite(self) -> bool:
        """Whether this rank can take its local step; warns where it cannot."""
        found = [torch.as_tensor(bucket.own_is_finite()) for bucket in self.buckets]
        if all(map(bool, read_together(found))):
            return True
        self.left_out_steps += 1
        warnings.warn(
            f"local step {self.clock.steps} adds nothing on rank {self._comm.rank}: a gradient was NaN or infinite "
            "there. The other ranks go on",
            RuntimeWarning,
            stacklevel=8,
        )
        return False

    # Between steps

    @torch.no_grad()
    def meet(self, step: int) -> None:
        """Meet the other ranks now, as a sync would, without a gradient of its own; `step` is for the packets' headers.
        Collective unless the ranks are in sync."""
        if self.local is None or self.local.in_sync:
            return
        self.take_over_written()
        for bucket in self.buckets:
            exchange = bucket.compressed
            for slot in bucket.layout.slots:
                self.local.sync_payload(bucket.contribution(slot), exchange.payload[place_of(slot)])
            exchange.start(step)
            exchange.advance()
            exchange.wait()
            exchange.outcome()
        for bucket in self.buckets:
            bucket.prepare(Send.SYNC)
            bucket.receive()
        self.algorithm.compressed(self.weights.members(), self.clock, self._agreement({}))
        self._change(self.local.move_synced, self.weights.members(trained=True))
        self._end_sync()
        self.prepare()

    @torch.no_grad()
    def show_own_weights(self, own: bool) -> None:
        """Show this rank's own weights, or those of the last sync."""
        if self.local is None or not self.shows_own_weights:
            return
        if not own:
            self.weights.show_common()
        for bucket in self.buckets if own else ():
            for slot in slots_with_elements(bucket):
                if self._parameters.parameters[slot.parameter].requires_grad:
                    common = self.weights.common(bucket, slot)
                    own_weight = self.local.own_weight(common, bucket.contribution(slot))
                    self.weights.show(bucket, slot, own_weight)

    def begin_frozen_state(self) -> None:
        """Have the frozen stage's state, to be filled."""
        for bucket in self.buckets:
            bucket.rename_state()
        self._changed()

    def restore(self) -> None:
        """Go on with what a checkpoint put into the state and the clock."""
        for bucket in self.buckets:
            bucket.hold_masked(self.algorithm.form.denominators, math.inf)
            bucket.find_zero_variance()
        if self.shows_own_weights:
            self.weights.stand_apart()
            self.show_own_weights(True)
        self.prepare()

    def _end_sync(self) -> None:
        assert self.local is not None
        self.weights.show_common()
        self.local.end_sync()

    def drop_local_progress(self) -> None:
        """Take the weights that the parameters show for those of a sync."""
        if self.local is None:
            return
        self.local.end_sync()
        begun = [name for name in self.local.own_state if self.algorithm.frozen_state[name] is None]
        for bucket in self.buckets:
            for name in bucket.state.keys() & begun:
                bucket.state[name].zero_()

    def take_over_written(self) -> None:
        """Take over weights that other code wrote into the parameters.

        Raises RuntimeError where those were this rank's own: what was written need not be the same on other ranks.
        """
        for bucket, slot in self.weights.take_over_written(self.in_sync):
            assert self.local is not None
            own = self.local.own_weight(self.weights.common(bucket, slot), bucket.contribution(slot))
            if not self.weights.holds(bucket, slot, own):
                raise RuntimeError(
                    f"{self._parameters.describe(slot.parameter)} was changed between local steps, in which ranks hold "
                    "weights of their own: call optimizer.synchronize_weights() on every rank before you change "
                    "weights, or load the model before the optimizer"
                )

    # The freeze

    def _decide_on_freeze(self, decision: object) -> None:
        froze = False
        if self.rule is not None and not self.clock.frozen:
            froze = self.rule.reached(self.clock.steps, self._rates(), self._variance_norms)
            if self.rule.looks_at(self.clock.steps):
                check_same_freeze(self._comm, froze, self._rates())
            if froze:
                self._freeze()
        if self.local is not None and (froze or decision != self.local.decision()):
            check_same_freeze(self._comm, self.clock.frozen, self._rates())

    def _freeze(self) -> None:
        for bucket in self.buckets:
            bucket.hold_masked(variance_of(self.algorithm), 0.0)
        self.begin_frozen_state()
        groups = self.weights.members()

        def precondition() -> None:
            for bucket in self.buckets:
                bucket.precondition()

        self.algorithm.freeze(groups, self.clock, self._agreement(_settings(groups)), precondition)
        self.clock.frozen_at = self.clock.steps
        for bucket in self.buckets:
            bucket.begin_compression()
        if self.local is not None:
            self.weights.stand_apart()

    def _variance_norms(self) -> list[float]:
        """Of each parameter, by their numbers. The host waits once."""
        norms: dict[int, torch.Tensor] = {}
        for members in self.weights.members():
            for parameter, variance in zip(members.parameters, members[variance_of(self.algorithm) or ""], strict=True):
                norm = variance_norm(variance, members.settings, self.clock.steps)
                norms[parameter] = norms[parameter] + norm if parameter in norms else norm
        return [float(one) for one in read_together([norms[parameter] for parameter in sorted(norms)])]


def _settings(groups: Sequence[Members]) -> dict[int, AdamSettings]:
    return {parameter: members.settings for members in groups for parameter in members.parameters}
