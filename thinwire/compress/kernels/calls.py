"""Arguments of the kernels over vectors in fp32, single or of a whole bucket, and over headers: a record for each, that
says what the kernel does and refuses what does not fit together, so that no backend has to. `loading.execute` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.buckets import (
    FLOAT_TYPES,
    KernelCall,
    Part,
    PayloadForm,
    Segments,
    UpdateForm,
    check_device,
    check_divisors,
    check_factors,
    check_form,
    check_packets,
    check_vectors,
)
from thinwire.compress.packet_layout import HEADER_BYTES, SCALE_BYTES


@dataclass(eq=False)
class Encode(KernelCall):
    """Encode u = payload + residual into `packets`, and leave what the codec lost in `payload`, or in `new_residual`.

    payload: float32 [rows * shard]; becomes u - decoded(u), 0 on the padding. residual: the same shape, only
    read; None means zeros. packets: uint8 [rows, packet_bytes(codec, shard, block_size)], overwritten except
    for the headers. numel: valid elements, from 0 to rows * shard. Padding never enters a scale. place: the elements of
    every shard that packets carry, whole blocks, and that alone are read and written; None for all.

    new_residual: bf16, the same shape; what was lost, to the nearest, goes there, and `payload` is only read. Then
    `residual` is bf16, too, and may be `new_residual` itself.

    A NaN or infinity anywhere in a block makes its scales, and so all it decodes to, non-finite, as does, where scales
    are means, a sum of |u| beyond the float32 range; other blocks are untouched. Codes are 0 where a largest magnitude
    is so small that the scale is 0.
    """

    kernel = "encode"

    codec: str
    payload: Tensor
    residual: Tensor | None
    packets: Tensor
    numel: int
    block_size: int
    new_residual: Tensor | None = None
    place: slice | None = None

    @property
    def part(self) -> Part:
        """What packets carry."""
        return part_of_shards(self.payload, self.packets.size(0), self.numel, self.block_size, self.place)

    @override
    def check(self) -> None:
        kept = torch.float32 if self.new_residual is None else torch.bfloat16
        check_packets(self.codec, self.packets)
        check_vectors(self.packets, None, payload=self.payload)
        check_vectors(
            self.packets, self.payload.numel(), (kept,), residual=self.residual, new_residual=self.new_residual
        )
        _check_rows("payload", self.payload, self.packets.size(0), self.numel)
        self.part.check(self.codec, self.packets)


@dataclass(eq=False)
class Decode(KernelCall):
    """Write what every row of `packets` carries to `output`, row after row, or with `mean` their mean.

    packets: uint8 [rows, packet_bytes(codec, shard, block_size)]. output: float32 [rows * shard], overwritten, with
    0 on the padding. numel: valid elements, from 0 to rows * shard. place: as of `Encode`.

    mean: every row is about the same shard, float32 [shard], of which `numel` counts the valid elements. Rows are
    summed in order in float32 and the sum divided by their number, so that every backend and machine gives the same
    bits.
    """

    kernel = "decode"

    codec: str
    packets: Tensor
    output: Tensor
    numel: int
    block_size: int
    mean: bool = False
    place: slice | None = None

    @property
    def rows(self) -> int:
        """Shards in `output`."""
        return 1 if self.mean else self.packets.size(0)

    @property
    def part(self) -> Part:
        """What packets carry."""
        return part_of_shards(self.output, self.rows, self.numel, self.block_size, self.place)

    @override
    def check(self) -> None:
        check_packets(self.codec, self.packets)
        check_vectors(self.packets, None, output=self.output)
        _check_rows("output", self.output, self.rows, self.numel)
        self.part.check(self.codec, self.packets)


@dataclass(eq=False)
class StoreRounded(KernelCall):
    """Write `values`, fp32 [n], into `weights`, fp32, bf16 or fp16 [n], contiguous and on the same device.

    16 bits get one of the two neighbours, the nearer the likelier, as in `buckets.MovePacked`, by bits that depend on
    `seed` and the element's number only. Equal arguments give equal bits on every rank and device. Infinities and NaN
    stay.
    """

    kernel = "store_rounded"
    beside = "weights"

    weights: Tensor
    values: Tensor
    seed: int

    @override
    def check(self) -> None:
        weights, values = self.weights, self.values
        if values.dtype != torch.float32 or weights.dtype not in FLOAT_TYPES:
            raise TypeError(f"values must be fp32 and weights fp32, bf16 or fp16, got {values.dtype}, {weights.dtype}")
        if values.dim() != 1 or values.shape != weights.shape or values.device != weights.device:
            raise ValueError(
                f"values and weights must be vectors of one size on one device, got {tuple(values.shape)} on "
                f"{values.device} and {tuple(weights.shape)} on {weights.device}"
            )
        if not (values.is_contiguous() and weights.is_contiguous()):
            raise ValueError("values and weights must be contiguous: call contiguous()")


@dataclass(eq=False)
class WriteHeaders(KernelCall):
    """Put `header`, 16 bytes, at the start of every row of `packets`, uint8 [rows, bytes]: one launch, by value.

    `flag` is set in the flags, bytes 4 and 5, of a row where `condition`, one bool on the packets' device, holds, or
    where not all of the first `scales` fp32 that follow the row's header are finite: so that a packet says of itself
    that what it carries is not.
    """

    kernel = "write_headers"

    packets: Tensor
    header: bytes
    scales: int = 0
    condition: Tensor | None = None
    flag: int = 0

    @override
    def check(self) -> None:
        packets, condition = self.packets, self.condition
        if len(self.header) != HEADER_BYTES:
            raise ValueError(f"a header has {HEADER_BYTES} bytes, got {len(self.header)}")
        if packets.dtype != torch.uint8:
            raise TypeError(f"packets must be torch.uint8, got {packets.dtype}")
        if packets.dim() != 2 or packets.size(0) < 1 or packets.size(1) < HEADER_BYTES or packets.stride(1) != 1:
            raise ValueError(
                f"packets must have at least one row of at least {HEADER_BYTES} bytes without gaps, got shape "
                f"{tuple(packets.shape)} with strides {packets.stride()}"
            )
        room = (packets.size(1) - HEADER_BYTES) // SCALE_BYTES
        if not 0 <= self.scales <= room:
            raise ValueError(f"scales is {self.scales}: rows of {packets.size(1)} bytes have room for {room}")
        if not 0 <= self.flag <= 0xFFFF:
            raise ValueError(f"flag is {self.flag}: flags have 16 bits")
        if condition is not None:
            if condition.dtype != torch.bool or condition.numel() != 1:
                raise TypeError(f"condition must be one bool, got {tuple(condition.shape)} of {condition.dtype}")
            check_device("condition", condition, packets)


@dataclass(eq=False)
class EncodePayload(KernelCall):
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
    has none. Codecs, and what is not finite, as in `encode`.
    """

    kernel = "encode_payload"

    codec: str
    form: PayloadForm
    segments: Segments
    gradients: Sequence[Tensor | None]
    beta1: Sequence[float]
    divisors: Sequence[float]
    momentum: Tensor
    denominators: Tensor | None
    residual: Tensor | None
    lost: Tensor
    packets: Tensor
    part: Part

    @override
    def check(self) -> None:
        self.part.check(self.codec, self.packets)
        padded = self.part.shard * self.packets.size(0)
        check_form(self.form, self.denominators)
        check_vectors(self.packets, padded, momentum=self.momentum, lost=self.lost)
        check_vectors(self.packets, padded, residual=self.residual, denominators=self.denominators)
        of_runs = {"gradients": self.gradients, "beta1": self.beta1, "divisors": self.divisors}
        self.segments.check(self.part.numel, padded, **of_runs)
        self.segments.check_tensors("gradients", self.gradients, self.packets.device, FLOAT_TYPES)
        check_divisors(self.beta1, self.divisors)


@dataclass(eq=False)
class DecodeAndMove(KernelCall):
    """Decode `packets` into `output`, and move weights by what they carry, in one pass over memory.

        u = 0 where `holds` and d is infinite, else what the packets say
        w = decay_k · w - rate_k · u          form "plain": multiplied and subtracted with one rounding
        w = decay_k · w + (-rate_k · u) / d   form "divided": each operation rounded by itself
        replica = w, to the nearest, ties to even

    weights: fp32, contiguous, of any shape; None for a run whose weights stay. replicas: bf16 or fp16, contiguous; None
    where there is none. output, denominators: fp32 [padded_numel]. Writes where the part lies and nowhere else; 0 on
    the padding.
    """

    kernel = "decode_and_move"

    codec: str
    form: UpdateForm
    segments: Segments
    packets: Tensor
    output: Tensor
    denominators: Tensor | None
    holds: bool
    weights: Sequence[Tensor | None]
    replicas: Sequence[Tensor | None]
    rates: Sequence[float]
    decays: Sequence[float]
    part: Part

    @override
    def check(self) -> None:
        self.part.check(self.codec, self.packets)
        padded = self.part.shard * self.packets.size(0)
        check_form("divided" if self.holds else self.form, self.denominators)
        check_vectors(self.packets, padded, output=self.output, denominators=self.denominators)
        columns = {"weights": self.weights, "replicas": self.replicas, "rates": self.rates, "decays": self.decays}
        self.segments.check(self.part.numel, padded, **columns)
        self.segments.check_tensors("weights", self.weights, self.packets.device, (torch.float32,))
        self.segments.check_tensors("replicas", self.replicas, self.packets.device, FLOAT_TYPES[1:])
        for weight, replica in zip(self.weights, self.replicas, strict=True):
            if weight is None and replica is not None:
                raise ValueError("a run has a replica and no weights to round into it: give both")
        check_factors(rates=self.rates, decays=self.decays)


def part_of_shards(vector: Tensor, rows: int, numel: int, block_size: int, place: slice | None) -> Part:
    """The elements `place`, or all, of each of the shards of a vector, of which `numel` elements are no padding."""
    shard = vector.numel() // rows
    first, last = (0, shard) if place is None else (place.start, place.stop)
    return Part(first, last, shard, numel, block_size)


def _check_rows(name: str, vector: Tensor, rows: int, valid: int) -> None:
    """Raise unless a vector is as many shards, and has so many elements that are no padding."""
    if vector.numel() % rows:
        raise ValueError(f"{name} has {vector.numel()} elements, not a multiple of the {rows} rows of packets")
    if not 0 <= valid <= vector.numel():
        raise ValueError(f"numel is {valid}: it must lie between 0 and the {vector.numel()} elements of {name}")
