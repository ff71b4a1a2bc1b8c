"""One bucket of packed state: what a rank keeps of it, what it sends, and how every replica follows the owners' master
weights."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.exchange import EncodePart, held_coordinates
from thinwire.compress.kernels import packed
from thinwire.compress.kernels.buckets import Segments
from thinwire.compress.kernels.loading import execute
from thinwire.optim.algorithm import Algorithm
from thinwire.optim.bucket import Bucket, may_clip, part_of
from thinwire.optim.preconditioner import table
from thinwire.optim.sharded.packing import FrozenState, OwnPackets
from thinwire.optim.step import Clock, Parameters, Send, Step
from thinwire.optim.wire import Wire
from thinwire.zero.master_weights import MasterWeights, Run


class PackedBucket(Bucket):
    """One bucket of packed storage; u stands for the momentum divided by √v̂ + ε, as everywhere.

    `state` is this rank's shard, fp32 [shard]: the warmup's moments beside the master weights; once frozen what the
    algorithm adds. Every rank then keeps u as leg 2's packets, 1 bit an element, the preconditioner as `codes`, 8 bits,
    its residual, and the weights' replica; master weights and the owner's residual are the owner's. `own_momenta`: u of
    the own shard before this step and after it, if the algorithm asks for more than the form says.
    """

    def __init__(
        self,
        master_weights: MasterWeights,
        parameters: Parameters,
        wire: Wire,
        algorithm: Algorithm,
        clock: Clock,
        step: Step,
        state: dict[str, Tensor],
    ) -> None:
        flat = master_weights.bucket
        super().__init__(flat.index, flat.layout, parameters, wire, algorithm, clock, step, state=state)
        self.flat = flat
        self.master_weights = master_weights
        self.own_momenta: tuple[Tensor, Tensor] | None = None
        self._rank = wire.comm.rank
        self._beside: OwnPackets | None = None

    def begin_packed(self, frozen: FrozenState, *, reversible: bool) -> None:
        """Begin the frozen stage; momentum and denominators are in `frozen` from now on."""
        form = self._algorithm.form
        self.state = {name: one for name, one in self.state.items() if name not in (form.momentum, form.denominators)}
        self.momentum, self.codes, self.ranges = frozen.momentum, frozen.codes, frozen.ranges
        self._tables = table(self.ranges[:, 0], self.ranges[:, 1])
        masked = self.codes == 0
        self._has_zero_variance = bool(masked[: self.layout.numel].any())
        # Padding is held too, as it is zero. A mask is made again when it is needed: it would take a byte an element.
        held = held_coordinates(masked)
        self._few_held = None if held is masked else held
        self._legs = self._wire.low_memory(self.layout, self.index, self.device, reversible=reversible)
        self._legs.owner_residual = frozen.lost
        self._legs.mask = self.flat.shard_of(self.codes) if self._has_zero_variance else None
        self._compressed = self._legs
        self._beside = OwnPackets(self.flat.shard_of(self.codes)) if self.master_weights.offloaded else None

    @property
    @override
    def owned(self) -> list[str]:
        return list(self.state)

    @override
    def prepare(self, send: Send) -> None:
        self.send = send
        self._holds_gradients = True
        if send is not Send.EXACT:
            self.exchange = self._legs

    # What a backward does

    @property
    @override
    def may_stay(self) -> bool:
        """With one β₁ for all of the bucket."""
        return len(set(self.payload_factors()[0])) == 1

    @override
    def advance(self) -> None:
        clip = self._step.clip
        if not may_clip(clip):
            self._legs.advance()
            return
        self._legs.scale_step(clip)
        # What clipping leaves of the average, β₁ u + (1 - β₁) ḡ / (√v̂ + ε), as it is.
        kept, betas = self.own_momentum(), dict(zip(self._numbers, self.payload_factors()[0], strict=True))
        for run in self.flat.own_runs:
            kept[run.place].mul_(betas[run.parameter])

        def adjust(average: Tensor, place: slice) -> None:
            torch.lerp(kept[place], average, clip, out=average)

        self._legs.advance(adjust)

    @override
    def wait(self) -> None:
        self._legs.wait()
        if self._beside is not None:
            self._beside.bring(self._legs.arrived(self._rank))

    @override
    def _encoder(self) -> EncodePart:
        gradients = [self._gradients.get(number) for number in self._numbers]
        factors, state, legs = self.payload_factors(), self._packed_state(), self._legs

        def encode(place: slice, packets: Tensor, header: bytes) -> None:
            assert legs.worker_residual is not None
            execute(
                packed.EncodePackedPayload(
                    state,
                    self.segments,
                    gradients,
                    *factors,
                    tables=self._tables,
                    residual=legs.worker_residual,
                    lost=legs.next_residual,
                    packets=packets,
                    part=part_of(legs, place, header),
                )
            )

        return encode

    # What a step does; the clock counts it already

    @override
    @torch.no_grad()
    def receive(self) -> None:
        """Take the new u over, and the residuals of this step; exact averages lie elsewhere."""
        if self.send is Send.EXACT:
            return
        before = self.own_momentum() if self._algorithm.form.update is None else None
        if self.sent is None:
            # What the average of every rank's β₁ u is, without an exchange; residuals wait for the next one.
            self._legs.codec.scale(self.momentum, self.payload_factors()[0][0])
            if self._beside is not None:
                self._beside.take([self.momentum[self._rank : self._rank + 1]])
        else:
            self.momentum = self._legs.take_packets()
            self._legs.commit()
            if self._has_zero_variance:
                self._legs.hold_zero(self.codes == 0 if self._few_held is None else self._few_held)
        if before is not None:
            after = self.own_momentum()
            if self._has_zero_variance:
                after.mul_(self.flat.shard_of(self.codes).ne(0))
            self.own_momenta = before, after

    @torch.no_grad()
    def move(self) -> None:
        """Move master weights and replica by u; the replica is rounded stochastically, with one seed on all ranks."""
        self.own_momenta = None
        layout, weights = self.layout, self.master_weights.weights
        rates, decays = self.rates(self._clock)
        moves = [
            one.requires_grad and slot.numel > 0 for slot, one in zip(layout.slots, self.flat.parameters, strict=True)
        ]
        state, factors = self._packed_state(), (moves, rates, decays)
        if self._beside is not None:
            low, high = self.flat.own_range
            own = self._beside.packets(self._legs.codec.join)
            of_own = packed.PackedState(own, self._beside.codes, layout.shard, high - low, layout.block_size)
            runs = self.master_weights.runs
            segments = Segments((run.place.start, run.numel) for run in runs)
            places = [self._numbers.index(run.parameter) for run in runs]
            moved, rate, decay = ([column[place] for place in places] for column in factors)
            execute(packed.MovePacked(of_own, segments, weights, 0, list(map(bool, moved)), rate, decay, 0), [weights])
        elif self.master_weights.separate:
            first = self._rank * layout.shard
            execute(packed.MovePacked(state, self.segments, weights, first, *factors, seed=0), [weights])
        replica, seed = self.flat.flat[: layout.numel], ((self._clock.steps - 1) << 20) + self.index
        execute(packed.MovePacked(state, self.segments, replica, 0, *factors, seed=seed), [replica])

    def own_momentum(self) -> Tensor:
        """What the packets say of u in the own shard, fp32 [shard]."""
        values = torch.empty(self.layout.shard, device=self.momentum.device)
        low, high = self.flat.own_range
        self._legs.codec.decode(self.momentum[self._rank : self._rank + 1], values, high - low)
        return values

    def range_of(self, parameter: int) -> Tensor:
        """The least and the greatest value of a parameter's preconditioner, fp32 [2]."""
        return self.ranges[self._numbers.index(parameter)]

    def denominators(self, run: Run) -> Tensor:
        """√v̂ + ε of a run of the own shard as the preconditioner has it, infinite where coordinates stay."""
        codes = self.flat.shard_of(self.codes)[run.place]
        inverse: Tensor = self._tables[self._numbers.index(run.parameter)][codes.int()]
        return inverse.reciprocal_()

    def _packed_state(self) -> packed.PackedState:
        layout = self.layout
        return packed.PackedState(self.momentum, self.codes, layout.shard, layout.numel, layout.block_size)
