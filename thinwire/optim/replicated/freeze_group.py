"""The parameters that entered the optimizer together: they warm up together, freeze together, and turn what the ranks
exchanged into a step of Adam."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.nodes import NodeLinks
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Exchange
from thinwire.compress.hierarchical_exchange import make_exchange
from thinwire.optim import options as agreement
from thinwire.optim.formulas import (
    AdamSettings,
    apply_updates,
    frozen_update,
    raise_smallest,
    to_denominators,
    variance_norm,
    warmup_update,
)
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.optim.replicated.synchronizer import Bucket, Round
from thinwire.zero import BucketLayout, Slot

__all__ = ["AdamBucket", "Cohort", "Compressed"]

Compressed = Literal["update", "momentum"]


@dataclass
class AdamBucket(Bucket):
    """A bucket with Adam's state: flat fp32 [padded_numel] each, of which every parameter sees its own view.

    `second` holds the variance v in the warmup and, once frozen, the denominators √v̂ + ε. `momentum` holds m or, once
    frozen where updates are compressed, m / (√v̂ + ε). `still` marks the coordinates that stay where they are once
    frozen; None where there are none.
    """

    cohort: Cohort
    momentum: Tensor
    second: Tensor
    still: Tensor | None = None

    @property
    def compressor(self) -> Exchange:
        """The exchange that keeps the residuals, where there are any."""
        return self.exchange

    def hold_still(self, momentum: Tensor) -> None:
        """Zero `momentum` and the residuals where coordinates stay, so that they do not blur their blocks' scales."""
        if self.still is not None:
            momentum.masked_fill_(self.still, 0.0)
            self.exchange.hold_zero(self.still)


Members = list[tuple[AdamBucket, Slot]]


class Cohort:
    """Buckets with one step count and one freeze; a parameter group added later begins its own.

    `steps`: updates applied. `frozen_at`: the warmup step after which the variance was frozen; None before.
    """

    _settings_class: type[AdamSettings] = AdamSettings

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
        links: NodeLinks | None = None,
    ) -> None:
        """`links`: to exchange by nodes; None where every rank is alike."""
        self.rule = rule
        self.steps = 0
        self.frozen_at: int | None = None
        self._table = table
        self._comm = comm
        self._links = links
        self._warmup_codec = warmup_codec
        self._codec = codec
        self._compressed = compressed
        self.buckets = [self._make_bucket(index, layout) for index, layout in enumerate(layouts, first_index)]

    @torch.no_grad()
    def fill(self, bucket: AdamBucket, slot: Slot, gradient: Tensor | None, loss_scale: float | None) -> None:
        """Write what a parameter sends: its gradient, or once frozen m_i = β₁ m + (1 - β₁) g_i, divided by √v̂ + ε where
        updates are compressed.

        `gradient` None counts as zero. A gradient in the warmup is sent as it is, still times `loss_scale`.
        """
        place = slice(slot.offset, slot.offset + slot.numel)
        payload = bucket.exchange.payload[place]
        if self.frozen_at is None:
            if gradient is None:
                payload.zero_()
            else:
                payload.copy_(gradient.reshape(-1))
            return
        momentum = bucket.momentum[place]
        beta1 = self._table.group(slot.parameter)["betas"][0]
        if gradient is None:
            torch.mul(momentum, beta1, out=payload)
            return
        flat = gradient.reshape(-1)
        if loss_scale is not None or flat.dtype != torch.float32:
            flat = payload.copy_(flat)
            if loss_scale is not None:
                flat.div_(loss_scale)
        if self._compressed == "update":
            flat = torch.div(flat, bucket.second[place], out=payload)
        torch.lerp(momentum, flat, 1 - beta1, out=payload)
        if bucket.still is not None:
            # A product and not a fill: an infinite gradient must become NaN, which every rank sees, and not 0.
            payload.mul_(bucket.still[place].logical_not())

    def update(self, outcome: Round, loss_scale: float | None) -> None:
        """Apply what the exchanges of this step brought."""
        self.steps += 1
        if self.frozen_at is None:
            self._warmup_step(outcome, loss_scale)
            rates = [float(group["lr"]) for group in self._table.groups()]
            reached = self.rule.reached(self.steps, rates, self._variance_norm)
            if self.rule.looks_at(self.steps):
                agreement.check_same_freeze(self._comm, reached, rates)
            if reached:
                self._freeze()
        else:
            self._frozen_step(outcome.unsent)

    def name_frozen_state(self) -> None:
        """Give the parameters' states the entries of the frozen stage, as views: `denominator` for `exp_avg_sq`."""
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                state = self._table.state(slot.parameter)
                state["denominator"] = state.pop("exp_avg_sq")

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the flat buckets and the counters; none here."""
        return {}

    def load_own_state(self, saved: dict[str, Any]) -> None:
        """Take over what `own_state` returned."""

    def restore(self, frozen_at: int | None) -> None:
        """Go on with what a checkpoint put into the flat buckets, which is the frozen stage's after `frozen_at`."""
        self.frozen_at = frozen_at
        if frozen_at is not None:
            for bucket in self.buckets:
                self._begin_compression(bucket)

    def _warmup_step(self, outcome: Round, loss_scale: float | None) -> None:
        for settings, present, gradients in self._read_gradients(outcome, loss_scale):
            warmup_update(
                [self._table.weight(slot.parameter) for _, slot in present],
                gradients,
                [self._view(bucket.momentum, slot) for bucket, slot in present],
                [self._view(bucket.second, slot) for bucket, slot in present],
                settings,
                self.steps,
            )
            for _, slot in present:
                self._table.publish(slot.parameter)

    def _read_gradients(
        self, outcome: Round, loss_scale: float | None
    ) -> Iterator[tuple[AdamSettings, Members, list[Tensor]]]:
        """The averaged gradients of the warmup, in the payloads' memory, by parameter group; absent ones left out."""
        for bucket in self.buckets:
            if bucket.index not in outcome.unsent:
                bucket.exchange.read(bucket.exchange.payload)
        for settings, members in self._by_group():
            present = [(bucket, slot) for bucket, slot in members if slot.parameter not in outcome.absent]
            if not present:
                continue
            gradients = [self._view(bucket.exchange.payload, slot) for bucket, slot in present]
            if loss_scale is not None:
                torch._foreach_div_(gradients, loss_scale)
            yield settings, present, gradients

    def _frozen_step(self, unsent: frozenset[int]) -> None:
        self._commit(unsent)
        for bucket in self.buckets:
            self._read_momentum(bucket, bucket.momentum, unsent)
        for settings, everyone in self._by_group():
            members = [(b, slot) for b, slot in everyone if self._table.parameters[slot.parameter].requires_grad]
            weights = [self._table.weight(slot.parameter) for _, slot in members]
            momenta = [self._view(bucket.momentum, slot) for bucket, slot in members]
            if self._compressed == "update":
                apply_updates(weights, momenta, settings, self.steps)
            else:
                denominators = [self._view(bucket.second, slot) for bucket, slot in members]
                frozen_update(weights, momenta, denominators, settings, self.steps)
            for _, slot in members:
                self._table.publish(slot.parameter)

    def _commit(self, unsent: frozenset[int]) -> None:
        for bucket in self.buckets:
            if bucket.index not in unsent:
                bucket.exchange.commit()

    def _read_momentum(self, bucket: AdamBucket, output: Tensor, unsent: frozenset[int]) -> None:
        """Write what the ranks agreed on into `output`, fp32 [padded_numel], which may be the bucket's momentum.

        Where nothing was sent every rank's gradient was 0, and all hold what their average would be, β₁ m.
        """
        if bucket.index not in unsent:
            bucket.exchange.read(output)
        else:
            for slot in bucket.layout.slots:
                place = slice(slot.offset, slot.offset + slot.numel)
                torch.mul(bucket.momentum[place], self._table.group(slot.parameter)["betas"][0], out=output[place])
        bucket.hold_still(output)

    def _freeze(self) -> None:
        self.name_frozen_state()
        for settings, members in self._by_group():
            denominators = [self._view(bucket.second, slot) for bucket, slot in members]
            self._turn_into_denominators(denominators, members, settings, self.steps)
            if self._compressed == "update":
                torch._foreach_div_([self._view(bucket.momentum, slot) for bucket, slot in members], denominators)
        self.frozen_at = self.steps
        for bucket in self.buckets:
            self._begin_compression(bucket)

    def _turn_into_denominators(
        self, variances: list[Tensor], members: Members, settings: AdamSettings, step: int
    ) -> None:
        """Turn the variances of a parameter group, in place, into what its momentum is divided by: infinity where
        coordinates stay."""
        to_denominators(variances, settings, step)
        mask = self._table.group(members[0][1].parameter).get("exp_avg_mask")
        if mask is not None:
            for denominator in variances:
                denominator.masked_fill_(mask.to(denominator.device) == 0, float("inf"))
        if self._compressed == "update":
            raise_smallest(variances)

    def _begin_compression(self, bucket: AdamBucket) -> None:
        bucket.exchange = make_exchange(
            self._comm,
            self._links,
            bucket.layout.numel,
            self._codec,
            bucket=bucket.index,
            device=bucket.momentum.device,
        )
        still = torch.isinf(bucket.second)
        bucket.still = still if bool(still.any()) else None
        bucket.hold_still(bucket.momentum)

    def _make_bucket(self, index: int, layout: BucketLayout) -> AdamBucket:
        device = self._table.parameters[layout.slots[0].parameter].device
        exchange = self._exact_exchange(index, layout, device)
        momentum, second = torch.zeros_like(exchange.payload), torch.zeros_like(exchange.payload)
        for slot in layout.slots:
            state = self._table.state(slot.parameter)
            state["exp_avg"] = self._view(momentum, slot)
            state["exp_avg_sq"] = self._view(second, slot)
        return AdamBucket(index, layout, exchange, self, momentum, second)

    def _exact_exchange(self, index: int, layout: BucketLayout, device: torch.device) -> Exchange:
        return make_exchange(
            self._comm,
            self._links,
            layout.numel,
            self._warmup_codec,
            bucket=index,
            error_feedback=False,
            device=device,
        )

    def _view(self, flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.offset : slot.offset + slot.numel].view(self._table.parameters[slot.parameter].shape)

    def _by_group(self) -> list[tuple[AdamSettings, Members]]:
        """The parameters by parameter group, with the group's present settings."""
        groups = self._table.groups()
        members: list[Members] = [[] for _ in groups]
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                members[self._table.group_number(slot.parameter)].append((bucket, slot))
        return [
            (self._settings_class.of_group(group), of_group)
            for group, of_group in zip(groups, members, strict=True)
            if of_group
        ]

    def _variance_norm(self) -> float:
        return sum(
            float(variance_norm([self._view(bucket.second, slot) for bucket, slot in members], settings, self.steps))
            for settings, members in self._by_group()
        )
