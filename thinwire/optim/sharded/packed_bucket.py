"""One bucket of packed state: as the freeze makes it and a checkpoint holds it; what a rank keeps of it and sends; how
every replica follows the owners' master weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.compress.codecs import CastCodec, Codec, held_coordinates
from thinwire.compress.exchange import EncodePart, Exchange, hold_zero
from thinwire.compress.hierarchical_exchange import HierarchicalExchange
from thinwire.compress.kernels import bucket_reference
from thinwire.compress.kernels.buckets import EncodePackedPayload, MovePacked, PackedState, Segments
from thinwire.compress.kernels.calls import StoreRounded
from thinwire.compress.kernels.loading import execute
from thinwire.compress.kernels.reference import decode_blocks, encode_decoded
from thinwire.compress.light_exchanges import ExchangeToOwners
from thinwire.compress.packet_layout import CODE_BITS, HEADER_BYTES
from thinwire.optim import storage
from thinwire.optim.bucket import Bucket, Shared, part_of
from thinwire.optim.step import Send
from thinwire.zero.master_weights import FlatBucket, MasterWeights, Run, runs_in

_FUSED = "sign1"
"""The codec whose packets kernels read beside codes of 8 bits."""


class PackedBucket(Bucket):
    """One bucket of packed storage; u stands for the momentum divided by √v̂ + ε, as everywhere.

    `state` is this rank's shard, fp32 [shard]: the warmup's moments beside the master weights; once frozen what the
    algorithm adds. Every rank then keeps u as leg 2's packets, with sign1 1 bit an element, the preconditioner as
    `codes`, 8 bits, its residual, and the weights' replica; master weights and the owner's residual are the owner's.
    `own_momenta`: u of the own shard before this step and after it, if the algorithm asks for more than the form says.
    One kernel each makes packets of packets, and moves weights by them, of sign1; those of other codecs are decoded
    first, and by node those of every codec, as sums of nodes leave.
    """

    def __init__(self, master_weights: MasterWeights, shared: Shared, state: dict[str, Tensor]) -> None:
        flat = master_weights.bucket
        super().__init__(flat.index, flat.layout, shared, state=state)
        self.flat = flat
        self.master_weights = master_weights
        self.own_momenta: tuple[Tensor, Tensor] | None = None
        self._rank = shared.wire.comm.rank
        self._beside: OwnPackets | None = None

    averages_shards = True

    def begin_packed(self, frozen: FrozenState, *, reversible: bool) -> None:
        """Begin the frozen stage, without residuals; momentum and denominators are in `frozen` from now on. One that
        has begun goes on from `frozen`, in the same exchange."""
        form = self._algorithm.form
        self.state = {name: one for name, one in self.state.items() if name not in (form.momentum, form.denominators)}
        self.momentum, self.codes, self.ranges = frozen.momentum, frozen.codes, frozen.ranges
        self._tables = storage.table(self.ranges[:, 0], self.ranges[:, 1])
        self._has_zero_variance = bool((self.codes[: self.layout.numel] == 0).any())
        self.__dict__.pop("_few_held", None)
        if self._compressed is None:
            self._legs = self._wire.compressed(self.layout, self.index, self.device, reversible=reversible)
            self._compressed = self._legs
        elif self._legs.worker_residual is not None:
            self._legs.worker_residual.zero_()
        self._legs.owner_residual = frozen.lost
        self._legs.mask = self.flat.shard_of(self.codes) if self._has_zero_variance else None
        self._beside = OwnPackets(self.flat.shard_of(self.codes)) if self.master_weights.offloaded else None

    @property
    @override
    def compressed(self) -> Exchange:
        return self._legs

    @property
    @override
    def owned(self) -> list[str]:
        return list(self.state)

    @override
    def prepare(self, send: Send) -> None:
        """In a warmup whose averages are exact nothing: see `PackedStorage.gradients`."""
        self.send = send
        self._holds_gradients = True
        if send is not Send.EXACT:
            self.exchange, self.averaging, self.rounds_averages = self._legs, None, False
        elif self._wire.rounds_averages:
            super().prepare(send)

    # What a backward does

    @property
    @override
    def may_stay(self) -> bool:
        """With one β₁ for all of the bucket."""
        return len(set(self.payload_factors()[0])) == 1

    @override
    def kept_of_own(self) -> Tensor:
        """Of β₁ u + (1 - β₁) ḡ / (√v̂ + ε), β₁ u."""
        kept, betas = self.own_momentum(), dict(zip(self._numbers, self.payload_factors()[0], strict=True))
        for run in self.flat.own_runs:
            kept[run.place].mul_(betas[run.parameter])
        return kept

    @override
    def wait(self) -> None:
        if isinstance(self.sent, ExchangeToOwners):
            self._average = self.sent.average_of_own
            if self._step.divide_first != 1.0:
                self._average.mul_(self._step.divide_first)
            return
        self._legs.wait()
        if self._beside is not None:
            self._beside.bring([leg.received[self._rank : self._rank + 1] for leg in self._legs.brought])

    @override
    def _encoder(self) -> EncodePart | None:
        gradients = [self._gradients.get(number) for number in self._numbers]
        factors, state, legs = self.payload_factors(), self._packed_state(), self._legs
        if legs.codec.name != _FUSED or isinstance(legs, HierarchicalExchange):
            legs.codec.decode(self.momentum, legs.payload, self.layout.numel)
            bucket_reference.write_packed_payload(
                legs.payload, self.codes, self.segments, gradients, *factors, tables=self._tables
            )
            return None

        def encode(place: slice, packets: Tensor, header: bytes) -> None:
            assert legs.worker_residual is not None
            execute(
                EncodePackedPayload(
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

    @cached_property
    def _few_held(self) -> Tensor | None:
        """The coordinates that stay, and padding, as it is zero; None if they are many. A mask is made again when it is
        needed: it would take a byte an element."""
        mask = self.codes == 0
        held = held_coordinates(mask)
        return None if held is mask else held

    # What a step does; the clock counts it already

    @override
    @torch.no_grad()
    def receive(self) -> None:
        """Take the new u over, and the residuals of this step; averages stay where they are."""
        if self.send is Send.EXACT:
            if self._average is not None:
                self.exchange.commit()
            return
        before = self.own_momentum() if self._algorithm.form.update is None else None
        if self.sent is None:
            # What the average of every rank's β₁ u is, without an exchange; residuals wait for the next one.
            self._legs.codec.scale(self.momentum, self.payload_factors()[0][0])
            if self._beside is not None:
                self._beside.bring([self.momentum[self._rank : self._rank + 1]], wait=True)
        else:
            self.momentum = self._legs.take_packets()
            self._legs.commit()
            if self._has_zero_variance:
                hold_zero(self._legs, self.codes == 0 if self._few_held is None else self._few_held)
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
        state, factors, calls = self._packed_state(), (moves, rates, decays), []
        if self._beside is not None:
            low, high = self.flat.own_range
            own = self._beside.packets(self._legs.codec.join)
            of_own = PackedState(own, self._beside.codes, layout.shard, high - low, layout.block_size)
            runs = self.master_weights.runs
            segments = Segments((run.place.start, run.numel) for run in runs)
            places = [self._numbers.index(run.parameter) for run in runs]
            moved, rate, decay = ([column[place] for place in places] for column in factors)
            calls.append(MovePacked(of_own, segments, weights, 0, list(map(bool, moved)), rate, decay, 0))
        elif self.master_weights.separate:
            first = self._rank * layout.shard
            calls.append(MovePacked(state, self.segments, weights, first, *factors, seed=0))
        replica, seed = self.flat.flat[: layout.numel], ((self._clock.steps - 1) << 20) + self.flat.seed
        calls.append(MovePacked(state, self.segments, replica, 0, *factors, seed=seed))
        for call in calls:
            if self._legs.codec.name == _FUSED:
                execute(call, [call.weights])
                continue
            u = torch.empty(call.state.codes.numel(), device=call.device)
            self._legs.codec.decode(call.state.packets, u, call.state.numel)
            execute(StoreRounded(call.weights, bucket_reference.moved_by(call, u), call.seed), [call.weights])

    def own_momentum(self) -> Tensor:
        """What the packets say of u in the own shard, fp32 [shard]."""
        values = torch.empty(self.layout.shard, device=self.momentum.device)
        low, high = self.flat.own_range
        self._legs.codec.decode(self.momentum[self._rank : self._rank + 1], values, high - low)
        return values

    def saved_momentum(self) -> Tensor:
        """What the packets say of u in the own shard, fp32 [shard] and any values in the padding: the same values,
        read as the specification does."""
        codec, shard, packet = self._legs.codec, self.layout.shard, self.momentum[self._rank]
        if isinstance(codec, CastCodec):
            return codec.values(packet[None]).float().view(-1)
        split = packet.numel() - shard * CODE_BITS[codec.name] // 8
        scales, codes = packet[HEADER_BYTES:split].clone().view(torch.float32), packet[split:]
        return decode_blocks(codec.name, scales, codes.reshape(shard // codec.scale_block, -1), torch.float32).view(-1)

    def range_of(self, parameter: int) -> Tensor:
        """The least and the greatest value of a parameter's preconditioner, fp32 [2]."""
        return self.ranges[self._numbers.index(parameter)]

    def denominators(self, run: Run) -> Tensor:
        """√v̂ + ε of a run of the own shard as the preconditioner has it, infinite where coordinates stay."""
        codes = self.flat.shard_of(self.codes)[run.place]
        inverse: Tensor = self._tables[self._numbers.index(run.parameter)][codes.int()]
        return inverse.reciprocal_()

    def _packed_state(self) -> PackedState:
        layout = self.layout
        return PackedState(self.momentum, self.codes, layout.shard, layout.numel, layout.block_size)


@dataclass(frozen=True)
class FrozenState:
    """Momentum u divided by √v̂ + ε, and the preconditioner, of one bucket, as every rank keeps them.

    `momentum`: u as packets, uint8 [ranks, packet_bytes]. `codes`: the preconditioner, uint8 [padded_numel]. `ranges`:
    its least and greatest value in each parameter, fp32 [parameters, 2]. `lost`: what packing lost of the own shard,
    fp32 [shard].
    """

    momentum: Tensor
    codes: Tensor
    ranges: Tensor
    lost: Tensor


class OwnPackets:
    """The owner's own packets of every step, on the host, for master weights there, and the preconditioner's codes,
    uint8 [shard], which never change."""

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes.cpu()
        self._parts: list[Tensor] = []

    def bring(self, parts: Sequence[Tensor], *, wait: bool = False) -> None:
        """Start copying the own packets of each part, uint8 [1, bytes], into page-locked memory, or `wait` for them.

        They are there when the host has waited for anything that the device does later, as for the step's headers.
        """
        if [one.shape for one in parts] != [one.shape for one in self._parts]:
            self._parts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in parts]
        for held, part in zip(self._parts, parts, strict=True):
            held.copy_(part, non_blocking=not wait)

    def packets(self, join: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Put together what was brought, uint8 [1, packet_bytes]."""
        return self._parts[0] if len(self._parts) == 1 else join(self._parts)


def ranges_of(comm: Communicator, cuts: Sequence[tuple[int, Tensor]], count: int, device: torch.device) -> Tensor:
    """Raise the smallest denominators, of all ranks' `cuts` by parameter, to a hundredth of their parameter's mean, and
    return each of `count` parameters' range of their inverses: fp32 [parameters, 2]. Collective."""
    sums = torch.zeros(count, 2, dtype=torch.float64, device=device)
    for parameter, denominators in cuts:
        finite = torch.isfinite(denominators)
        sums[parameter, 0] += torch.where(finite, denominators, 0.0).sum(dtype=torch.float64)
        sums[parameter, 1] += finite.sum()
    comm.all_reduce(sums)
    smallest = storage.SMALLEST_OF_MEAN * sums[:, 0] / sums[:, 1].clamp(min=1)
    highest = torch.zeros(count, dtype=torch.float64, device=device)
    for parameter, denominators in cuts:
        denominators.clamp_(min=float(smallest[parameter]))
        finite = torch.where(torch.isfinite(denominators), denominators, 0.0)
        highest[parameter] = torch.maximum(highest[parameter], finite.max().double())
    lowest = torch.full_like(highest, -float("inf"))
    for parameter, denominators in cuts:
        lowest[parameter] = torch.maximum(lowest[parameter], -denominators.min().double())
    comm.all_reduce(highest, "max")
    comm.all_reduce(lowest, "max")
    # A parameter that stays altogether has no range; any will do, as none of its codes is used.
    moving = highest > 0
    low = torch.where(moving, 1 / highest, 1.0)
    high = torch.where(moving, -1 / lowest, 1.0)
    return torch.stack([low, high], dim=1).float()


def publish(bucket: FlatBucket, codec: Codec, u: Tensor, own_codes: Tensor, ranges: Tensor) -> FrozenState:
    """Give the own shard of u, fp32 [shard], and of the codes to all ranks; what u's packets lost is left in it."""
    layout = bucket.layout
    codes = torch.empty(layout.padded_numel, dtype=torch.uint8, device=u.device)
    bucket.gathering.all_gather(codes, own_codes)
    own = torch.zeros(1, codec.packet_bytes(layout.shard), dtype=torch.uint8, device=u.device)
    first, last = bucket.own_range
    codec.encode(u, None, own, last - first)
    u.masked_fill_(own_codes == 0, 0.0)
    momentum = torch.empty(layout.world_size, own.shape[1], dtype=torch.uint8, device=u.device)
    bucket.gathering.all_gather(momentum.view(-1), own.view(-1))
    return FrozenState(momentum, codes, ranges[[slot.parameter for slot in layout.slots]], u)


def read_packed(bucket: FlatBucket, codec: Codec, names: Sequence[str], read: storage.Read) -> FrozenState:
    """Read packed state for this number of ranks; KeyError if something was not saved."""
    layout = bucket.layout
    codes = torch.zeros_like(bucket.flat, dtype=torch.uint8)
    u = torch.zeros_like(bucket.flat, dtype=torch.float32)
    ranges = dict.fromkeys((slot.parameter for slot in layout.slots), torch.ones(2))
    ends = storage.PRECONDITIONER_LOW, storage.PRECONDITIONER_HIGH
    for run in runs_in(layout, slice(0, layout.numel)):  # of a parameter without elements nothing was saved
        name = names[run.parameter]
        codes[run.place].copy_(read(storage.PACKED_PRECONDITIONER, name, 0, run.numel))
        u[run.place].copy_(read(storage.PACKED_MOMENTUM, name, 0, run.numel))
        ranges[run.parameter] = torch.cat([read(end, name, 0, 1) for end in ends])
    momentum = _pack(u, layout.numel, codec, layout.world_size)
    return FrozenState(momentum, codes, torch.stack(list(ranges.values())).to(u.device), bucket.shard_of(u).clone())


def _pack(u: Tensor, numel: int, codec: Codec, ranks: int) -> Tensor:
    """Packets that decode to `u` to the last bit where blocks are cut as they were; what is lost where not is left."""
    if isinstance(codec, CastCodec):
        packets = torch.zeros(ranks, codec.packet_bytes(u.numel() // ranks), dtype=torch.uint8, device=u.device)
        codec.encode(u, None, packets, numel)
        return packets
    blocks = u.view(-1, codec.scale_block)
    valid = (torch.arange(u.numel(), device=u.device) < numel).view_as(blocks)
    scales, codes = encode_decoded(codec.name, blocks, valid)
    blocks.sub_(decode_blocks(codec.name, scales, codes, u.dtype)).masked_fill_(~valid, 0.0)
    header = torch.zeros(ranks, HEADER_BYTES, dtype=torch.uint8, device=u.device)
    return torch.cat([header, scales.view(ranks, -1).view(torch.uint8), codes.view(ranks, -1)], dim=1)
