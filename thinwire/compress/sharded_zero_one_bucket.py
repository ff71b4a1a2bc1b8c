"""One bucket of sharded 0/1 Adam: what every worker keeps of it for itself, what only the owner of a shard keeps, and
what a step of each kind makes of the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.adam_math import AdamSettings, raise_smallest, to_denominators, track_variances
from thinwire.compress.codecs import Codec, make_codec
from thinwire.compress.exchange import Exchange, Outcome
from thinwire.compress.kernels.reference import store_rounded
from thinwire.compress.lean_exchange import LeanExchange
from thinwire.compress.packet import Flags
from thinwire.compress.zero_one_clock import GroupSettings, ZeroOneClock
from thinwire.compress.zero_one_schedule import StepKind
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.flat import FlatBucket
from thinwire.zero.masters import BucketMasters

__all__ = ["ShardedZeroOneBucket"]

_ROUNDED_AT_ONCE = 1 << 20  # elements whose random bits, 8 bytes each, are in memory

Change = Callable[[int, slice, Tensor], None]
"""Changes fp32 weights, those of a part of one parameter, in place; given the parameter's number and the part's place
in the bucket."""


class ShardedZeroOneBucket:
    """A bucket's weights and 0/1 Adam's state of them; the transport of its gradients.

    On every rank, [padded_numel]: `momentum`, fp32; `denominators`, √v̂ + ε, infinite where coordinates stay, and the
    worker's residual, both fp32 or, for 16-bit parameters, bf16; once the variance is frozen `mean_momentum`, fp32, of
    the local steps since the last sync, and `common`, the weights of the last sync. Of this rank's shard, or at stage 0
    of the whole bucket: `variance`, fp32, until it is frozen, and the masters of 16-bit parameters. `momentum` and
    `mean_momentum` are divided by √v̂ + ε once it is frozen.
    """

    may_stay = False

    def __init__(
        self,
        bucket: FlatBucket,
        masters: BucketMasters,
        comm: Communicator,
        codec: Codec,
        clock: ZeroOneClock,
        groups: GroupSettings,
        loss_scale: Callable[[], float],
    ) -> None:
        self.bucket = bucket
        self.layout: BucketLayout = bucket.layout
        self.masters = masters
        self._comm = comm
        self._codec = codec
        self._clock = clock
        self._groups = groups
        self._loss_scale = loss_scale
        self.begin()

    def begin(self) -> None:
        """Forget everything but the weights."""
        layout, device = self.layout, self.bucket.flat.device
        self.momentum = torch.zeros(layout.padded_numel, device=device)
        self.denominators = torch.full_like(self.momentum, float("inf"), dtype=self._worker_dtype)
        self.denominators[layout.numel :] = 1.0
        self.variance: Tensor | None = self.momentum.new_zeros(
            layout.padded_numel if self.masters.whole else layout.shard
        )
        self._mean_momentum: Tensor | None = None
        self._common: Tensor | None = None
        self._begin_compression()
        self._forget_step()

    def begin_local_steps(self) -> None:
        """Let the variance go, and make room for what a worker does alone."""
        self.variance = None
        self._mean_momentum = torch.zeros_like(self.momentum)
        if not self._masters_are_common:
            self._common = self.bucket.flat.clone()

    def freeze(self) -> None:
        """Begin local steps with the variance as it is; residuals start from zero."""
        self.begin_local_steps()
        self.momentum.div_(self.denominators)
        self._begin_compression()
        self.find_still()

    @property
    def common(self) -> Tensor:
        """The weights that all ranks have in common, [padded_numel]: those of the last sync, or the present ones."""
        if self._masters_are_common:
            return self.masters.weights
        return self.bucket.flat if self._common is None else self._common

    @property
    def mean_momentum(self) -> Tensor:
        """The mean of the momenta since the last sync, weighted by learning rate; once the variance is frozen."""
        assert self._mean_momentum is not None, "local steps begin when the variance is frozen"
        return self._mean_momentum

    # What a backward does

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Leave the gradient in `.grad`, where further backwards add to it."""

    @torch.no_grad()
    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Write what the parameter adds to this step, and free the gradient."""
        assert parameter.grad is not None
        self._write_payload(slot, parameter.grad.contiguous().view(-1))
        parameter.grad = None

    def leave_out(self, slot: Slot, expected: bool) -> None:
        """Count a parameter that has no gradient on this rank as zero; `expected`: nor on any other."""
        self._write_payload(slot, None)
        self._incomplete |= not expected

    def stay(self) -> None:
        """Never: see `may_stay`."""
        raise AssertionError("a bucket of 0/1 Adam always takes part")

    def start(self) -> None:
        """Leg 1; nothing in a local step."""
        if self._clock.next_kind is not StepKind.LOCAL:
            self._sending.start(self._clock.steps, Flags.INCOMPLETE if self._incomplete else Flags.NONE)

    def advance(self) -> None:
        """Leg 2; nothing in a local step."""
        if self._clock.next_kind is not StepKind.LOCAL:
            self._sending.advance()

    def wait(self) -> None:
        """Wait for leg 2; nothing in a local step."""
        if self._clock.next_kind is not StepKind.LOCAL:
            self._sending.wait()

    def end_step(self) -> None:
        """Forget a step that was not applied."""
        self.exchange.revert()
        self._forget_step()

    # What a step does: the clock has counted it already

    def outcome(self) -> Outcome:
        """What the headers said, the same on every rank."""
        return self._sending.outcome()

    @property
    def local_is_finite(self) -> bool:
        """Whether this rank's gradients of a local step are."""
        return bool(torch.isfinite(self._own_payload().abs().max()))

    def exact_step(self, absent: frozenset[int]) -> None:
        """Update momentum and variance from the exact average, publish new denominators, and move the weights.

        `absent`: parameters without a gradient on any rank, which are left alone.
        """
        assert self._exact is not None
        gradient = self._exact.payload
        self._exact.read(gradient)
        for slot in self._slots_without(absent):
            place = _place(slot)
            self.momentum[place].lerp_(gradient[place], 1 - self._groups.of(slot.parameter).beta1)
        self._publish_denominators(gradient, absent)
        self._exact = None
        self._warmup_move(absent)
        self.find_still()

    def compressed_step(self) -> None:
        """Update the momentum from the compressed average, and move the weights."""
        gradient = torch.empty_like(self.momentum)
        self.exchange.read(gradient)
        gradient.mul_(self.denominators)
        self._hold_still(gradient)
        self.exchange.commit()
        for slot in self.layout.slots:
            place = _place(slot)
            self.momentum[place].lerp_(gradient[place], 1 - self._groups.of(slot.parameter).beta1)
        self._warmup_move(frozenset())

    def local_step(self, shares: Mapping[int, float], finite: bool) -> None:
        """Move this rank's own weights; by nothing new unless its gradients are `finite`.

        `shares`: by parameter group, the weight of this step in the mean of the momenta since the last sync.
        """
        if finite:
            self.momentum = self._own_payload()
        for slot in self.layout.slots:
            mean, share = self.mean_momentum[_place(slot)], shares[self._groups.number(slot.parameter)]
            if finite:
                mean.lerp_(self.momentum[_place(slot)], share)
            else:
                mean.mul_(1 - share)
        if any(self._groups.of(slot.parameter).weight_decay for slot in self.layout.slots):
            self._move(self._decay, frozenset())
        self.show()

    def sync_step(self, *, decay: bool = True) -> None:
        """Take the average of the momenta over, and move from the weights of the last sync by it: the same bits on
        every rank."""
        self.exchange.read(self.momentum)
        self._hold_still(self.momentum)
        self.exchange.commit()
        self.mean_momentum.zero_()

        def move(parameter: int, place: slice, weights: Tensor) -> None:
            if decay:
                self._decay(parameter, place, weights)
            distance = self._clock.progress.distance(self._groups.number(parameter))
            weights.add_(self.momentum[place], alpha=-distance)

        self._move(move, frozenset())
        self.bucket.flat.copy_(self.common)

    def meet(self) -> None:
        """Exchange what a sync would, now, without a gradient."""
        self.exchange.payload.copy_(self.mean_momentum)
        self.exchange.start(self._clock.steps)
        self.exchange.advance()
        self.exchange.wait()
        self.exchange.outcome()

    def show(self) -> None:
        """Write this rank's own weights into the parameters."""
        for slot in self.layout.slots:
            place = _place(slot)
            distance = self._clock.progress.distance(self._groups.number(slot.parameter))
            self.bucket.flat[place].copy_((self.mean_momentum[place] * -distance).add_(self.common[place]))

    def of_shard(self, held: Tensor) -> Tensor:
        """This rank's shard, a view, of a tensor that is held as masters and variance are."""
        return self.bucket.shard_of(held) if self.masters.whole else held

    def publish_masters(self) -> Callable[[], None]:
        """Start giving every rank the owners' masters, rounded to nearest; what waits for it. Between no local steps."""
        return self.masters.publish()

    def adopt_weights(self) -> None:
        """Take the parameters as they are now for what all ranks have in common."""
        if self._common is not None:
            self._common.copy_(self.bucket.flat)
        if self._mean_momentum is not None:
            self._mean_momentum.zero_()

    def drop_local_steps(self) -> None:
        """Go back to the weights that all ranks have in common."""
        self.bucket.flat.copy_(self.common)

    def find_still(self) -> None:
        """See whether coordinates stay, and forget what compression lost there."""
        still = torch.isinf(self.denominators)
        self._holds_still = bool(still.any())
        if self._holds_still:
            worker, owner = self.exchange.worker_residual, self.exchange.owner_residual
            assert worker is not None
            assert owner is not None
            worker.masked_fill_(still, 0.0)
            owner.masked_fill_(self.bucket.shard_of(still), 0.0)
            if self._clock.frozen_at is not None:
                self.momentum.masked_fill_(still, 0.0)

    # Parts

    @property
    def _worker_dtype(self) -> torch.dtype:
        return torch.float32 if self.bucket.dtype == torch.float32 else torch.bfloat16

    @property
    def _masters_are_common(self) -> bool:
        return self.masters.separate and self.masters.whole

    @property
    def _sending(self) -> Exchange:
        if self._clock.next_kind is not StepKind.EXACT:
            return self.exchange
        if self._exact is None:
            codec = make_codec("none", self._codec.block_size)
            self._exact = Exchange(
                self._comm,
                self.layout.numel,
                codec,
                bucket=self.bucket.index,
                error_feedback=False,
                device=self.bucket.flat.device,
            )
        return self._exact

    def _own_payload(self) -> Tensor:
        if self._own is None:
            self._own = torch.zeros_like(self.momentum)
        return self._own

    def _write_payload(self, slot: Slot, gradient: Tensor | None) -> None:
        """The gradient; compressed, divided by √v̂ + ε. Once the variance is frozen the new momentum and, in a sync, its
        average with those of the local steps before."""
        kind, place = self._clock.next_kind, _place(slot)
        payload = (self._own_payload() if kind is StepKind.LOCAL else self._sending.payload)[place]
        if gradient is None:
            payload.zero_()
        else:
            payload.copy_(gradient)
        if self._loss_scale() != 1.0:
            payload.div_(self._loss_scale())
        if kind is StepKind.EXACT:
            return
        payload.div_(self.denominators[place])
        if kind is StepKind.COMPRESSED:
            return
        settings = self._groups.of(slot.parameter)
        torch.lerp(self.momentum[place], payload, 1 - settings.beta1, out=payload)
        if kind is StepKind.SYNC:
            # A learning rate that changes between backward() and step() moves the weights by the new one, and weighs
            # this step among the last ones by the old.
            number = self._groups.number(slot.parameter)
            share = self._clock.progress.share(number, settings, self._clock.steps + 1)
            torch.lerp(self.mean_momentum[place], payload, share, out=payload)

    def _publish_denominators(self, gradient: Tensor, absent: frozenset[int]) -> None:
        assert self.variance is not None
        first = self._first_of_masters
        held = self.denominators if self.masters.whole else self.bucket.shard_of(self.denominators).clone()
        for run in self.masters.runs:
            if run.parameter not in absent:
                settings = self._groups.of(run.parameter)
                variance = self.variance[run.place]
                track_variances([gradient[first:][run.place]], [variance], settings)
                denominators = variance.clone()
                to_denominators([denominators], settings, self._clock.variance_updates)
                held[run.place] = denominators.to(held.dtype)
        if not self.masters.whole:
            self._comm.all_gather(self.denominators, held)
        for slot in self._slots_without(absent):
            self._finish_denominators(slot)

    def _finish_denominators(self, slot: Slot) -> None:
        """What takes a whole parameter: hold what its mask holds, and raise the smallest to a hundredth of the mean."""
        values = self.bucket.view(self.denominators, slot).float()
        mask = self._groups.mask(slot.parameter)
        if mask is not None:
            values.masked_fill_(mask.to(values.device) == 0, float("inf"))
        raise_smallest([values])
        self.bucket.view(self.denominators, slot).copy_(values)

    def _hold_still(self, average: Tensor) -> None:
        """Zero `average` and the new residuals where coordinates stay."""
        if self._holds_still:
            still = torch.isinf(self.denominators)
            average.masked_fill_(still, 0.0)
            self.exchange.hold_zero(still)

    def _warmup_move(self, absent: frozenset[int]) -> None:
        def move(parameter: int, place: slice, weights: Tensor) -> None:
            settings = self._groups.of(parameter)
            self._decay(parameter, place, weights)
            rate = settings.lr / settings.first_correction(self._clock.steps)
            weights.addcdiv_(self.momentum[place], self.denominators[place].float(), value=-rate)

        self._move(move, absent)
        if self._masters_are_common:
            self.bucket.flat.copy_(self.common)

    def _decay(self, parameter: int, place: slice, weights: Tensor) -> None:
        del place
        settings: AdamSettings = self._groups.of(parameter)
        if settings.weight_decay:
            weights.mul_(1 - settings.lr * settings.weight_decay)

    def _move(self, change: Change, absent: frozenset[int]) -> None:
        """Change what all ranks have in common, with the same random bits on all where 16 bits are rounded, and the
        masters."""
        if self.masters.separate:
            first = self._first_of_masters
            for run in self.masters.runs:
                if run.parameter not in absent:
                    place = slice(first + run.place.start, first + run.place.stop)
                    change(run.parameter, place, self.masters.weights[run.place])
        if not self._masters_are_common:
            for slot in self._slots_without(absent):
                place = _place(slot)
                common = self.common[place]
                weights = common.float()
                change(slot.parameter, place, weights)
                if weights is not common:
                    self._store_rounded(common, weights, slot.offset)

    def _store_rounded(self, common: Tensor, weights: Tensor, first: int) -> None:
        seed = (self._clock.steps << 20) + self.bucket.index
        parts = zip(common.split(_ROUNDED_AT_ONCE), weights.split(_ROUNDED_AT_ONCE), strict=True)
        for number, (stored, values) in enumerate(parts):
            store_rounded(stored, values, seed, first + number * _ROUNDED_AT_ONCE)

    @property
    def _first_of_masters(self) -> int:
        """Where in the bucket the masters, and the variance, begin."""
        return 0 if self.masters.whole else self._comm.rank * self.layout.shard

    def _slots_without(self, absent: frozenset[int]) -> list[Slot]:
        return [slot for slot in self.layout.slots if slot.parameter not in absent]

    def _begin_compression(self) -> None:
        self.exchange = LeanExchange(
            self._comm,
            self.layout.numel,
            self._codec,
            bucket=self.bucket.index,
            device=self.bucket.flat.device,
            residual_dtype=self._worker_dtype,
            reversible=True,
        )
        self._holds_still = False

    def _forget_step(self) -> None:
        self._exact: Exchange | None = None
        self._own: Tensor | None = None
        self._incomplete = False


def _place(slot: Slot) -> slice:
    return slice(slot.offset, slot.offset + slot.numel)
