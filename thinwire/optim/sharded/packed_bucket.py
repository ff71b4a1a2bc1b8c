"""One bucket of sharded 1-bit Adam once the variance is frozen: what a rank then keeps of it, what it sends, and how
everybody's replica follows the owners' masters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress import kernels
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Outcome
from thinwire.compress.low_memory_exchange import LeanExchange
from thinwire.compress.packet import Flags
from thinwire.optim.formulas import AdamSettings
from thinwire.optim.sharded.norm_sketch import NormSketch
from thinwire.optim.sharded.packing import FrozenState
from thinwire.optim.sharded.preconditioner import table
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.flat_bucket import FlatBucket, Run
from thinwire.zero.master_weights import BucketMasters

__all__ = ["FrozenBucket", "StepSettings"]


@dataclass
class StepSettings:
    """What every bucket of a step shares.

    `group`: the hyperparameters of a parameter, by its number. `loss_scale`: what gradients are divided by. `step`:
    steps applied so far. `sketch`: where the averaged gradient's norm is found, if it is wanted. `norm` and `clip`:
    that norm, and what gradients are multiplied by because of it.
    """

    group: Callable[[int], AdamSettings]
    loss_scale: Callable[[], float]
    step: Callable[[], int]
    sketch: NormSketch | None
    norm: float = math.nan
    clip: float = 1.0


class FrozenBucket:
    """The frozen stage of one bucket; u stands for the momentum divided by √v̂ + ε, as everywhere.

    Every rank keeps u as leg 2's packets, 1 bit an element, the preconditioner as `codes`, 8 bits, its residual, and
    the weights' replica; masters and the owner's residual are the owner's. Gradients live until they are in the
    payload.
    """

    def __init__(
        self,
        bucket: FlatBucket,
        masters: BucketMasters,
        comm: Communicator,
        codec: Codec,
        settings: StepSettings,
        state: FrozenState,
        *,
        reversible: bool,
    ) -> None:
        self.bucket = bucket
        self.layout: BucketLayout = bucket.layout
        self.momentum = state.momentum
        self.codes = state.codes
        self.ranges = state.ranges
        self._masters = masters
        self._comm = comm
        self._settings = settings
        tables = table(self.ranges[:, 0], self.ranges[:, 1])
        self._table_of = dict(zip(self.layout.slots, tables, strict=True))
        still = (self.codes == 0)[: self.layout.numel]
        self._holds_still = bool(still.any())
        self.exchange = LeanExchange(
            comm,
            self.layout.numel,
            codec,
            bucket=bucket.index,
            device=bucket.flat.device,
            residual_dtype=torch.float32 if bucket.dtype == torch.float32 else torch.bfloat16,
            reversible=reversible,
        )
        self.exchange.owner_residual = state.owner_residual
        self._incomplete = False
        self._stays = False

    # What a backward does

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Leave the gradient in `.grad`, where further backwards add to it."""

    @torch.no_grad()
    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Write β₁ u + (1 - β₁) g / (√v̂ + ε) into the payload, and free the gradient."""
        assert parameter.grad is not None
        gradient = parameter.grad.contiguous().view(-1)
        if self._settings.sketch is not None:
            self._settings.sketch.add(gradient, slot.parameter)
        self._write_payload(slot, gradient)
        parameter.grad = None

    def leave_out(self, slot: Slot, expected: bool) -> None:
        """Count a parameter that has no gradient on this rank as zero; `expected`: nor on any other."""
        self._write_payload(slot, None)
        self._incomplete |= not expected

    @property
    def may_stay(self) -> bool:
        """Whether `stay` can take the place of a transfer: with one β₁ for all of the bucket."""
        return len({self._settings.group(slot.parameter).beta1 for slot in self.layout.slots}) == 1

    def stay(self) -> None:
        """Every rank's gradients are 0 in this step: send nothing."""
        self._stays = True

    def start(self) -> None:
        """Leg 1."""
        self.exchange.start(self._settings.step(), Flags.INCOMPLETE if self._incomplete else Flags.NONE)
        self._incomplete = False

    def advance(self) -> None:
        """Average what leg 1 brought, and start leg 2."""
        clip = self._settings.clip
        kept = None
        if clip < 1.0:
            self.exchange.scale_step(clip)
            kept = self._decayed_momentum()

        def adjust(average: Tensor, place: slice) -> None:
            if kept is not None:
                torch.lerp(kept[place], average, clip, out=average)
            if self._holds_still:
                # A product and not a fill: what is not finite must stay so, for every rank to see.
                average.mul_(self.bucket.shard_of(self.codes)[place].ne(0))

        self.exchange.advance(adjust)

    def wait(self) -> None:
        """Wait for leg 2."""
        self.exchange.wait()

    def end_step(self) -> None:
        """Forget a step that was not applied."""
        self.exchange.revert()
        self._stays = False

    # What a step does

    def outcome(self) -> Outcome:
        """What the headers said, the same on every rank."""
        if self._stays:
            return Outcome(finite=True, incomplete=False, unplaced=False)
        return self.exchange.outcome()

    @torch.no_grad()
    def take_over(self) -> None:
        """Take the new u over, and the residuals of this step."""
        if self._stays:
            # What the average of every rank's β₁ u is, without an exchange; residuals wait for the next one.
            self.exchange.codec.scale(self.momentum, self._settings.group(self.layout.slots[0].parameter).beta1)
        else:
            self._take_momentum()

    @torch.no_grad()
    def move(self, seed: int) -> None:
        """Move masters and replica by u; `seed` of the replica's stochastic rounding."""
        if self._masters.separate:
            self._move_masters()
        if self._masters.separate and self._masters.whole:
            self.bucket.flat.copy_(self._masters.weights)
        else:
            self._move_replica(seed)

    def _take_momentum(self) -> None:
        self.momentum = self.exchange.take_packets()
        if self._holds_still:
            self.exchange.hold_zero(self.codes == 0)
        self.exchange.commit()

    def synchronize_replica(self) -> Callable[[], None]:
        """Start giving every rank the owners' weights again, rounded to nearest; returns what waits for it."""
        if self._masters.whole:
            weights = self._masters.weights
            self.bucket.comm.all_gather(weights, self.bucket.shard_of(weights).clone())
        return self._masters.publish()

    @torch.no_grad()
    def checksum(self) -> int:
        """A number that differs, but for chance, where a single bit of the replica does."""
        bits = self.bucket.flat.view(torch.int32 if self.bucket.dtype == torch.float32 else torch.int16)
        total = 0
        for first in range(0, bits.numel(), _CHECKSUM_RUN):
            run = bits[first : first + _CHECKSUM_RUN].to(torch.int64)
            places = torch.arange(first + 1, first + 1 + run.numel(), device=run.device)
            total += int((run * (places * _ODD)).sum())
        return total % (1 << 64)

    # Parts

    def _write_payload(self, slot: Slot, gradient: Tensor | None) -> None:
        place = slice(slot.offset, slot.offset + slot.numel)
        kernels.momentum_payload(
            self.momentum,
            gradient,
            self.codes[place],
            self._table_of[slot],
            self.exchange.payload[place],
            first=slot.offset,
            shard=self.layout.shard,
            block_size=self.layout.block_size,
            beta1=self._settings.group(slot.parameter).beta1,
            loss_scale=self._divisor(slot.parameter),
        )

    def _divisor(self, parameter: int) -> float:
        """What a parameter's gradients are divided by before they enter u."""
        return self._settings.loss_scale()

    def _rates(self, parameter: int) -> tuple[float, float]:
        """What u is multiplied by to move a parameter, and what decay leaves of its weights."""
        group = self._settings.group(parameter)
        return group.lr / group.first_correction(self._settings.step() + 1), 1 - group.lr * group.weight_decay

    def _decayed_momentum(self) -> Tensor:
        """What clipping leaves of the owner's average, β₁ u + (1 - β₁) ḡ / (√v̂ + ε), as it is: β₁ u, fp32 [shard]."""
        kept = self.own_momentum()
        for run in self.bucket.own_runs:
            kept[run.place].mul_(self._settings.group(run.parameter).beta1)
        return kept

    def own_momentum(self) -> Tensor:
        """What the packets say of u in the own shard, fp32 [shard]."""
        rank = self._comm.rank
        values = torch.empty(self.layout.shard, device=self.momentum.device)
        low, high = self.bucket.own_range
        self.exchange.codec.decode(self.momentum[rank : rank + 1], values, high - low)
        return values

    def _move_masters(self) -> None:
        first = 0 if self._masters.whole else self._comm.rank * self.layout.shard
        self._apply_signs(self._masters.weights, self._masters.runs, first, seed=0)

    def _move_replica(self, seed: int) -> None:
        self._apply_signs(self.bucket.flat, self.bucket.runs(0, self.layout.numel), 0, seed)

    def _apply_signs(self, weights: Tensor, runs: Sequence[Run], first: int, seed: int) -> None:
        """Move `weights`, which begin at element `first` of the bucket, by this step's u."""
        momentum = self.momentum.to(weights.device)
        for run in runs:
            lr, decay = self._rates(run.parameter)
            kernels.apply_signs(
                weights[run.place],
                momentum,
                self.codes[first + run.place.start : first + run.place.stop].to(weights.device),
                first=first + run.place.start,
                shard=self.layout.shard,
                block_size=self.layout.block_size,
                lr=lr,
                decay=decay,
                seed=seed,
            )


_CHECKSUM_RUN = 1 << 20
_ODD = 0x5851F42D4C957F2D
