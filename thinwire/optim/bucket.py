"""One bucket of an algorithm whose momentum every rank holds: its state, its exchanges, and what a backward does with
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.compress.codecs import all_finite
from thinwire.compress.exchange import EncodePart, Exchange, held_coordinates, zero_held
from thinwire.compress.kernels.buckets import Segments
from thinwire.compress.packet import Flags
from thinwire.compress.parts import Outcome
from thinwire.optim.algorithm import AdamSettings, Algorithm, Clock, Contribution, Keep, LocalSteps, Send
from thinwire.optim.form import HeldGradients, PayloadFactors
from thinwire.optim.preconditioner import hold_masked, raise_smallest
from thinwire.optim.step import Parameters, Step, may_clip
from thinwire.optim.wire import Exchanges
from thinwire.zero import BucketLayout, Slot

__all__ = ["AlgorithmBucket", "place_of"]


class AlgorithmBucket:
    """A flat run of parameters with an algorithm's state, and the transport of their gradients.

    `state`: by name; those that every rank holds are [padded_numel], as the exchange pads. `send`: what the step in
    flight sends. `zero_variance`: the `held_coordinates` of [padded_numel], which do not move; None if there are none.
    `sent`: what this step's payload went through; None before, and if nothing was sent. `stayed`: whether nothing was,
    since every parameter was left out.

    Args:
        new_state: makes a state by name: zeros on the parameters' device.
        shards_state: whether state that the algorithm has its owner keep is of this rank's shard only.
    """

    may_stay = True

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        parameters: Parameters,
        exchanges: Exchanges,
        algorithm: Algorithm,
        clock: Clock,
        step: Step,
        *,
        new_state: Callable[[str, BucketLayout], Tensor],
        shards_state: bool,
    ) -> None:
        self.index = index
        self.layout = layout
        self.zero_variance: Tensor | None = None
        self.sent: Exchange | None = None
        self.stayed = False
        self._has_average = False
        self._rewritten = False
        self.send = Send.EXACT
        self.device = parameters.parameters[layout.slots[0].parameter].device
        self._parameters = parameters
        self._exchanges = exchanges
        self._algorithm = algorithm
        self._local = algorithm if isinstance(algorithm, LocalSteps) else None
        self._clock = clock
        self._step = step
        self._new_state = new_state
        self._shards_state = shards_state
        self._incomplete = False
        self._groups = [parameters.group_number(slot.parameter) for slot in layout.slots]
        self._held = HeldGradients(layout)
        self._exact: Exchange | None = None
        self._compressed: Exchange | None = None
        self.state = {name: new_state(name, layout) for name in algorithm.state}
        if (denominators := algorithm.form.denominators) in self.state:
            self.state[denominators][: layout.numel].fill_(math.inf)

    # State

    def rename_state(self) -> None:
        """Have the frozen stage's state, in the memory of the warmup's where the algorithm says so."""
        before = self.state
        renamed = self._algorithm.frozen_state.items()
        self.state = {new: self._new_state(new, self.layout) if old is None else before[old] for new, old in renamed}

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """A parameter's part of a tensor of [padded_numel], in the parameter's shape."""
        return flat[slot.offset : slot.offset + slot.numel].view(self._parameters.parameters[slot.parameter].shape)

    def contribution(self, slot: Slot) -> Contribution:
        """What the algorithm sees of one parameter."""
        place = place_of(slot)
        group = self._parameters.group_number(slot.parameter)
        state = {name: values[place] for name, values in self.whole_state.items()}
        return Contribution(slot.parameter, group, self._parameters.settings(group), state, self._exchanges.ranks)

    @property
    def whole_state(self) -> dict[str, Tensor]:
        """The state of the whole bucket that this rank holds, where owners hold the rest."""
        return {name: values for name, values in self.state.items() if name not in self.owned}

    @property
    def owned(self) -> list[str]:
        """The names of state that this rank holds of its own shard only."""
        keeps = self._algorithm.state.items() if self._shards_state else ()
        return [name for name, keep in keeps if keep is Keep.OWNER and name in self.state]

    def hold_masked(self, name: str | None, value: float) -> None:
        """Fill the state `name`, if it is there, with `value` where the parameter groups' masks are zero."""
        values = self.whole_state.get(name or "")
        for slot in self.layout.slots if values is not None else ():
            mask = self._parameters.mask(self._parameters.group_number(slot.parameter))
            if mask is not None and slot.numel and values is not None:
                hold_masked([self.view(values, slot)], mask, value)

    def precondition(self) -> None:
        """Raise each parameter's smallest denominators, and divide the momentum by them."""
        momentum, denominators = self._algorithm.form.momentum, self._algorithm.form.denominators
        assert denominators is not None
        slots = [slot for slot in self.layout.slots if slot.numel]
        divided, by = ([self.view(self.state[name], slot) for slot in slots] for name in (momentum, denominators))
        raise_smallest(by)
        if slots:
            torch._foreach_div_(divided, by)

    def find_zero_variance(self) -> None:
        """Find the coordinates that stay, and forget what compression lost there."""
        denominators = self.state.get(self._algorithm.form.denominators or "")
        mask = None if denominators is None else torch.isinf(denominators)
        self.zero_variance = held_coordinates(mask) if mask is not None and bool(mask.any()) else None
        if self.zero_variance is not None and self._compressed is not None:
            self._compressed.hold_zero(self.zero_variance)

    # Exchanges

    @property
    def exchange(self) -> Exchange:
        """What this step goes through; a local step only uses its payload."""
        if self.send is Send.EXACT:
            if self._exact is None:
                self._exact = self._exchanges.exact(self.layout, self.index, self.device)
            return self._exact
        return self.compressed

    @property
    def compressed(self) -> Exchange:
        """What keeps the residuals."""
        if self._compressed is None:
            self._compressed = self._exchanges.compressed(self.layout, self.index, self.device)
        return self._compressed

    @property
    def compresses(self) -> bool:
        """Whether there are residuals."""
        return self._compressed is not None

    def begin_compression(self) -> None:
        """Compress without residuals from before."""
        self._compressed = None
        self.find_zero_variance()

    def prepare(self, send: Send) -> None:
        """Be ready for the kind of step that comes next, before its first gradient arrives."""
        self.send = send
        if send is not Send.EXACT or self._shards_state:  # which keeps no payload between steps
            self._exact = None
        # Whether leg 1 takes gradients as they are, held until then.
        self._holds_gradients = self.exchange.takes_gradients if send is Send.EXACT else self._local is None

    # What a backward does

    def keep(self, slot: Slot, parameter: Tensor) -> None:
        """Leave the gradient in `.grad`, where further backwards add to it."""

    def take(self, slot: Slot, parameter: Tensor) -> None:
        """Hold a parameter's gradient until leg 1, or write what it contributes into the payload."""
        gradient = parameter.grad
        assert gradient is not None
        if self._step.sketch is not None:
            self._step.sketch.add(gradient, slot.parameter)
        if self._holds_gradients:
            self._held.gradients[slot.parameter] = gradient.contiguous()
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
            flags = Flags.INCOMPLETE if self._incomplete else Flags.NONE
            if self._step.unplaced():
                flags |= Flags.UNPLACED
            self.sent = exchange = self.exchange
            exchange.start(self._step.number, flags, self._step.settings, self._encoder(exchange))
            self._held.gradients = {}

    def advance(self) -> None:
        """Average what leg 1 brought, clip it, and start leg 2; nothing in a local step."""
        clip = self._step.clip
        if self.sent is None:
            return
        if self.send is Send.EXACT or not may_clip(clip):
            self.sent.advance()
            return
        self.sent.scale_step(clip)
        kept = self._payload_of_zeros()[self.sent.owner_place]

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
        self.stayed = self._has_average = self._rewritten = False
        self._held.gradients = {}
        self._incomplete = False
        if self._compressed is not None:
            self._compressed.revert()

    # What a step does

    def outcome(self) -> Outcome:
        """What the headers of `sent` said, the same on every rank."""
        assert self.sent is not None
        outcome = self.sent.outcome()
        return replace(outcome, finite=bool(self.own_is_finite())) if self._rewritten else outcome

    def average(self) -> Tensor | None:
        """In an EXACT step the averages that have arrived, fp32 [padded_numel], which `receive` leaves as they are
        then; None before."""
        if not self._has_average and (self.stayed or not self.exchange.has_arrived):
            return None
        self.receive()
        return self.exchange.payload

    def average_rewritten(self) -> None:
        """Note that `average` was written into."""
        self._rewritten = True

    def receive(self) -> None:
        """Write what came back into the payload, or the state that the algorithm receives; take the residuals over.

        Where nothing was sent every rank's gradient was 0, and all hold what their average would be.
        """
        if self.send is Send.EXACT:
            if not (self.stayed or self._has_average):
                self.exchange.read(self.exchange.payload)
                self._has_average = True
                if self._step.divide_first != 1.0:
                    self.exchange.payload.mul_(self._step.divide_first)
            return
        if not self.stayed:
            self.exchange.commit()
        form = self._algorithm.form
        output = self.exchange.payload if form.update is None else self.state[form.momentum]
        if self.stayed:
            output.copy_(self._payload_of_zeros())
        else:
            self.exchange.read(output)
        if self.zero_variance is not None:
            # Else what stays would blur its block's scale.
            zero_held(output, self.zero_variance, slice(0, output.numel()))
            self.exchange.hold_zero(self.zero_variance)

    def receive_and_move(self, weights: Sequence[Tensor | None], replicas: Sequence[Tensor | None]) -> None:
        """Do in a COMPRESSED step what the algorithm's form says, in one pass over memory if kernels read the codec.

        `weights`: of each slot, fp32, and the `replicas` that are rounded from them, None for those that have none.
        """
        exchange, holds = self.sent, self.zero_variance is not None
        if exchange is None or not exchange.codec.has_kernels:
            self.receive()
            exchange = None
        else:
            exchange.commit()
        form, rates = self._algorithm.form, self.rates(self._clock)
        self._held.move(exchange, form, self.state, holds, weights, replicas, *rates)
        if exchange is not None and self.zero_variance is not None:
            exchange.hold_zero(self.zero_variance)

    def rates(self, clock: Clock) -> tuple[list[float], list[float]]:
        """By what each slot's weights move when a COMPRESSED step is counted on `clock`, and what decay leaves of
        them."""
        rates, decays = [], []
        for slot, settings in zip(self.layout.slots, self._settings(), strict=True):
            rate, decay = self._algorithm.rates(slot.parameter, settings, clock)
            rates.append(rate)
            decays.append(decay)
        return rates, decays

    def payload_factors(self) -> PayloadFactors:
        """β₁, and what the gradient is divided by, of each slot."""
        betas, divisors = [], []
        for slot, settings in zip(self.layout.slots, self._settings(), strict=True):
            betas.append(settings.beta1)
            divisors.append(self._step.loss_scale / self._algorithm.scale(slot.parameter))
        return betas, divisors

    @property
    def segments(self) -> Segments:
        """Where its parameters lie, for kernels over the whole bucket."""
        return self._held.segments

    def clip_own(self, clip: float | Tensor) -> None:
        """Shrink what this rank's gradient adds to a local step to `clip` times as much."""
        torch.lerp(self._payload_of_zeros(), self.exchange.payload, clip, out=self.exchange.payload)

    def own_is_finite(self) -> bool | Tensor:
        """Whether this rank's payload is; as a bool scalar where that is on an accelerator."""
        return all_finite(self.exchange.payload)

    # Parts

    def _settings(self) -> list[AdamSettings]:
        """Each slot's hyperparameters now."""
        of_group: dict[int, AdamSettings] = {}
        for group in self._groups:
            if group not in of_group:
                of_group[group] = self._parameters.settings(group)
        return [of_group[group] for group in self._groups]

    def _encoder(self, exchange: Exchange) -> EncodePart | None:
        """What makes this step's packets of the gradients that are held; None where the payload has been written."""
        if not self._holds_gradients:
            return None
        if self.send is Send.EXACT:
            return self._held.caster(exchange, self._step.divide_first)
        return self._held.encoder(exchange, self._algorithm.form, self.state, self.payload_factors())

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
            divisor = self._step.loss_scale / self._algorithm.scale(slot.parameter)
            if divisor != 1.0 or gradient.dtype != torch.float32:
                gradient = out.copy_(gradient)
            if divisor != 1.0:
                gradient.div_(divisor)
        own = self.contribution(slot)
        settings = self._local.payload_settings(own.settings, self._clock)
        if settings is not None:
            self._step.settings_sent.setdefault(own.group, settings)
        self._local.payload(gradient, own, self._clock, out)

    def _payload_of_zeros(self) -> Tensor:
        """What would be sent if every gradient were 0, fp32 [padded_numel]."""
        payload = torch.zeros_like(self.exchange.payload)
        for slot, beta1 in zip(self.layout.slots, self.payload_factors()[0], strict=True):
            out = payload[place_of(slot)]
            if self._local is None:
                torch.mul(self.state[self._algorithm.form.momentum][place_of(slot)], beta1, out=out)
            else:
                self._local.payload(None, self.contribution(slot), self._clock, out)
        return payload


def place_of(slot: Slot) -> slice:
    """A parameter's elements in its bucket."""
    return slice(slot.offset, slot.offset + slot.numel)
