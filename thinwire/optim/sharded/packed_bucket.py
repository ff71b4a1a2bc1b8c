"""One bucket of packed state once the variance is frozen: what a rank then keeps of it, what it sends, and how
everybody's replica follows the owners' master weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import EncodePart, held_coordinates
from thinwire.compress.kernels import packed
from thinwire.compress.kernels.buckets import Segments
from thinwire.compress.kernels.loading import execute
from thinwire.compress.light_exchanges import LowMemoryExchange
from thinwire.compress.packet import Flags
from thinwire.compress.parts import Outcome
from thinwire.optim.algorithm import AdamSettings, Algorithm, Clock, MembersByGroup
from thinwire.optim.form import part_of, segments_of
from thinwire.optim.preconditioner import table
from thinwire.optim.sharded.packing import FrozenState
from thinwire.optim.step import Parameters, Step, may_clip
from thinwire.zero import BucketLayout, Slot
from thinwire.zero.master_weights import MasterWeights, Run

__all__ = ["OwnPackets", "PackedBucket"]

# What moves master weights in CPU memory, brought there from the accelerator that the parameters are on.


class OwnPackets:
    """The owner's own packets of every step, on the host, and the preconditioner's codes, which never change.

    `codes`: uint8 [shard].
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes.cpu()
        self._parts: list[Tensor] = []

    def bring(self, parts: Sequence[Tensor]) -> None:
        """Start copying the own packets of each part, uint8 [1, bytes], into page-locked memory.

        They are there when the host has waited for anything that the device does later, as for the step's headers.
        """
        self._copy(parts, non_blocking=True)

    def take(self, parts: Sequence[Tensor]) -> None:
        """Copy them, and wait until they are there."""
        self._copy(parts, non_blocking=False)

    def packets(self, codec: Codec) -> Tensor:
        """What was brought, uint8 [1, packet_bytes]."""
        return self._parts[0] if len(self._parts) == 1 else codec.join(self._parts)

    def _copy(self, parts: Sequence[Tensor], *, non_blocking: bool) -> None:
        if [one.shape for one in parts] != [one.shape for one in self._parts]:
            self._parts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in parts]
        for held, part in zip(self._parts, parts, strict=True):
            held.copy_(part, non_blocking=non_blocking)


class PackedBucket:
    """The frozen stage of one bucket; u stands for the momentum divided by √v̂ + ε, as everywhere.

    Every rank keeps u as leg 2's packets, 1 bit an element, the preconditioner as `codes`, 8 bits, its residual, and
    the weights' replica; master weights and the owner's residual are the owner's. Gradients live until they are in the
    payload. `extra`: what the algorithm's frozen state adds, fp32 [shard], the owner's. `sent`: what this step went
    through; None if no rank has a gradient.
    """

    def __init__(
        self,
        masters: MasterWeights,
        comm: Communicator,
        codec: Codec,
        algorithm: Algorithm,
        clock: Clock,
        step: Step,
        parameters: Parameters,
        state: FrozenState,
        *,
        reversible: bool,
    ) -> None:
        self.bucket = bucket = masters.bucket
        self.layout: BucketLayout = bucket.layout
        self.momentum = state.momentum
        self.codes = state.codes
        self.ranges = state.ranges
        self.extra = state.extra
        self._masters = masters
        self._comm = comm
        self._algorithm = algorithm
        self._clock = clock
        self._step = step
        self._parameters = parameters
        self._group_of = {slot.parameter: parameters.group_number(slot.parameter) for slot in self.layout.slots}
        self._tables = table(self.ranges[:, 0], self.ranges[:, 1])
        self._table_of = {slot.parameter: one for slot, one in zip(self.layout.slots, self._tables, strict=True)}
        self._segments = segments_of(self.layout)
        self._gradients: dict[int, Tensor] = {}  # held until all are there
        masked = self.codes == 0
        self._has_zero_variance = bool(masked[: self.layout.numel].any())
        # Padding is held too, as it is zero. A mask is made again when it is needed: it would take a byte an element.
        held = held_coordinates(masked)
        self._few_held = None if held is masked else held
        self.exchange = LowMemoryExchange(
            comm,
            self.layout.numel,
            codec,
            bucket=bucket.index,
            device=bucket.flat.device,
            residual_dtype=torch.float32 if bucket.dtype == torch.float32 else torch.bfloat16,
            reversible=reversible,
        )
        self.exchange.owner_residual = state.owner_residual
        self.exchange.mask = bucket.shard_of(self.codes) if self._has_zero_variance else None
        self.sent: LowMemoryExchange | None = None
        self._incomplete = False
        self._beside = OwnPackets(bucket.shard_of(self.codes)) if masters.offloaded else None

    # What a backward does

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Leave the gradient in `.grad`, where further backwards add to it."""

    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Hold the gradient until leg 1."""
        assert parameter.grad is not None
        gradient = parameter.grad.contiguous().view(-1)
        if self._step.sketch is not None:
            self._step.sketch.add(gradient, slot.parameter)
        self._gradients[slot.parameter] = gradient
        if self._step.frees_gradients:
            parameter.grad = None

    def leave_out(self, slot: Slot, expected: bool) -> None:
        """Count a parameter that has no gradient on this rank as zero; `expected`: nor on any other."""
        self._incomplete |= not expected

    @property
    def may_stay(self) -> bool:
        """Whether `stay` can take the place of a transfer: with one β₁ for all of the bucket."""
        return len({one.beta1 for one in self._settings().values()}) == 1

    def stay(self) -> None:
        """Every rank's gradients are 0 in this step: send nothing."""

    def start(self) -> None:
        """Leg 1."""
        flags = Flags.INCOMPLETE if self._incomplete else Flags.NONE
        self.exchange.start(self._clock.steps, flags, self._step.settings, self._encoder())
        self.sent = self.exchange
        self._gradients = {}
        self._incomplete = False

    def advance(self) -> None:
        """Average what leg 1 brought, and start leg 2."""
        clip = self._step.clip
        if not may_clip(clip):
            self.exchange.advance()
            return
        self.exchange.scale_step(clip)
        kept = self._decayed_momentum()

        def adjust(average: Tensor, place: slice) -> None:
            torch.lerp(kept[place], average, clip, out=average)

        self.exchange.advance(adjust)

    def wait(self) -> None:
        """Wait for leg 2."""
        self.exchange.wait()
        if self._beside is not None:
            self._beside.bring(self.exchange.arrived(self._comm.rank))

    def end_step(self) -> None:
        """Forget a step that was not applied."""
        self.exchange.revert()
        self.sent = None
        self._gradients = {}

    # What a step does; the clock counts it already

    def outcome(self) -> Outcome:
        """What the headers said, the same on every rank; before the step is counted."""
        return self.exchange.outcome()

    @torch.no_grad()
    def take_over(self) -> None:
        """Take the new u over, and the residuals of this step."""
        if self.sent is None:
            # What the average of every rank's β₁ u is, without an exchange; residuals wait for the next one.
            self.exchange.codec.scale(self.momentum, next(iter(self._settings().values())).beta1)
            if self._beside is not None:
                self._beside.take([self.momentum[self._comm.rank : self._comm.rank + 1]])
            return
        self.momentum = self.exchange.take_packets()
        self.exchange.commit()
        if self._has_zero_variance:
            self.exchange.hold_zero(self.codes == 0 if self._few_held is None else self._few_held)

    @torch.no_grad()
    def take_over_into(self, members: MembersByGroup) -> None:
        """Take the new u over, and add the own shard's cuts: the momentum is u before, the averages u after."""
        before = self.own_momentum()
        self.take_over()
        after = self.own_momentum()
        if self._has_zero_variance:
            after.mul_(self.bucket.shard_of(self.codes).ne(0))
        self._add_cuts(members, before, after)

    def _add_cuts(self, members: MembersByGroup, momentum: Tensor, average: Tensor) -> None:
        """Add the own shard's runs, with these momenta and averages, fp32 [shard]."""
        form = self._algorithm.form
        assert form.denominators is not None
        # They move only after the host has waited for what is found with them.
        weights = self._masters.weights.to(average.device, non_blocking=True)
        for run in self.bucket.own_runs:
            state = {form.momentum: momentum[run.place], form.denominators: self._denominator(run)}
            state |= {name: values[run.place] for name, values in self.extra.items()}
            members.add(self._group_of[run.parameter], run.parameter, weights[run.place], average[run.place], state)

    @torch.no_grad()
    def move(self, seed: int) -> None:
        """Move master weights and replica by u; `seed` of the replica's stochastic rounding."""
        layout, first = self.layout, self._comm.rank * self.layout.shard
        if self._beside is not None:
            low, high = self.bucket.own_range
            own = self._beside.packets(self.exchange.codec)
            state = packed.PackedState(own, self._beside.codes, layout.shard, high - low, layout.block_size)
            runs = self._masters.runs
            segments = Segments((run.place.start, run.numel) for run in runs)
            self._move(state, segments, [run.parameter for run in runs], self._masters.weights, 0, 0)
        elif self._masters.separate:
            self._move_at(first, self._masters.weights, 0)
        self._move_at(0, self.bucket.flat[: layout.numel], seed)

    def own_momentum(self) -> Tensor:
        """What the packets say of u in the own shard, fp32 [shard]."""
        rank = self._comm.rank
        values = torch.empty(self.layout.shard, device=self.momentum.device)
        low, high = self.bucket.own_range
        self.exchange.codec.decode(self.momentum[rank : rank + 1], values, high - low)
        return values

    # Parts

    def _settings(self) -> dict[int, AdamSettings]:
        """The hyperparameters of this bucket's parameter groups now."""
        return {group: self._parameters.settings(group) for group in set(self._group_of.values())}

    def _packed_state(self) -> packed.PackedState:
        layout = self.layout
        return packed.PackedState(self.momentum, self.codes, layout.shard, layout.numel, layout.block_size)

    def _encoder(self) -> EncodePart:
        """What makes and encodes a part of the payload."""
        numbers = [slot.parameter for slot in self.layout.slots]
        gradients = [self._gradients.get(number) for number in numbers]
        settings = self._settings()
        beta1 = [settings[self._group_of[number]].beta1 for number in numbers]
        divisors = [self._step.loss_scale / self._algorithm.scale(number) for number in numbers]
        state = self._packed_state()

        def encode(place: slice, packets: Tensor, header: bytes) -> None:
            assert self.exchange.worker_residual is not None
            execute(
                packed.EncodePackedPayload(
                    state,
                    self._segments,
                    gradients,
                    beta1,
                    divisors,
                    tables=self._tables,
                    residual=self.exchange.worker_residual,
                    lost=self.exchange.next_residual,
                    packets=packets,
                    part=part_of(self.exchange, place, header),
                )
            )

        return encode

    def _move_at(self, first: int, weights: Tensor, seed: int) -> None:
        """Move `weights`, which begin at element `first` of the bucket, by this step's u."""
        numbers = [slot.parameter for slot in self.layout.slots]
        self._move(self._packed_state(), self._segments, numbers, weights, first, seed)

    def _move(
        self,
        state: packed.PackedState,
        segments: Segments,
        numbers: Sequence[int],
        weights: Tensor,
        first: int,
        seed: int,
    ) -> None:
        """`numbers`: of the parameters of `segments`."""
        trained = {slot.parameter for slot, one in self.bucket.members() if one.requires_grad and slot.numel}
        settings, rates = self._settings(), [(0.0, 1.0)] * len(numbers)
        for place, number in enumerate(numbers):
            if number in trained:
                rates[place] = self._algorithm.rates(number, settings[self._group_of[number]], self._clock)
        moves = [number in trained for number in numbers]
        rate, decay = [rate for rate, _ in rates], [decay for _, decay in rates]
        execute(packed.MovePacked(state, segments, weights, first, moves, rate, decay, seed), [weights])

    def _decayed_momentum(self) -> Tensor:
        """What clipping leaves of the owner's average, β₁ u + (1 - β₁) ḡ / (√v̂ + ε), as it is: β₁ u, fp32 [shard]."""
        kept, settings = self.own_momentum(), self._settings()
        for run in self.bucket.own_runs:
            kept[run.place].mul_(settings[self._group_of[run.parameter]].beta1)
        return kept

    def _denominator(self, run: Run) -> Tensor:
        """√v̂ + ε as the preconditioner has it, infinite where coordinates stay."""
        codes = self.bucket.shard_of(self.codes)[run.place]
        inverse: Tensor = self._table_of[run.parameter][codes.int()]
        return inverse.reciprocal_()
