"""The parameters that entered the optimizer together: they warm up together, freeze together, and turn what the ranks
exchanged into steps of an algorithm, wherever their state lives."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import check_same_on_every_rank
from thinwire.compress.codecs import all_finite
from thinwire.compress.exchange import bring_headers
from thinwire.compress.kernels.loading import wait_for_kernels
from thinwire.compress.packet import Flags, Outcome, SettingsError, read_together
from thinwire.optim.algorithm import Agreement, Algorithm, FreezeRule, LocalSteps, variance_norm
from thinwire.optim.bucket import Bucket, may_clip, place_of
from thinwire.optim.step import Clock, Members, Peak, Send, Step
from thinwire.optim.storage import Change, Storage, slots_with_elements
from thinwire.zero.rank_checks import clip_of_norm


class FreezeGroup:
    """Buckets with one step count and one freeze; a parameter group added later begins its own.

    `send`: what the step in flight, or the next one, sends. `left_out_steps`: local steps to which this rank added
    nothing, as its gradient was not finite.
    """

    def __init__(self, storage: Storage, rule: FreezeRule | None) -> None:
        self.storage, self.buckets = storage, storage.buckets
        self.rule, self.peak = rule, Peak()
        self.algorithm, self.clock = storage.shared.algorithm, storage.shared.clock
        self.local = self.algorithm if isinstance(self.algorithm, LocalSteps) else None
        self.left_out_steps = 0
        self._comm = storage.shared.wire.decisions
        self._parameters = storage.shared.parameters
        self._count = len(self._parameters.parameters)  # now: later ones are in later groups
        self.prepare()

    @property
    def shows_own_weights(self) -> bool:
        """Whether parameters may show other weights than those that all ranks have in common."""
        return self.local is not None and self.clock.frozen_at is not None

    @property
    def in_sync(self) -> bool:
        """Whether all ranks hold the same weights."""
        return self.local is None or self.local.in_sync

    def prepare(self) -> None:
        """Have every bucket ready for the kind of step that comes next, before its first gradient arrives."""
        self.send = next_send(self.algorithm, self.clock)
        for bucket in self.buckets:
            bucket.prepare(self.send)

    # One step

    def update(self, absent: frozenset[int], loss_scale: float, clip: float) -> None:
        """Apply what the exchanges of this step brought; `absent` parameters had no gradient on any rank. Collective.

        Averages of an EXACT step have been received already.
        """
        send, decision = self.send, None if self.local is None else self.local.decision()
        self.take_over_written()
        self.clock.steps += 1
        if send is Send.EXACT:
            self._exact_step(absent, loss_scale, clip)
        elif send is Send.LOCAL:
            self._local_step()
        elif self.algorithm.form.update is not None:
            for bucket in self.buckets:
                self.storage.receive_and_move(bucket)
        else:
            self._compressed_step(send)
        self._decide_on_freeze(decision)
        self.prepare()

    def _exact_step(self, absent: frozenset[int], loss_scale: float, clip: float) -> None:
        groups, agree = self.storage.members(absent), self._agreement(absent)
        for members in groups:
            if loss_scale != 1.0:
                torch._foreach_div_(members.averages, loss_scale)
            if clip < 1.0:
                torch._foreach_mul_(members.averages, clip)
        if self.local is None:
            self.algorithm.exact(groups, self.clock, agree)
        else:
            self.storage.absorb(self.local, groups, absent, agree)
        self._change(self.algorithm.move, groups)
        if self.local is not None and self.local.published:
            for bucket in self.buckets:
                bucket.find_zero_variance()

    def _compressed_step(self, send: Send) -> None:
        if send is Send.SYNC:
            self._count_local()
        for bucket in self.buckets:
            bucket.receive()
        everyone = self.storage.members()
        every, slots = self._parameters.parameters, (slot for bucket in self.buckets for slot in bucket.layout.slots)
        all_train = all(every[slot.parameter].requires_grad for slot in slots)
        trained = everyone if all_train else self.storage.members(trained=True)
        self.algorithm.compressed(everyone, self.clock, self._agreement(trained=True))
        self._change(self.algorithm.move, trained)
        if send is Send.SYNC:
            self._end_sync()

    def _local_step(self) -> None:
        assert self.local is not None
        finite = self._own_is_finite()
        self._count_local()
        trained = self.storage.members(trained=True)
        if any(members.settings.weight_decay for members in trained):
            self.storage.change(self.local.decay_common, trained)
        self.local.absorb_local(self.storage.members(), self.clock, finite)
        self.show_own_weights(True)

    def _change(self, change: Change, groups: Sequence[Members]) -> None:
        self.storage.change(change, groups)
        self.storage.show_common()

    def _count_local(self) -> None:
        numbers = {self._parameters.group_of[slot.parameter] for one in self.buckets for slot in one.layout.slots}
        assert self.local is not None
        self.local.count_local({one: self._parameters.settings(one) for one in sorted(numbers)}, self.clock)

    def _own_is_finite(self) -> bool:
        """Whether this rank can take its local step; warns where it cannot."""
        found = [torch.as_tensor(all_finite(bucket.exchange.payload)) for bucket in self.buckets]
        if self._parameters.everywhere(all(map(bool, read_together(found)))):
            return True
        self.left_out_steps += 1
        warnings.warn(
            f"local step {self.clock.steps} adds nothing on rank {self._comm.global_ranks[self._comm.rank]}: a "
            "gradient was NaN or infinite there. The other ranks go on",
            RuntimeWarning,
            stacklevel=8,
        )
        return False

    def _agreement(self, absent: Collection[int] = (), *, trained: bool = False) -> Agreement:
        parameters = self._parameters

        def taking_part() -> list[int]:
            slots = [slot for bucket in self.buckets for slot in slots_with_elements(bucket, absent)]
            every, numbers = parameters.parameters, [slot.parameter for slot in slots]
            numbers = [one for one in numbers if every[one].requires_grad or not trained]
            # In the order of the members, which numbers over all of them are added up in.
            return sorted(numbers) if self.storage.shards else sorted(numbers, key=parameters.group_of.__getitem__)

        return Agreement(self._comm, parameters, self._count, taking_part, self.storage.shards)

    # Between steps

    @torch.no_grad()
    def meet(self, step: int, commit: Callable[[], object] = lambda: None, *, arrived: bool = False) -> None:
        """Meet the other ranks now, as a sync would, without a gradient of its own; `step` is for the packets' headers.
        `commit`: called once all is here, none of it taken; `arrived`: it is. Collective unless ranks are in sync."""
        if self.local is None or self.local.in_sync:
            return
        if not arrived:
            self.take_over_written()
            for bucket in self.buckets:
                bucket.sent = exchange = bucket.compressed
                for slot in bucket.layout.slots:
                    self.local.sync_payload(bucket.contribution(slot), exchange.payload[place_of(slot)])
                exchange.start(step)
                exchange.advance()
                exchange.wait()
                exchange.outcome()
            commit()
        for bucket in self.buckets:
            bucket.prepare(Send.SYNC)
            bucket.receive()
            bucket.sent = None
        self.algorithm.compressed(self.storage.members(), self.clock, self._agreement())
        self.storage.change(self.local.move_synced, self.storage.members(trained=True))
        self._end_sync()
        self.prepare()

    @torch.no_grad()
    def show_own_weights(self, own: bool) -> None:
        """Show this rank's own weights, or those of the last sync."""
        if self.local is None or not self.shows_own_weights:
            return
        if not own:
            self.storage.show_common()
        for bucket in self.buckets if own else ():
            for slot in slots_with_elements(bucket):
                if self._parameters.parameters[slot.parameter].requires_grad:
                    common = self.storage.common(bucket, slot)
                    own_weight = self.local.own_weight(common, bucket.contribution(slot))
                    self.storage.show(bucket, slot, own_weight)

    def restore(self) -> None:
        """Go on with what a checkpoint put into the state and the clock."""
        self.storage.hold_masked(self.algorithm.form.denominators, math.inf)
        self.storage.begin_compression(anew=False)
        if self.shows_own_weights:
            self.storage.keep_common()
            self.show_own_weights(True)
        self.prepare()

    def _end_sync(self) -> None:
        assert self.local is not None
        self.storage.show_common()
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
        for bucket, slot in self.storage.take_over_written(self.in_sync):
            assert self.local is not None
            own = self.local.own_weight(self.storage.common(bucket, slot), bucket.contribution(slot))
            if not self.storage.holds(bucket, slot, own):
                raise RuntimeError(
                    f"{self._parameters.describe(slot.parameter)} was changed between local steps, in which ranks hold "
                    "weights of their own: call optimizer.synchronize_weights() on every rank before you change "
                    "weights, or load the model before the optimizer"
                )

    # What may be read and written

    def check_plain(self, kind: str) -> None:
        """Raise RuntimeError where state of this kind has another meaning, or other values on every rank, by now."""
        if self.clock.frozen and self.algorithm.frozen_state:
            raise RuntimeError(
                f"the optimizer has been frozen since step {self.clock.frozen_at}: what it keeps instead of {kind!r} "
                "is what compressed steps send and move by, no moment of the gradients. Read and set optimizer state "
                "before the freeze"
            )

    def check_may_write(self, kind: str) -> None:
        """Raise RuntimeError where state of this kind cannot be written without other state that follows from it."""
        self.check_plain(kind)
        if self.local is not None and self.local.published:
            raise RuntimeError(
                f"{kind!r} of this optimizer cannot be set: it keeps {', '.join(self.local.published)} beside it, "
                "found at an earlier step, which would not follow. Set weights, or load a checkpoint"
            )

    def check_averages(self) -> None:
        """Raise RuntimeError unless the step in flight averages gradients."""
        if self.send is not Send.EXACT or any(bucket.layout.whole for bucket in self.buckets):
            raise RuntimeError(
                "there is no averaged gradient: the optimizer's steps are compressed by now, and ranks send momenta "
                "instead of gradients. `.grad` holds this rank's own"
            )

    # The freeze

    def _decide_on_freeze(self, decision: object) -> None:
        froze = False
        if self.rule is not None and self.clock.frozen_at is None:
            rates = self._parameters.rates()
            if rates != self.peak.rates:
                self.peak.take(self.clock.steps, rates)
            froze = self.rule.reached(self.clock.steps, rates, self._variance_norms)
            if self.rule.looks_at(self.clock.steps):
                froze = self._parameters.everywhere(froze)
                check_same_freeze(self._comm, froze, rates)
            if froze:
                self._freeze()
        elif self.rule is not None and self.clock.steps - 1 == self.clock.frozen_at:
            self._warn_of_rising_rates()
        if self.local is not None and (froze or decision != self.local.decision()):
            check_same_freeze(self._comm, self.clock.frozen, self._parameters.rates())

    def _warn_of_rising_rates(self) -> None:
        """Warn if the first frozen step has a higher rate than all before it."""
        rates = self._parameters.rates()
        if self._comm.rank or not self.peak.raised_by(rates):
            return
        option = "freeze_step" if self.local is None else "var_freeze_step"
        warnings.warn(
            f"the variance was frozen after step {self.clock.frozen_at}, and the learning rate still rises, from "
            f"{max(self.peak.rates):g} to {max(rates):g}: frozen within a learning-rate warmup, most models learn "
            f"little. Give {option}= a step after the rate's highest",
            RuntimeWarning,
            stacklevel=9,
        )

    def _freeze(self) -> None:
        storage = self.storage
        wait_for_kernels(self._parameters.parameters[0].device.type)
        storage.hold_masked(_variance_of(self.algorithm), 0.0)
        storage.begin_frozen_state()
        groups = storage.members(state_only=True)
        self.algorithm.freeze(groups, self.clock, self._agreement(), storage.precondition)
        self.clock.frozen_at = self.clock.steps
        storage.begin_compression()
        if self.local is not None:
            storage.keep_common()

    def _variance_norms(self) -> list[float]:
        """Of each parameter with elements, by their numbers. The host waits once. Collective if state is sharded."""
        every, replica = self._parameters.parameters, self._parameters.replica
        norms: dict[int, Tensor] = {}
        for members in self.storage.members(state_only=True):
            variances = members[_variance_of(self.algorithm) or ""]
            for parameter, variance in zip(members.parameters, variances, strict=True):
                norm = variance_norm(variance, members.settings, self.clock.steps)
                norms[parameter] = norms[parameter] + norm if parameter in norms else norm
        if self.storage.shards or replica is not None:
            together = torch.zeros(len(every), dtype=torch.float64, device=every[0].device)
            for parameter, norm in norms.items():
                together[parameter] = norm
            if self.storage.shards:
                self._comm.all_reduce(together)
            return self._parameters.of_replica(together)
        return [float(one) for one in read_together([norms[parameter] for parameter in sorted(norms)])]


def sends_by_scale(group: FreezeGroup) -> bool:
    """Whether what the step in flight sends depends on the loss scale that gradients are taken to have."""
    return group.send is not Send.EXACT or any(bucket.rounds_averages for bucket in group.buckets)


def next_send(algorithm: Algorithm, clock: Clock) -> Send:
    """What the step after `clock.steps` sends."""
    if isinstance(algorithm, LocalSteps):
        return algorithm.next_send(clock)
    return Send.EXACT if clock.frozen_at is None else Send.COMPRESSED


def new_clock(algorithm: Algorithm) -> Clock:
    """The clock of parameters that enter now."""
    return Clock(frozen_at=None if algorithm.freezes else 0)


def _variance_of(algorithm: Algorithm) -> str | None:
    """The name of the state that becomes the form's denominators at the freeze; None if none does."""
    denominators = algorithm.form.denominators
    variance = algorithm.frozen_state.get(denominators or "")
    return None if variance == denominators else variance


def check_same_freeze(comm: Communicator, reached: bool, learning_rates: Sequence[float]) -> None:
    """Raise ValueError on every rank unless all come to the same decision from the same learning rates. Collective."""
    answers = comm.all_gather_bytes(json.dumps([reached, list(learning_rates)]).encode(), "decide on the freeze")
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            theirs, first = json.loads(answer), json.loads(answers[0])
            raise ValueError(
                f"rank {comm.global_ranks[rank]} has learning rates {theirs[1]} and "
                f"{'freezes' if theirs[0] else 'does not freeze'}, rank {comm.global_ranks[0]} has "
                f"{first[1]} and {'freezes' if first[0] else 'does not'}: every rank must use the same "
                "learning rates. A scheduler that looks at the loss must look at the average over the ranks"
            )


def clip_local_step(step: Step, buckets: Sequence[Bucket]) -> None:
    """Shrink what this rank's gradient adds to a LOCAL step of `buckets` to the step's `max_norm`."""
    assert step.sketch is not None
    clip = clip_of_norm(step.max_norm, step.sketch.own_norm() / step.loss_scale)
    for bucket in buckets if may_clip(clip) else ():
        payload = bucket.exchange.payload
        torch.lerp(bucket.payload_of_zeros(), payload, clip, out=payload)


def read_outcomes(step: Step, comm: Communicator, buckets: Sequence[Bucket]) -> Outcome:
    """Copy the headers of `buckets` to the host, with `step`'s norm and clip if a sketch found them, in one wait;
    return what they said together.

    Raises ValueError, on every rank, that names the first with other hyperparameters; collective only then.
    """
    sketched = [] if step.sketched is None else [step.sketched, torch.as_tensor(step.clip, dtype=torch.float64)]
    finite, incomplete, unplaced, calls = True, False, False, Flags.NONE
    sent = [(bucket, bucket.sent) for bucket in buckets if bucket.sent is not None]
    try:
        if found := bring_headers([exchange for _, exchange in sent], sketched):
            step.norm, step.clip = map(float, found)
            step.sketched = None
        for bucket, exchange in sent:
            outcome = exchange.outcome()
            average = bucket.average() if bucket.rewritten else None
            finite &= outcome.finite if average is None else bool(all_finite(average))
            incomplete |= outcome.incomplete
            unplaced, calls = unplaced | outcome.unplaced, calls | outcome.calls
    except SettingsError:
        check_same_on_every_rank(comm, [], step.groups, {})
        raise
    return Outcome(finite, incomplete, unplaced, calls)
