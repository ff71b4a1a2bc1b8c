"""The parameters that entered 0/1 Adam together: exact and compressed gradients while the variance moves, then local
steps between syncs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.nodes import NodeLinks
from thinwire.compress.codecs import Codec
from thinwire.compress.hierarchical_exchange import make_exchange
from thinwire.optim import options as agreement
from thinwire.optim.formulas import AdamSettings, bound_updates, frozen_update, track_moments
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.local_progress import LocalProgress
from thinwire.optim.replicated.freeze_group import AdamBucket, Cohort, Compressed
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.synchronizer import Round
from thinwire.optim.zero_one.bucket import ZeroOneBucket
from thinwire.optim.zero_one.schedule import StepKind, ZeroOneSchedule
from thinwire.zero import BucketLayout, Slot

__all__ = ["ZeroOneCohort"]


class ZeroOneCohort(Cohort):
    """Buckets with one step count, one variance and one schedule, as in Cohort.

    The master weights, once the variance is frozen, are those of the last sync, the same bits on every rank. What a
    parameter shows between syncs is its master less Σγ times the bucket's mean momentum, over √v̂ + ε: this rank's own.
    In the paper's words, u = -Σγ · mean. Keeping the mean and Σγ apart makes residuals momenta, which a learning rate
    that has changed since does not rescale.

    `variance_updates`: how often v was updated. `left_out_steps`: local steps to which this rank added nothing, as its
    gradient was not finite.
    """

    def __init__(
        self,
        table: ParameterTable,
        comm: Communicator,
        rule: FreezeRule,
        warmup_codec: Codec,
        codec: Codec,
        compressed: Compressed,
        layouts: Sequence[BucketLayout],
        first_index: int,
        links: NodeLinks | None,
        schedule: ZeroOneSchedule,
    ) -> None:
        """See Cohort."""
        super().__init__(table, comm, rule, warmup_codec, codec, compressed, layouts, first_index, links)
        self.variance_updates = 0
        self._progress = LocalProgress()
        self.left_out_steps = 0
        self._schedule = schedule
        self._settings_sent: dict[int, AdamSettings] = {}
        self._prepare()

    @property
    def in_sync(self) -> bool:
        """Whether every rank holds the same weights."""
        return not self._progress

    def is_outdated(self) -> bool:
        """Whether a parameter group's hyperparameters changed after gradients of this step were taken in."""
        groups = self._table.groups()
        return any(sent != AdamSettings.of_group(groups[number]) for number, sent in self._settings_sent.items())

    # What a step sends

    @torch.no_grad()
    def fill(self, bucket: AdamBucket, slot: Slot, gradient: Tensor | None, loss_scale: float | None) -> None:
        """Write into the payload what a parameter adds to this step; None counts as zero.

        The gradient; in a compressed step where updates are compressed, the new momentum divided by √v̂ + ε. Once the
        variance is frozen the new momentum, and in a sync its average with those of the local steps before.
        """
        assert isinstance(bucket, ZeroOneBucket)
        super().fill(bucket, slot, gradient, loss_scale)
        place = slice(slot.offset, slot.offset + slot.numel)
        payload = bucket.exchange.payload[place]
        kind = self._next_kind()
        if self.frozen_at is None and loss_scale is not None:
            payload.div_(loss_scale)
        if kind is StepKind.EXACT:
            return
        settings = AdamSettings.of_group(self._table.group(slot.parameter))
        if kind is StepKind.COMPRESSED:
            if self._compressed == "update":
                torch.lerp(bucket.momentum[place], payload, 1 - settings.beta1, out=payload)
                payload.div_(bucket.denominators[place])
            elif bucket.still is not None:
                payload.mul_(bucket.still[place].logical_not())
        if self._compressed == "update":
            bound_updates(payload, settings, self._comm.size)
        if kind is StepKind.SYNC:
            number = self._table.group_number(slot.parameter)
            self._settings_sent.setdefault(number, settings)
            share = self._progress.share(number, settings, self.steps + 1)
            torch.lerp(bucket.mean_momentum[place], payload, share, out=payload)

    def update(self, outcome: Round, loss_scale: float | None) -> None:
        """See Cohort."""
        interval = self._schedule.variance_interval(self.variance_updates)
        super().update(outcome, loss_scale)
        if self.frozen_at == self.steps or interval != self._schedule.variance_interval(self.variance_updates):
            rates = [float(group["lr"]) for group in self._table.groups()]
            agreement.check_same_freeze(self._comm, self.frozen_at is not None, rates)
        self._prepare()

    @torch.no_grad()
    def synchronize(self, step: int) -> None:
        """Meet the other ranks now, as a sync would, without a gradient of its own; `step` is for the packets' headers.
        Collective unless the ranks are in sync."""
        if self.in_sync:
            return
        self._notice_changed_weights()
        for bucket in self._own_buckets():
            bucket.compressed.payload.copy_(bucket.mean_momentum)
            bucket.compressed.start(step)
            bucket.compressed.advance()
            bucket.compressed.wait()
            bucket.compressed.outcome()
        self._take_averages()

    # The variance moves

    def _warmup_step(self, outcome: Round, loss_scale: float | None) -> None:
        del loss_scale  # fill has divided by it
        if self._schedule.kind(self.steps, self.variance_updates, None) is StepKind.EXACT:
            self._exact_step(outcome)
        else:
            self._compressed_step()

    def _exact_step(self, outcome: Round) -> None:
        self.variance_updates += 1
        for settings, present, gradients in self._read_gradients(outcome, None):
            momenta = [self._view(bucket.momentum, slot) for bucket, slot in present]
            variances = [self._view(bucket.second, slot) for bucket, slot in present]
            denominators = [self._table.state(slot.parameter)["denominator"] for _, slot in present]
            track_moments(gradients, momenta, variances, settings)
            torch._foreach_copy_(denominators, variances)
            self._turn_into_denominators(denominators, present, settings, self.variance_updates)
            weights = [self._table.weight(slot.parameter) for _, slot in present]
            frozen_update(weights, momenta, denominators, settings, self.steps)
            for _, slot in present:
                self._table.publish(slot.parameter)
        for bucket in self._own_buckets():
            bucket.find_still()

    def _compressed_step(self) -> None:
        for bucket in self._own_buckets():
            bucket.exchange.commit()
            average = bucket.exchange.payload
            bucket.exchange.read(average)
            if self._compressed == "update":
                average.mul_(bucket.denominators)
            if bucket.still is not None:
                average.masked_fill_(bucket.still, 0.0)
                bucket.exchange.hold_zero(bucket.still)
        for settings, everyone in self._by_group():
            members = [(bucket, slot) for bucket, slot in everyone if self._trains(slot)]
            momenta = [self._view(bucket.momentum, slot) for bucket, slot in members]
            averages = [self._view(bucket.exchange.payload, slot) for bucket, slot in members]
            denominators = [self._table.state(slot.parameter)["denominator"] for _, slot in members]
            if self._compressed == "update":
                torch._foreach_copy_(momenta, averages)
            else:
                torch._foreach_lerp_(momenta, averages, 1 - settings.beta1)
            weights = [self._table.weight(slot.parameter) for _, slot in members]
            frozen_update(weights, momenta, denominators, settings, self.steps)
            for _, slot in members:
                self._table.publish(slot.parameter)

    # The variance is frozen

    def _frozen_step(self, unsent: frozenset[int]) -> None:
        assert not unsent, "ZeroOneAdam leaves nothing out"
        self._notice_changed_weights()
        kind = self._schedule.kind(self.steps, self.variance_updates, self.frozen_at)
        finite = kind is StepKind.SYNC or self._is_finite()
        for settings, members in self._by_group():
            number = self._table.group_number(members[0][1].parameter)
            share = self._progress.share(number, settings, self.steps)
            self._progress.advance(number, settings, self.steps)
            if settings.weight_decay:
                weights = [self._table.weight(slot.parameter) for _, slot in members if self._trains(slot)]
                torch._foreach_mul_(weights, 1 - settings.lr * settings.weight_decay)
            if kind is StepKind.LOCAL:
                for bucket, slot in members:
                    self._go_on_alone(bucket, slot, share, finite)
        if kind is StepKind.SYNC:
            self._take_averages()

    def _go_on_alone(self, bucket: AdamBucket, slot: Slot, share: float, finite: bool) -> None:
        """Take the payload for the new momentum, and move what the parameter shows."""
        assert isinstance(bucket, ZeroOneBucket)
        place = slice(slot.offset, slot.offset + slot.numel)
        mean = bucket.mean_momentum[place]
        if finite:
            bucket.momentum[place].copy_(bucket.exchange.payload[place])
            mean.lerp_(bucket.momentum[place], share)
        else:
            mean.mul_(1 - share)
        if self._trains(slot):
            self._table.show(slot.parameter, self._own_weight(bucket, slot))

    def _take_averages(self) -> None:
        """End a sync: every rank's momentum becomes the average, and the masters, shown again, move by it."""
        for bucket in self._own_buckets():
            bucket.compressed.commit()
            bucket.compressed.read(bucket.momentum)
            bucket.hold_still(bucket.momentum)
            bucket.mean_momentum.zero_()
        for _, everyone in self._by_group():
            distance = self._progress.distance(self._table.group_number(everyone[0][1].parameter))
            members = [(bucket, slot) for bucket, slot in everyone if self._trains(slot)]
            weights = [self._table.weight(slot.parameter) for _, slot in members]
            momenta = [self._view(bucket.momentum, slot) for bucket, slot in members]
            if self._compressed == "update":
                torch._foreach_add_(weights, momenta, alpha=-distance)
            else:
                denominators = [self._view(bucket.second, slot) for bucket, slot in members]
                torch._foreach_addcdiv_(weights, momenta, denominators, -distance)
            for _, slot in everyone:
                self._table.publish(slot.parameter)
        self._progress.reset()
        self._settings_sent = {}

    def _own_weight(self, bucket: ZeroOneBucket, slot: Slot) -> Tensor:
        """What a parameter shows between syncs, fp32, in the parameter's shape."""
        distance = self._progress.distance(self._table.group_number(slot.parameter))
        moved = self._view(bucket.mean_momentum, slot) * -distance
        if self._compressed == "momentum":
            moved.div_(self._view(bucket.second, slot))
        return moved.add_(self._master(slot))

    def _is_finite(self) -> bool:
        """Whether this rank can take its local step; warns where it cannot."""
        if all(bool(torch.isfinite(bucket.exchange.payload.abs().max())) for bucket in self.buckets):
            return True
        self.left_out_steps += 1
        warnings.warn(
            f"local step {self.steps} adds nothing on rank {self._comm.rank}: a gradient was NaN or infinite there. "
            "The other ranks go on",
            RuntimeWarning,
            stacklevel=6,
        )
        return False

    def _notice_changed_weights(self) -> None:
        """Take over weights that somebody wrote into the parameters.

        Raises RuntimeError where those were this rank's own: what was written need not be the same on other ranks.
        """
        for bucket in self._own_buckets():
            for slot in bucket.layout.slots:
                if self._table.changed(slot.parameter):
                    self._take_over(bucket, slot)

    def _take_over(self, bucket: ZeroOneBucket, slot: Slot) -> None:
        parameter = self._table.parameters[slot.parameter]
        if self.in_sync:
            self._table.make_master(slot.parameter)
        elif torch.equal(parameter, self._own_weight(bucket, slot).to(parameter.dtype)):
            self._table.accept(slot.parameter)
        else:
            raise RuntimeError(
                f"{self._table.name(slot.parameter)} was changed between local steps, in which ranks hold weights of "
                "their own: call optimizer.synchronize_weights() on every rank before you change weights, or load the "
                "model before the optimizer"
            )

    # Parts

    def name_frozen_state(self) -> None:
        """See Cohort; there are also `mean_momentum`, and the weights of the last sync as `master`."""
        for bucket in self._own_buckets():
            bucket.begin_local_steps()
            for slot in bucket.layout.slots:
                state = self._table.state(slot.parameter)
                del state["exp_avg_sq"]
                state["mean_momentum"] = self._view(bucket.mean_momentum, slot)

    def own_state(self) -> dict[str, Any]:
        """See Cohort."""
        return {
            "variance_updates": self.variance_updates,
            "progress": self._progress.state(),
            "left_out_steps": self.left_out_steps,
        }

    def load_own_state(self, saved: dict[str, Any]) -> None:
        """See Cohort."""
        self.variance_updates = saved["variance_updates"]
        self._progress.load(saved["progress"])
        self.left_out_steps = saved["left_out_steps"]

    @torch.no_grad()
    def restore(self, frozen_at: int | None) -> None:
        """See Cohort; parameters show this rank's own weights again."""
        super().restore(frozen_at)
        for bucket in self._own_buckets():
            bucket.find_still()
            if frozen_at is not None:
                for slot in bucket.layout.slots:
                    self._table.keep_apart(slot.parameter)
                    self._table.show(slot.parameter, self._own_weight(bucket, slot))
        self._prepare()

    def _freeze(self) -> None:
        self.name_frozen_state()
        for bucket in self.buckets:
            if self._compressed == "update":
                bucket.momentum.div_(bucket.second)
            self._begin_compression(bucket)
            for slot in bucket.layout.slots:
                self._table.keep_apart(slot.parameter)
        self.frozen_at = self.steps

    def _begin_compression(self, bucket: AdamBucket) -> None:
        super()._begin_compression(bucket)
        assert isinstance(bucket, ZeroOneBucket)
        bucket.compressed = bucket.exchange

    def _make_bucket(self, index: int, layout: BucketLayout) -> ZeroOneBucket:
        bucket = super()._make_bucket(index, layout)
        compressed = make_exchange(
            self._comm, self._links, layout.numel, self._codec, bucket=index, device=bucket.momentum.device
        )
        denominators = torch.full_like(bucket.momentum, float("inf"))
        for slot in layout.slots:
            self._table.state(slot.parameter)["denominator"] = self._view(denominators, slot)
        return ZeroOneBucket(**vars(bucket), compressed=compressed, denominators=denominators)

    def _own_buckets(self) -> list[ZeroOneBucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, ZeroOneBucket)]

    def _next_kind(self) -> StepKind:
        return self._schedule.kind(self.steps + 1, self.variance_updates, self.frozen_at)

    def _prepare(self) -> None:
        """Have every bucket ready for the kind of step that comes next, before its first gradient arrives."""
        kind = self._next_kind()
        for bucket in self._own_buckets():
            bucket.quiet = kind is StepKind.LOCAL
            if kind is not StepKind.EXACT:
                bucket.exchange = bucket.compressed
            elif bucket.exchange is bucket.compressed:
                bucket.exchange = self._exact_exchange(bucket.index, bucket.layout, bucket.momentum.device)

    def _master(self, slot: Slot) -> Tensor:
        master: Tensor = self._table.state(slot.parameter)["master"]
        return master

    def _trains(self, slot: Slot) -> bool:
        return self._table.parameters[slot.parameter].requires_grad
