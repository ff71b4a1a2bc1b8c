"""One bucket of an algorithm: its state, its exchanges, and what a backward and a step do with it. The form of a
compressed step is executed for the whole bucket: gradients, held from the moment each arrives until all are there,
become packets without a copy in between, and packets that came back move the weights in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.codecs import held_coordinates
from thinwire.compress.exchange import EncodePart, Exchange, hold_zero, zero_held
from thinwire.compress.kernels.bucket_reference import move_weights, write_payload
from thinwire.compress.kernels.buckets import Part, Segments
from thinwire.compress.kernels.calls import DecodeAndMove, EncodePayload
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet import Flags
from thinwire.optim.algorithm import Algorithm, Keep, LocalSteps
from thinwire.optim.step import Clock, Contribution, Parameters, Send, Step
from thinwire.optim.wire import Wire, cast_gradients
from thinwire.zero import BucketLayout, Slot


@dataclass(frozen=True)
class Shared:
    """What a freeze group shares with its storage and its buckets; `step` and `wire` with other groups too."""

    parameters: Parameters
    algorithm: Algorithm
    clock: Clock
    wire: Wire
    step: Step


class Bucket:
    """A flat run of parameters with an algorithm's state, and the transport of their gradients.

    `state`: by name; what every rank holds is [padded_numel], as the exchange pads. `send`: what the step in flight
    sends, and `exchange`, what it goes through; a local step only uses its payload. `zero_variance`: the
    `held_coordinates` of [padded_numel], which do not move; None if there are none. `sent`: what this step's payload
    went through; None before, and if nothing was sent. `stayed`: whether nothing was, since every parameter was left
    out. `rewritten`: whether averages that have arrived were written into. `rounds_averages`: whether EXACT steps leave
    residuals that the next ones send, those of `averaging`, times `residual_scale`; not any more once frozen.
    `segments`: where the parameters lie, for kernels over the whole bucket. `shards_state`: whether state that the
    algorithm has its owner keep is of this rank's shard only.
    """

    def __init__(
        self, index: int, layout: BucketLayout, shared: Shared, *, state: dict[str, Tensor], shards_state: bool = False
    ) -> None:
        self.index = index
        self.layout = layout
        self.state = state
        self.shards_state = shards_state
        self.send = Send.EXACT
        self.zero_variance: Tensor | None = None
        self.sent: Exchange | None = None
        self.stayed = self.rewritten = False
        self.segments = Segments(sorted((slot.offset, slot.numel) for slot in layout.slots))
        self._parameters, self._algorithm = shared.parameters, shared.algorithm
        self._clock, self._wire, self._step = shared.clock, shared.wire, shared.step
        self._local = shared.algorithm if isinstance(shared.algorithm, LocalSteps) else None
        self._numbers = [slot.parameter for slot in layout.slots]
        self._groups = [shared.parameters.group_of[number] for number in self._numbers]
        self.device = shared.parameters.parameters[self._numbers[0]].device
        self._gradients: dict[int, Tensor] = {}  # contiguous, by parameter
        self._received = self._incomplete = self.rounds_averages = False
        self._average: Tensor | None = None  # of an EXACT step, once it has been read
        self.averaging: Exchange | None = None
        self.residual_scale = 1.0
        self._compressed: Exchange | None = None

    # State

    @property
    def owned(self) -> list[str]:
        """The names of state that this rank holds of its own shard only."""
        keeps = self._algorithm.state.items() if self.shards_state else ()
        return [name for name, keep in keeps if keep is Keep.OWNER and name in self.state]

    @property
    def whole_state(self) -> dict[str, Tensor]:
        """The state of the whole bucket that this rank holds; owners may hold more."""
        owned = self.owned
        return {name: values for name, values in self.state.items() if name not in owned}

    def contribution(self, slot: Slot) -> Contribution:
        """What the algorithm sees of one parameter."""
        place, group = place_of(slot), self._parameters.group_of[slot.parameter]
        state = {name: values[place] for name, values in self.whole_state.items()}
        return Contribution(slot.parameter, group, self._parameters.settings(group), state, self._wire.ranks)

    def find_zero_variance(self, *, anew: bool = False) -> None:
        """Find the coordinates that stay, and forget what compression lost there, or with `anew` everywhere."""
        if anew:
            self._compressed = None
        denominators = self.state.get(self._algorithm.form.denominators or "")
        mask = None if denominators is None else torch.isinf(denominators)
        self.zero_variance = held_coordinates(mask) if mask is not None and bool(mask.any()) else None
        if self.zero_variance is not None and self._compressed is not None:
            hold_zero(self._compressed, self.zero_variance)

    @property
    def compressed(self) -> Exchange:
        """The exchange that keeps the residuals."""
        if self._compressed is None:
            self._compressed = self._wire.compressed(self.layout, self.index, self.device)
        return self._compressed

    def prepare(self, send: Send) -> None:
        """Be ready for the kind of step that comes next, before its first gradient arrives."""
        self.send = send
        self.rounds_averages = self._wire.rounds_averages and self._clock.frozen_at is None
        if not self.rounds_averages and (send is not Send.EXACT or self.shards_state):  # nothing is kept between steps
            self.averaging = None
        if self.averaging is None and (self.rounds_averages or send is Send.EXACT):
            self.averaging = self._wire.exact(self.layout, self.index, self.device, to_owners=self.averages_shards)
        if send is Send.EXACT:
            assert self.averaging is not None
            self.exchange = self.averaging
        else:
            self.exchange = self.compressed
        # Whether leg 1 takes gradients as they are, held until then.
        self._holds_gradients = self.exchange.takes_gradients if send is Send.EXACT else self._local is None

    # What a backward does

    averages_shards = overwrites_gradients = False

    @property
    def may_stay(self) -> bool:
        """Whether `stay` can take the place of a transfer."""
        return True

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Leave the gradient in `.grad`, where further backwards add to it."""

    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Hold a parameter's gradient until leg 1, or write what it contributes into the payload."""
        gradient = parameter.grad
        assert gradient is not None
        if self._step.sketch is not None:
            self._step.sketch.add(gradient, slot.parameter)
        if self._holds_gradients:
            self._gradients[slot.parameter] = gradient.contiguous()
        else:
            self._write_payload(slot, gradient.reshape(-1))
        if self._step.frees_gradients:
            parameter.grad = None

    @torch.no_grad()
    def leave_out(self, slot: Slot, expected: bool) -> None:
        """Count a parameter that has no gradient on this rank as zero; `expected`: nor on any other."""
        if not self._holds_gradients:
            self._write_payload(slot, None)
        self._incomplete |= not expected

    def stay(self) -> None:
        """Every rank's gradients are 0 in this step: send nothing."""
        self.stayed = True

    def start(self) -> None:
        """Leg 1; nothing in a local step."""
        if self.send is not Send.LOCAL:
            step, flags = self._step, self._step.flags | (Flags.INCOMPLETE if self._incomplete else Flags.NONE)
            if step.unplaced and any(self._parameters.parameters[number].requires_grad for number in step.unplaced):
                flags |= Flags.UNPLACED
            self.sent = self.exchange
            if self.send is Send.EXACT and self.rounds_averages:
                scale_residuals(self, step.sent_scale)
            encoder = self._encoder() if self._holds_gradients else None
            self.sent.start(step.number, flags, step.settings, encoder)
            self._gradients = {}

    def advance(self) -> None:
        """Average what leg 1 brought, clip it, and start leg 2; nothing in a local step."""
        clip = self._step.clip
        if self.sent is None:
            return
        if self.send is Send.EXACT or not may_clip(clip):
            self.sent.advance()
            return
        self.sent.scale_step(clip)
        kept = self.kept_of_own()

        def adjust(average: Tensor, place: slice) -> None:
            torch.lerp(kept[place], average, clip, out=average)

        self.sent.advance(adjust)

    def wait(self) -> None:
        """Wait for leg 2; nothing in a local step."""
        if self.sent is not None:
            self.sent.wait()

    def end_step(self) -> None:
        """Forget what this step brought, and was not applied."""
        self.sent = None
        self.stayed = self._received = self.rewritten = self._incomplete = False
        self._average = None
        self._gradients = {}
        if self._compressed is not None:
            self._compressed.revert()

    # What a step does

    def average(self) -> Tensor | None:
        """In an EXACT step the averages that have arrived, fp32 [padded_numel], which `receive` leaves as they are
        then; None before."""
        if self._average is None and not self.stayed and self.exchange.has_arrived:
            if self.rounds_averages:  # the payload is the next residual until the step is applied
                self._average = torch.empty_like(self.exchange.payload)
                self.exchange.read(self._average)
                self._average.mul_(self._step.divide_first)
            else:
                self.receive()
        return self._average

    def receive(self) -> None:
        """Write what came back into the payload, or the state that the algorithm receives; take the residuals over.

        Where nothing was sent every rank's gradient was 0, and all hold what their average would be.
        """
        if self.send is Send.EXACT:
            if not (self.stayed or self._received):
                if self.rounds_averages:
                    self.exchange.commit()
                payload, self._received = self.exchange.payload, True
                if self._average is not None:
                    payload.copy_(self._average)
                else:
                    self.exchange.read(payload)
                    if self._step.divide_first != 1.0:
                        payload.mul_(self._step.divide_first)
                self._average = payload
            return
        if not self.stayed:
            self.exchange.commit()
        form = self._algorithm.form
        output = self.exchange.payload if form.update is None else self.state[form.momentum]
        if self.stayed:
            output.copy_(self.payload_of_zeros())
        else:
            self.exchange.read(output)
        if self.zero_variance is not None:
            # Else what stays would blur its block's scale.
            zero_held(output, self.zero_variance, slice(0, output.numel()))
            hold_zero(self.exchange, self.zero_variance)

    def receive_and_move(self, weights: Sequence[Tensor | None], replicas: Sequence[Tensor | None]) -> None:
        """Do in a COMPRESSED step what the algorithm's form says, in one pass over memory if kernels read the codec.

        `weights`: of each slot, fp32, and the `replicas` that are rounded from them, None for those that have none.
        """
        form, exchange, holds = self._algorithm.form, self.sent, self.zero_variance is not None
        assert form.update is not None
        momentum, denominators = self.state[form.momentum], self.state.get(form.denominators or "")
        rates, decays = self.rates(self._clock)
        if exchange is None or not exchange.codec.has_kernels:
            self.receive()
            move_weights(form.update, self.segments, momentum, denominators, weights, replicas, rates, decays)
            return

        def decode(place: slice, packets: Tensor) -> None:
            assert form.update is not None
            execute(
                DecodeAndMove(
                    exchange.codec.name,
                    form.update,
                    self.segments,
                    packets=packets,
                    output=momentum,
                    denominators=denominators,
                    holds=holds,
                    weights=weights,
                    replicas=replicas,
                    rates=rates,
                    decays=decays,
                    part=part_of(exchange, place),
                ),
                written=[*weights, *replicas],
            )

        exchange.commit()
        exchange.read_parts(decode)
        if self.zero_variance is not None:
            hold_zero(exchange, self.zero_variance)

    def rates(self, clock: Clock) -> tuple[list[float], list[float]]:
        """By what each slot's weights move when a COMPRESSED step is counted on `clock`, and what decay leaves of
        them."""
        found: dict[int, tuple[float, float]] = {}
        for group in set(self._groups):
            numbers = [number for number, one in zip(self._numbers, self._groups, strict=True) if one == group]
            settings = self._parameters.settings(group)
            found |= zip(numbers, self._algorithm.rates(numbers, settings, clock), strict=True)
        return [found[number][0] for number in self._numbers], [found[number][1] for number in self._numbers]

    def payload_factors(self) -> tuple[list[float], list[float]]:
        """β₁, and what the gradient is divided by, of each slot."""
        betas = {group: self._parameters.settings(group).beta1 for group in set(self._groups)}
        scale, scales = self._step.sent_scale, self._algorithm.scales
        divisors = [scale / scales.get(number, 1.0) for number in self._numbers]
        return [betas[group] for group in self._groups], divisors

    def payload_of_zeros(self) -> Tensor:
        """What would be sent if every gradient were 0, fp32 [padded_numel]."""
        payload = torch.zeros_like(self.exchange.payload)
        for slot, beta1 in zip(self.layout.slots, self.payload_factors()[0], strict=True):
            out = payload[place_of(slot)]
            if self._local is None:
                torch.mul(self.state[self._algorithm.form.momentum][place_of(slot)], beta1, out=out)
            else:
                self._local.payload(None, self.contribution(slot), self._clock, out)
        return payload

    def kept_of_own(self) -> Tensor:
        """What clipping leaves as it is of the owner's average of `payload_of_zeros` and gradients, fp32 [shard]."""
        return self.payload_of_zeros()[self.exchange.owner_place]

    def _encoder(self) -> EncodePart | None:
        """What makes this step's packets of the gradients that are held, part by part; None, with all of the payload
        written, if the exchange takes nothing else."""
        exchange, form = self.exchange, self._algorithm.form
        if self.send is Send.EXACT:
            return cast_gradients(exchange, self.layout, self._gradients, self._step.divide_first)
        assert form.payload is not None
        momentum, denominators = self.state[form.momentum], self.state.get(form.denominators or "")
        gradients = [self._gradients.get(number) for number in self._numbers]
        factors = self.payload_factors()
        if not exchange.takes_encoder:
            write_payload(form.payload, self.segments, gradients, *factors, momentum, denominators, exchange.payload)
            return None

        def encode(place: slice, packets: Tensor, header: bytes) -> None:
            assert form.payload is not None
            execute(
                EncodePayload(
                    exchange.codec.name,
                    form.payload,
                    self.segments,
                    gradients,
                    *factors,
                    momentum=momentum,
                    denominators=denominators,
                    residual=exchange.worker_residual,
                    lost=exchange.next_residual,
                    packets=packets,
                    part=part_of(exchange, place, header),
                )
            )

        return encode

    def _write_payload(self, slot: Slot, gradient: Tensor | None) -> None:
        out = self.exchange.payload[place_of(slot)]
        if self.send is Send.EXACT:
            # As it is, times the loss scale, which the average is divided by.
            out.zero_() if gradient is None else out.copy_(gradient)
            if self._step.divide_first != 1.0:
                out.div_(self._step.divide_first)
            return
        assert self._local is not None
        if gradient is not None:
            divisor = self._step.sent_scale / self._algorithm.scales.get(slot.parameter, 1.0)
            if divisor != 1.0 or gradient.dtype != torch.float32:
                gradient = out.copy_(gradient)
            if divisor != 1.0:
                gradient.div_(divisor)
        own = self.contribution(slot)
        settings = self._local.payload_settings(own.settings, self._clock)
        if settings is not None:
            self._step.settings_sent.setdefault(own.group, settings)
        self._local.payload(gradient, own, self._clock, out)


def scale_residuals(bucket: Bucket, scale: float) -> None:
    """Have the residuals of EXACT steps be times this loss scale, as the gradients that they are added to."""
    exchange, factor, bucket.residual_scale = bucket.averaging, scale / bucket.residual_scale, scale
    assert exchange is not None
    for residual in (exchange.worker_residual, exchange.owner_residual):
        if residual is not None and factor != 1.0:
            residual.mul_(factor)


def may_clip(clip: float | Tensor) -> bool:
    """Whether a clip changes gradients, as far as the host knows."""
    return isinstance(clip, Tensor) or clip < 1.0


def place_of(slot: Slot) -> slice:
    """A parameter's elements in its bucket."""
    return slice(slot.offset, slot.offset + slot.numel)


def part_of(exchange: Exchange, place: slice, header: bytes | None = None) -> Part:
    """A part of an exchange, as kernels over whole buckets take it; `header`: what its packets begin with."""
    return Part(place.start, place.stop, exchange.shard, exchange.numel, exchange.codec.scale_block, header)
