"""One bucket of sharded 0/1 Adam: what every worker keeps of it for itself, what only the owner of a shard keeps, and
what a step of each kind makes of the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec, make_codec
from thinwire.compress.exchange import Exchange, Outcome
from thinwire.compress.low_memory_exchange import LeanExchange
from thinwire.compress.packet import Flags
from thinwire.optim.common_weights import CommonWeights
from thinwire.optim.formulas import bound_updates, raise_smallest, to_denominators, track_variances
from thinwire.optim.zero_one.clock import GroupSettings, ZeroOneClock
from thinwire.optim.zero_one.schedule import StepKind
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.flat_bucket import FlatBucket

__all__ = ["ShardedZeroOneBucket"]


class ShardedZeroOneBucket:
    """A bucket's state of 0/1 Adam, and the transport of its gradients.

    On every rank, [padded_numel]: `momentum`, fp32; `denominators`, √v̂ + ε, infinite where coordinates stay, and the
    worker's residual, both fp32 or, for 16-bit parameters, bf16; once the variance is frozen `mean_momentum`, fp32, of
    the local steps since the last sync. Of this rank's shard, or at stage 0 of the whole bucket: `variance`, fp32,
    until it is frozen. `momentum` and `mean_momentum` are divided by √v̂ + ε once it is frozen.
    """

    may_stay = False

    def __init__(
        self,
        bucket: FlatBucket,
        weights: CommonWeights,
        comm: Communicator,
        codec: Codec,
        clock: ZeroOneClock,
        groups: GroupSettings,
        loss_scale: Callable[[], float],
    ) -> None:
        self.bucket = bucket
        self.layout: BucketLayout = bucket.layout
        self.weights = weights
        self._comm = comm
        self._codec = codec
        self._clock = clock
        self._groups = groups
        self._loss_scale = loss_scale
        self._exact: Exchange | None = None  # of an exact step under way
        self._own: Tensor | None = None  # the new momentum of a local step under way
        self.begin()

    def begin(self) -> None:
        """Forget everything but the weights."""
        layout, device = self.layout, self.bucket.flat.device
        self.momentum = torch.zeros(layout.padded_numel, device=device)
        self.denominators = torch.full_like(self.momentum, float("inf"), dtype=self._worker_dtype)
        self.denominators[layout.numel :] = 1.0
        held = self.weights.held
        self.variance: Tensor | None = self.momentum.new_zeros(held.stop - held.start)
        self._mean_momentum: Tensor | None = None
        self._begin_compression()
        self._forget_step()

    def begin_local_steps(self) -> None:
        """Let the variance go, and make room for what a worker does alone."""
        self.variance = None
        self._mean_momentum = torch.zeros_like(self.momentum)
        self.weights.stand_apart()

    def freeze(self) -> None:
        """Begin local steps with the variance as it is; residuals start from zero."""
        self.begin_local_steps()
        self.momentum.div_(self.denominators)
        self._begin_compression()
        self.find_still()

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
        """What the headers said, the same on every rank; before the step is counted."""
        return self._sending.outcome()

    @property
    def local_is_finite(self) -> bool:
        """Whether what this rank adds to a local step is."""
        return bool(torch.isfinite(self._own_payload().abs().max()))

    def exact_step(self, absent: frozenset[int]) -> None:
        """Update momentum and variance from the exact average, publish new denominators, and move the weights.

        `absent`: parameters without a gradient on any rank, which are left alone.
        """
        assert self._exact is not None
        gradient = self._exact.payload
        self._exact.read(gradient)
        self._track_momentum(gradient, absent)
        self._publish_denominators(gradient, absent)
        self._exact = None
        self._move_by_momentum(absent)
        self.find_still()

    def compressed_step(self) -> None:
        """Take over the momentum that the ranks agreed on, and move the weights."""
        self.exchange.read(self.momentum)
        self.momentum.mul_(self.denominators)
        self._hold_still(self.momentum)
        self.exchange.commit()
        self._move_by_momentum(frozenset())

    def local_step(self, shares: Mapping[int, float], finite: bool) -> None:
        """Move this rank's own weights; by nothing new unless what it adds is `finite`.

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
            self.weights.move(self._decay, (), self._seed)
        self.show()

    def sync_step(self, *, decay: bool = True) -> None:
        """Take over the average of the momenta, and move from the weights of the last sync by it."""
        self.exchange.read(self.momentum)
        self._hold_still(self.momentum)
        self.exchange.commit()
        self.mean_momentum.zero_()

        def move(parameter: int, place: slice, weights: Tensor) -> None:
            if decay:
                self._decay(parameter, place, weights)
            distance = self._clock.progress.distance(self._groups.number(parameter))
            weights.add_(self.momentum[place], alpha=-distance)

        self.weights.move(move, (), self._seed)
        self.weights.show()

    def meet(self) -> None:
        """Exchange what a sync would, now, without a gradient."""
        self.exchange.payload.copy_(self.mean_momentum)
        self.exchange.start(self._clock.steps)
        self.exchange.advance()
        self.exchange.wait()
        self.exchange.outcome()

    @torch.no_grad()
    def show(self) -> None:
        """Write this rank's own weights, between two syncs, into the parameters."""
        for slot in self.layout.slots:
            self.bucket.flat[_place(slot)].copy_(self._own_weights(slot))

    def check_written(self, in_sync: bool) -> Slot | None:
        """Take over what somebody else wrote into the parameters; the first that is not what this rank had there, if
        ranks hold weights of their own."""
        for slot in self.weights.take_over_written(in_sync):
            if not torch.equal(self.bucket.flat[_place(slot)], self._own_weights(slot).to(self.bucket.dtype)):
                return slot
        return None

    def adopt_weights(self) -> None:
        """Take the parameters as they are for what all ranks have in common; local progress is dropped."""
        self.weights.adopt()
        if self._mean_momentum is not None:
            self._mean_momentum.zero_()

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
    def _seed(self) -> int:
        return (self._clock.steps << 20) + self.bucket.index

    @property
    def _sending(self) -> Exchange:
        if self._clock.next_kind is not StepKind.EXACT:
            return self.exchange
        if self._exact is None:
            self._exact = Exchange(
                self._comm,
                self.layout.numel,
                make_codec("none", self._codec.block_size),
                bucket=self.bucket.index,
                error_feedback=False,
                device=self.bucket.flat.device,
            )
        return self._exact

    def _own_payload(self) -> Tensor:
        if self._own is None:
            self._own = torch.zeros_like(self.momentum)
        return self._own

    def _own_weights(self, slot: Slot) -> Tensor:
        place = _place(slot)
        distance = self._clock.progress.distance(self._groups.number(slot.parameter))
        return (self.mean_momentum[place] * -distance).add_(self.weights.values[place])

    def _write_payload(self, slot: Slot, gradient: Tensor | None) -> None:
        """The gradient; in a compressed step the new momentum divided by √v̂ + ε. Once the variance is frozen the new
        momentum, which is divided already, and in a sync its average with those of the local steps before."""
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
        settings = self._groups.of(slot.parameter)
        if kind is StepKind.COMPRESSED:
            torch.lerp(self.momentum[place], payload, 1 - settings.beta1, out=payload)
            payload.div_(self.denominators[place])
        else:
            payload.div_(self.denominators[place])
            torch.lerp(self.momentum[place], payload, 1 - settings.beta1, out=payload)
        bound_updates(payload, settings, self._comm.size)
        if kind is StepKind.SYNC:
            # A learning rate that changes between backward() and step() moves the weights by the new one, and weighs
            # this step among the last ones by the old.
            number = self._groups.number(slot.parameter)
            share = self._clock.progress.share(number, settings, self._clock.steps + 1)
            torch.lerp(self.mean_momentum[place], payload, share, out=payload)

    def _track_momentum(self, gradient: Tensor, absent: frozenset[int]) -> None:
        for slot in self._slots_without(absent):
            weight = 1 - self._groups.of(slot.parameter).beta1
            self.momentum[_place(slot)].lerp_(gradient[_place(slot)], weight)

    def _publish_denominators(self, gradient: Tensor, absent: frozenset[int]) -> None:
        assert self.variance is not None
        held = self.weights.held
        denominators = self.denominators[held].clone()
        for run in self.weights.own_runs:
            if run.parameter not in absent:
                variance = self.variance[run.place]
                settings = self._groups.of(run.parameter)
                track_variances([gradient[held][run.place]], [variance], settings)
                root = variance.clone()
                to_denominators([root], settings, self._clock.variance_updates)
                denominators[run.place].copy_(root)
        if len(denominators) == len(self.denominators):
            self.denominators.copy_(denominators)
        else:
            self._comm.all_gather(self.denominators, denominators)
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

    def _move_by_momentum(self, absent: frozenset[int]) -> None:
        def move(parameter: int, place: slice, weights: Tensor) -> None:
            settings = self._groups.of(parameter)
            self._decay(parameter, place, weights)
            rate = settings.lr / settings.first_correction(self._clock.steps)
            weights.addcdiv_(self.momentum[place], self.denominators[place].float(), value=-rate)

        self.weights.move(move, absent, self._seed)
        self.weights.show()

    def _decay(self, parameter: int, place: slice, weights: Tensor) -> None:
        del place
        settings = self._groups.of(parameter)
        if settings.weight_decay:
            weights.mul_(1 - settings.lr * settings.weight_decay)

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
        self._exact = self._own = None
        self._incomplete = False


def _place(slot: Slot) -> slice:
    return slice(slot.offset, slot.offset + slot.numel)
