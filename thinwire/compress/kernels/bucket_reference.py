"""The kernels over a whole bucket in plain torch: slow, readable, on any device. This file is the specification, with
`reference`, whose kernels over single vectors it has too: together they serve a device that nothing is compiled for.

Each operation is rounded to float32 by itself, but for `torch.lerp` and `add_` with `alpha`, which multiply and add
with one rounding wherever the processor can.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.kernels import reference
from thinwire.compress.kernels.buckets import (
    AverageAndEncode,
    EncodePackedPayload,
    MovePacked,
    PackedState,
    PayloadForm,
    Segments,
    UpdateForm,
)
from thinwire.compress.kernels.calls import Decode, DecodeAndMove, Encode, EncodePayload, WriteHeaders
from thinwire.compress.kernels.reference import decode as decode
from thinwire.compress.kernels.reference import encode as encode
from thinwire.compress.kernels.reference import store
from thinwire.compress.kernels.reference import store_rounded as store_rounded
from thinwire.compress.kernels.reference import write_headers as write_headers
from thinwire.compress.packet_layout import HEADER_BYTES, codes_offset


def encode_payload(call: EncodePayload) -> None:
    """Encode u + residual into `packets`, and leave in `lost` what the codec lost of it."""
    payload, part = torch.zeros_like(call.lost), call.part
    given = call.gradients, call.beta1, call.divisors
    write_payload(call.form, call.segments, *given, call.momentum, call.denominators, payload)
    for place in part.places(call.packets.size(0)):
        call.lost[place] = payload[place]
    within = slice(part.first, part.last)
    encoded = call.lost, call.residual, call.packets, part.numel, part.block_size
    reference.encode(Encode(call.codec, *encoded, place=within))
    _write_header(call)


def write_payload(
    form: PayloadForm,
    segments: Segments,
    gradients: Sequence[Tensor | None],
    beta1: Sequence[float],
    divisors: Sequence[float],
    momentum: Tensor,
    denominators: Tensor | None,
    output: Tensor,
) -> None:
    """Write u of `EncodePayload` into `output`, fp32 [padded_numel], also where no packets are made of it at once. The
    padding is left as it is."""
    for (first, numel), gradient, beta, divisor in zip(segments.places, gradients, beta1, divisors, strict=True):
        place = slice(first, first + numel)
        u, denominator = output[place], None if denominators is None else denominators[place]
        if gradient is None:
            torch.mul(momentum[place], beta, out=u)
            continue
        u.copy_(gradient.reshape(-1))
        if divisor != 1.0:
            u.div_(torch.tensor(divisor, dtype=torch.float32, device=u.device))
        if form == "divided":
            assert denominator is not None
            u.div_(denominator)
        torch.lerp(momentum[place], u, 1 - beta, out=u)
        if form == "masked":
            assert denominator is not None
            # A product and not a fill: an infinite gradient must become NaN, which every rank sees, and not 0.
            u.mul_(torch.isfinite(denominator))


def decode_and_move(call: DecodeAndMove) -> None:
    """Decode into `output`, and move weights by what came."""
    part = call.part
    within = slice(part.first, part.last)
    reference.decode(Decode(call.codec, call.packets, call.output, part.numel, part.block_size, place=within))
    for place in part.places(call.packets.size(0)):
        if call.holds:
            assert call.denominators is not None
            call.output[place].masked_fill_(torch.isinf(call.denominators[place]), 0.0)
        by = call.weights, call.replicas, call.rates, call.decays
        move_weights(call.form, call.segments, call.output, call.denominators, *by, place)


def move_weights(
    form: UpdateForm,
    segments: Segments,
    updates: Tensor,
    denominators: Tensor | None,
    weights: Sequence[Tensor | None],
    replicas: Sequence[Tensor | None],
    rates: Sequence[float],
    decays: Sequence[float],
    part: slice | None = None,
) -> None:
    """Move weights, and replicas, in a part of the bucket or in all of it, by u in `updates`, fp32 [padded_numel], as
    `DecodeAndMove` does."""
    begin, end = (0, updates.numel()) if part is None else (part.start, part.stop)
    runs = zip(segments.places, weights, replicas, rates, decays, strict=True)
    for (first, numel), weight, replica, rate, decay in runs:
        place = slice(max(first, begin), min(first + numel, end))
        if weight is None or place.start >= place.stop:
            continue
        of_run = slice(place.start - first, place.stop - first)
        moved = weight.view(-1)[of_run].mul_(decay)
        if form == "divided":
            assert denominators is not None
            # Not addcdiv_, which divides first on a GPU.
            moved.add_((updates[place] * -rate) / denominators[place])
        else:
            moved.add_(updates[place], alpha=-rate)
        if replica is not None:
            replica.view(-1)[of_run].copy_(moved)


def average_and_encode(call: AverageAndEncode) -> None:
    """Write the mean of `received` plus `residual` into `packets`, and leave in `lost` what the codec lost of it."""
    reference.decode(Decode(call.codec, call.received, call.lost, call.numel, call.block_size, mean=True))
    if call.mask is not None:
        call.lost.mul_(call.mask.ne(0))
    reference.encode(Encode(call.codec, call.lost, call.residual, call.packets, call.numel, call.block_size))


def encode_packed_payload(call: EncodePackedPayload) -> None:
    """Encode β₁ u + (1 - β₁) g · table[codes] + residual into `packets`, and leave in `lost` what the codec lost."""
    state, part = call.state, call.part
    payload = torch.zeros(state.codes.numel(), device=call.packets.device)
    payload[: state.numel] = _signed_scales(state, slice(0, state.numel))
    write_packed_payload(
        payload, state.codes, call.segments, call.gradients, call.beta1, call.divisors, tables=call.tables
    )
    payload += call.residual.float()
    within = slice(part.first, part.last)
    reference.encode(Encode("sign1", payload, None, call.packets, part.numel, part.block_size, place=within))
    for place in part.places(call.packets.size(0)):
        call.lost[place] = payload[place]
    _write_header(call)


def write_packed_payload(
    u: Tensor,
    codes: Tensor,
    segments: Segments,
    gradients: Sequence[Tensor | None],
    beta1: Sequence[float],
    divisors: Sequence[float],
    *,
    tables: Tensor,
) -> None:
    """Turn u, what the packets say, fp32 [padded_numel], into the next one of `EncodePackedPayload`, whatever codec the
    packets are of. Each operation is rounded by itself; the padding is left as it is."""
    for (first, numel), gradient, table, beta, divisor in zip(
        segments.places, gradients, tables, beta1, divisors, strict=True
    ):
        place = slice(first, first + numel)
        of_run = codes[place]
        kept, change = u[place].mul_(_single(beta, u)).masked_fill_(of_run == 0, 0.0), _single(0.0, u)
        if gradient is not None:
            change = gradient.reshape(-1).float() / _single(divisor, u)
            change.mul_(_single(1.0 - beta, u)).mul_(table[of_run.int()].masked_fill_(of_run == 0, 0.0))
        kept.add_(change)


def _write_header(call: EncodePayload | EncodePackedPayload) -> None:
    if call.part.header is not None:
        reference.write_headers(WriteHeaders(call.packets, call.part.header))


def move_packed(call: MovePacked) -> None:
    """Leave decay · w - rate · u in `weights`."""
    values = moved_by(call, _signed_scales(call.state, slice(0, call.state.numel)))
    store(call.weights, values, call.seed, call.first)


def moved_by(call: MovePacked, u: Tensor) -> Tensor:
    """Return all of the weights, fp32, moved by u, what the packets say, fp32 [numel], whatever codec they are of."""
    moved, last = call.weights.to(torch.float32, copy=True), call.first + call.weights.numel()
    for number, (first, numel) in enumerate(call.segments.places):
        low, high = max(first, call.first), min(first + numel, last)
        if call.moves[number] and low < high:
            of_run, place = moved[low - call.first : high - call.first], slice(low, high)
            step = u[place] * _single(call.rates[number], u)
            of_run.mul_(_single(call.decays[number], u)).sub_(step.masked_fill_(call.state.codes[place] == 0, 0.0))
    return moved


def _signed_scales(state: PackedState, place: slice) -> Tensor:
    """Decode what the packets carry for the elements at `place`, counted over all rows laid end to end."""
    packets, shard = state.packets, max(state.shard, 1)
    numbers = torch.arange(place.start, place.stop, device=packets.device)
    split = codes_offset("sign1", state.shard, state.block_size)
    scales = packets[:, HEADER_BYTES:split].clone().view(-1).view(torch.float32)[numbers // state.block_size]
    rows, places = numbers // shard, numbers % shard
    codes = packets.view(-1)[rows * packets.size(1) + split + places // 8]
    return torch.where((codes >> (places % 8)) & 1 == 1, scales, -scales)


def _single(value: float, like: Tensor) -> Tensor:
    """A float32 scalar tensor on the device of `like`."""
    return torch.full((), value, dtype=torch.float32, device=like.device)
