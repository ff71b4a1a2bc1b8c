"""Fused kernels over a whole bucket, one call for all of its parameters, whose gradients and weights lie apart.

Plain functions and not torch operators: for a hundred tensors the dispatcher costs more than the check of them. On a
device without compiled kernels the specification in plain torch runs in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.kernels import bucket_reference
from thinwire.compress.kernels.bucket_calls import (
    AverageAndEncode,
    DecodeAndMove,
    DigestGradients,
    EncodePayload,
    Part,
    PayloadForm,
    Segments,
    UpdateForm,
    check_divisors,
    check_finite,
    digest_count,
)
from thinwire.compress.kernels.loading import compiled_backend
from thinwire.compress.kernels.packed_calls import EncodePackedPayload, MovePacked, PackedState
from thinwire.compress.kernels.tables import CapturedTables
from thinwire.compress.packet_layout import CODE_BITS

__all__ = [
    "PackedState",
    "Part",
    "PayloadForm",
    "Segments",
    "UpdateForm",
    "average_and_encode",
    "decode_and_move",
    "digest_gradients",
    "encode_packed_payload",
    "encode_payload",
    "move_packed",
    "move_weights",
    "renew_factors",
    "serves",
    "serves_digests",
    "write_payload",
]


def serves(device: torch.device, codec: str) -> bool:
    """Whether there are compiled kernels over whole buckets for this codec on this device."""
    return codec in CODE_BITS and compiled_backend(device.type) is not None


def encode_payload(
    codec: str,
    form: PayloadForm,
    segments: Segments,
    gradients: Sequence[Tensor | None],
    beta1: Sequence[float],
    divisors: Sequence[float],
    *,
    momentum: Tensor,
    denominators: Tensor | None,
    residual: Tensor | None,
    lost: Tensor,
    packets: Tensor,
    part: Part,
) -> None:
    """Encode u + residual into `packets`, and leave what the codec lost in `lost`, in one pass over memory.

        u = m + (1 - beta1_k) · (x - m),  x = gradient_k / divisor_k      with a gradient, form "plain"
                                          x = gradient_k / divisor_k / d  form "divided"
        u, times 1, or 0 where d is not finite                            form "masked"
        u = beta1_k · m                                                   without a gradient, whatever the form

    with m of `momentum` and d of `denominators`, for the elements of run k of `segments`. Multiplied and added with one
    rounding, as torch.lerp does on a CPU (for beta1 ≤ 0.5: x + -beta1 · (x - m)); all else is rounded by itself.

    gradients: fp32, bf16 or fp16, contiguous, of any shape, or None. momentum, denominators, residual, lost: fp32
    [padded_numel]; lost is overwritten where the part lies, with 0 on the padding, and nowhere else; it may not be the
    residual, which is only read. packets: uint8 [rows, packet_bytes], overwritten, but for the headers where the part
    has none. Codecs, and what is not finite, as in `encode`. Raises TypeError or ValueError for arguments that do not
    fit together.
    """
    call = EncodePayload(
        codec, form, segments, gradients, beta1, divisors, momentum, denominators, residual, lost, packets, part
    )
    _run(call, packets.device)


def decode_and_move(
    codec: str,
    form: UpdateForm,
    segments: Segments,
    *,
    packets: Tensor,
    output: Tensor,
    denominators: Tensor | None,
    holds: bool,
    weights: Sequence[Tensor | None],
    replicas: Sequence[Tensor | None],
    rates: Sequence[float],
    decays: Sequence[float],
    part: Part,
) -> None:
    """Decode `packets` into `output`, and move weights by what they carry, in one pass over memory.

        u = 0 where `holds` and d is infinite, else what the packets say
        w = decay_k · w - rate_k · u          form "plain": multiplied and subtracted with one rounding
        w = decay_k · w + (-rate_k · u) / d   form "divided": each operation rounded by itself
        replica = w, to the nearest, ties to even

    weights: fp32, contiguous, of any shape; None for a run whose weights stay. replicas: bf16 or fp16, contiguous; None
    where there is none. output, denominators: fp32 [padded_numel]. Writes where the part lies and nowhere else; 0 on
    the padding. The versions of weights and replicas are counted up. Raises TypeError or ValueError for arguments that
    do not fit together.
    """
    call = DecodeAndMove(
        codec, form, segments, packets, output, denominators, holds, weights, replicas, rates, decays, part
    )
    _run(call, packets.device)
    written = [one for one in (*weights, *replicas) if one is not None]
    torch.autograd.graph.increment_version(written)


def write_payload(
    form: PayloadForm,
    segments: Segments,
    gradients: Sequence[Tensor | None],
    beta1: Sequence[float],
    divisors: Sequence[float],
    *,
    momentum: Tensor,
    denominators: Tensor | None,
    output: Tensor,
) -> None:
    """Write u of `encode_payload` into `output`, fp32 [padded_numel], where no packets are made of it at once: in plain
    torch, on every device. The padding is left as it is."""
    runs = zip(segments.places, gradients, beta1, divisors, strict=True)
    for (first, numel), gradient, beta, divisor in runs:
        place = slice(first, first + numel)
        denominator = None if denominators is None else denominators[place]
        bucket_reference.contribute(form, momentum[place], gradient, denominator, beta, divisor, output[place])


def move_weights(
    form: UpdateForm,
    segments: Segments,
    *,
    updates: Tensor,
    denominators: Tensor | None,
    weights: Sequence[Tensor | None],
    replicas: Sequence[Tensor | None],
    rates: Sequence[float],
    decays: Sequence[float],
) -> None:
    """Move weights, and replicas, by u in `updates`, fp32 [padded_numel], as `decode_and_move` does: in plain torch, on
    every device, for what no packets have brought."""
    runs = zip(segments.places, weights, replicas, rates, decays, strict=True)
    for (first, numel), weight, replica, rate, decay in runs:
        place = slice(first, first + numel)
        denominator = None if denominators is None else denominators[place]
        if weight is None:
            continue
        bucket_reference.move(form, weight.view(-1), updates[place], denominator, rate, decay)
        if replica is not None:
            replica.copy_(weight)


def average_and_encode(
    codec: str,
    received: Tensor,
    *,
    residual: Tensor | None,
    lost: Tensor,
    packets: Tensor,
    numel: int,
    block_size: int,
) -> None:
    """Encode the mean of the rows of `received`, plus `residual`, into `packets`, and leave in `lost` what was lost.

    What `decode_mean` and then `encode` do, with the same bits, in one pass. received: uint8 [workers, packet_bytes].
    residual, lost: fp32 [shard]; lost is overwritten, and may not be the residual. packets: uint8 [1, packet_bytes],
    overwritten except for the header. numel: valid elements of the shard. Raises TypeError or ValueError for arguments
    that do not fit together.
    """
    _run(AverageAndEncode(codec, received, residual, lost, packets, numel, block_size), packets.device)


def encode_packed_payload(
    state: PackedState,
    segments: Segments,
    gradients: Sequence[Tensor | None],
    beta1: Sequence[float],
    divisors: Sequence[float],
    *,
    tables: Tensor,
    residual: Tensor,
    lost: Tensor,
    packets: Tensor,
    part: Part,
) -> None:
    """Encode the next preconditioned momentum, plus `residual`, as sign1 packets, and leave in `lost` what was lost.

        payload_e = beta1_k · u_e + ((1 - beta1_k) · (gradient_k / divisor_k)) · tables[k][codes_e]

    for the elements e of run k, each operation rounded to fp32 by itself: 0, or NaN where the quotient is not finite,
    where the code is 0. Then what `encode` does, or `encode_rounded`.

    gradients: fp32, bf16 or fp16, contiguous, of any shape; None counts as zeros. tables: fp32 [runs, 256]; entry 0 is
    not looked at. residual, lost: fp32 or bf16 [padded_numel], both alike; lost is overwritten where the part lies, to
    the nearest, and may be the residual itself. packets: uint8 [rows, packet_bytes], overwritten, but for the
    headers where the part has none. Raises TypeError or ValueError for arguments that do not fit together.
    """
    call = EncodePackedPayload(state, segments, gradients, beta1, divisors, tables, residual, lost, packets, part)
    _run(call, packets.device)


def move_packed(
    state: PackedState,
    segments: Segments,
    *,
    weights: Tensor,
    first: int,
    moves: Sequence[bool],
    rates: Sequence[float],
    decays: Sequence[float],
    seed: int,
) -> None:
    """Move the weights of a bucket in place by u: w_e = decay_k · w_e - rate_k · u_e for the elements e of run k.

    u_e is 0 where the code is 0. weights: fp32, bf16 or fp16 [n], elements `first` to `first` + n of the bucket. moves:
    whether a run's weights move. Their version is counted up.

    Calculated in fp32. 16 bits are rounded at random to one of their two neighbours, the nearer the likelier, so that
    the mean is kept: by 16 bits for bf16 and 13 for fp16, which depend on `seed` (an int64) and e only; see
    `noise.random_bits`. Equal arguments give equal bits on every rank, device and backend. Give every step and every
    bucket a seed of its own. Infinities and NaN stay; values beyond the largest finite one round to it or to infinity.
    fp16 below 2^-14 are rounded as finely, from the nearest multiple of 2^-37. Raises TypeError or ValueError for
    arguments that do not fit together.
    """
    _run(MovePacked(state, segments, weights, first, moves, rates, decays, seed), weights.device)
    torch.autograd.graph.increment_version(weights)


def renew_factors(
    device: torch.device,
    tables: CapturedTables,
    beta1: Sequence[float],
    divisors: Sequence[float],
    rates: Sequence[float],
    decays: Sequence[float],
) -> None:
    """Have the launches of `encode_payload` and `decode_and_move` that were captured with `tables` find these factors,
    one for each run, when they are replayed. Raises ValueError for those that the two refuse."""
    check_divisors(beta1, divisors)
    check_finite(rates=rates, decays=decays)
    backend: Any = compiled_backend(device.type)
    backend.renew_factors(tables, beta1, divisors, rates, decays)


def serves_digests(device: torch.device) -> bool:
    """Whether `digest_gradients` serves this device: where a launch costs more than the gradient that it looks at."""
    return hasattr(compiled_backend(device.type), "digest_gradients")


def digest_gradients(segments: Segments, gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Numbers on the device, int32, that differ, but for chance, where a bit of any gradient does: in one launch.

    gradients: fp32, bf16 or fp16, contiguous, of any shape; None for a run that has none. Raises TypeError or
    ValueError for those that do not fit the runs.
    """
    digests = torch.empty(digest_count(segments), dtype=torch.int32, device=device)
    call = DigestGradients(segments, gradients, digests)
    call.check()
    backend: Any = compiled_backend(device.type)
    backend.digest_gradients(call)
    return digests


def _run(call: Any, device: torch.device) -> None:
    call.check()
    getattr(compiled_backend(device.type) or bucket_reference, call.kernel)(call)
