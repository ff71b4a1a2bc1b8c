"""Execute the form of a compressed step for a whole bucket: its gradients, held from the moment each arrives until all
are there, become packets without a copy in between, and packets that came back move the weights in one pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.compress.codecs import CastCodec
from thinwire.compress.exchange import EncodePart, Exchange
from thinwire.compress.kernels.bucket_reference import move_weights, write_payload
from thinwire.compress.kernels.buckets import DecodeAndMove, EncodePayload, Part, Segments
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet import write_headers
from thinwire.optim.algorithm import Form
from thinwire.zero import BucketLayout

__all__ = ["HeldGradients", "PayloadFactors", "part_of", "segments_of"]

PayloadFactors = tuple[Sequence[float], Sequence[float]]
"""β₁, and what the gradient is divided by, of each slot."""


class HeldGradients:
    """What `payload` would be made of, for the bucket of `layout`; `gradients`: contiguous, by parameter."""

    def __init__(self, layout: BucketLayout) -> None:
        self.segments = segments_of(layout)
        self._parameters = [slot.parameter for slot in layout.slots]
        self._starts = [slot.offset for slot in layout.slots]
        self._ends = [slot.offset + slot.numel for slot in layout.slots]
        self.gradients: dict[int, Tensor] = {}

    def encoder(
        self, exchange: Exchange, form: Form, state: Mapping[str, Tensor], factors: PayloadFactors
    ) -> EncodePart | None:
        """What makes a part of the payload and encodes it into packets; None, with all of the payload written, if the
        exchange takes nothing else."""
        assert form.payload is not None
        momentum = state[form.momentum]
        denominators = None if form.denominators is None else state[form.denominators]
        gradients = [self.gradients.get(number) for number in self._parameters]
        if not exchange.takes_encoder:
            given = gradients, *factors
            write_payload(form.payload, self.segments, *given, momentum, denominators, exchange.payload)
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

    def caster(self, exchange: Exchange, divisor: float) -> EncodePart:
        """What casts a part of the bucket's gradients over `divisor` into packets, and zeros where there are none."""
        codec = exchange.codec
        assert isinstance(codec, CastCodec), "nothing else carries gradients as they are"
        gradients = [self.gradients.get(number) for number in self._parameters]
        flat = [None if gradient is None else gradient.view(-1) for gradient in gradients]

        def cast(place: slice, packets: Tensor, header: bytes) -> None:
            places, pieces = [], []
            for row, values in enumerate(codec.values(packets)):
                begin = row * exchange.shard + place.start
                for first, last, slot, of_slot in self._pieces(begin, begin + len(values)):
                    gradient = None if slot is None else flat[slot]
                    target = values[first - begin : last - begin]
                    if gradient is None:
                        target.zero_()
                    else:
                        piece = gradient[of_slot : of_slot + last - first]
                        places.append(target)
                        pieces.append(piece if divisor == 1.0 else piece.float().div_(divisor))
            if places:
                torch._foreach_copy_(places, pieces)
            write_headers(packets, header)

        return cast

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int | None, int]]:
        """Elements begin to end of the bucket, run by run: first, last, the number of the slot, or None where there is
        none, and where in that slot the first one lies."""
        for slot in range(bisect_right(self._ends, begin), len(self._ends)):
            start, stop = self._starts[slot], min(self._ends[slot], end)
            if begin < min(start, end):
                yield begin, min(start, end), None, 0
            if start < stop:
                yield max(begin, start), stop, slot, max(begin - start, 0)
            begin = max(begin, stop)
            if begin == end:
                return
        yield begin, end, None, 0

    def move(
        self,
        exchange: Exchange | None,
        form: Form,
        state: Mapping[str, Tensor],
        holds: bool,
        weights: Sequence[Tensor | None],
        replicas: Sequence[Tensor | None],
        rates: Sequence[float],
        decays: Sequence[float],
    ) -> None:
        """Decode what `exchange` brought into the momentum, and move `weights` and their replicas by it.

        Without an exchange the momentum is there. `holds`: whether some denominators are infinite. `rates`, and what
        decay leaves: of each slot.
        """
        assert form.update is not None
        momentum = state[form.momentum]
        denominators = None if form.denominators is None else state[form.denominators]
        if exchange is None:
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

        exchange.read_parts(decode)


def segments_of(layout: BucketLayout) -> Segments:
    """A run for each of a bucket's slots."""
    return Segments((slot.offset, slot.numel) for slot in layout.slots)


def part_of(exchange: Exchange, place: slice, header: bytes | None = None) -> Part:
    """A part of an exchange, as kernels over whole buckets take it; `header`: what its packets begin with."""
    return Part(place.start, place.stop, exchange.shard, exchange.numel, exchange.codec.scale_block, header)
