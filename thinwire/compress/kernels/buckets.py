"""Fused kernels over a whole bucket, one call for all of its parameters, whose gradients and weights lie apart: a
record of arguments for each, which says what it does and refuses what does not fit. `loading.execute` does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.tables import CapturedTables, KeptTables
from thinwire.compress.packet_layout import HEADER_BYTES, check_codec, packet_bytes

PayloadForm = Literal["plain", "divided", "masked"]
"""What is done with denominators in `EncodePayload`."""

UpdateForm = Literal["plain", "divided"]
"""What is done with denominators in `DecodeAndMove`."""

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class KernelCall(ABC):
    """Arguments of the kernel called `kernel`."""

    kernel: ClassVar[str]
    beside: ClassVar[str] = "packets"  # the argument that lies on the device with all others

    @abstractmethod
    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""

    @property
    def device(self) -> torch.device:
        """Where all of the tensors are."""
        found: torch.device = getattr(self, self.beside).device
        return found


class Segments:
    """Runs of a flat vector, in order and without overlap: run k is `numels[k]` elements from element `firsts[k]` on.

    What no run covers is padding; `covered` counts the other elements, which end at `end`.
    """

    def __init__(self, places: Iterable[tuple[int, int]]) -> None:
        """`places`: (first element, elements) of each run. Raises ValueError unless they are in order."""
        self.places = tuple((int(first), int(numel)) for first, numel in places)
        end = 0
        for first, numel in self.places:
            if first < end or numel < 0:
                raise ValueError(
                    f"{numel} elements from element {first} on follow a run that ends at {end}: give runs in order, "
                    "without overlap"
                )
            end = first + numel
        self.end = end
        self.covered = sum(numel for _, numel in self.places)

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def tables(self) -> KeptTables | CapturedTables:
        """Where a backend finds on its device what it tells launches of these runs."""
        return KeptTables()

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """First element and end of each run: int64 [runs, 2]."""
        return np.array([(first, first + numel) for first, numel in self.places], dtype=np.int64).reshape(-1, 2)

    def check(self, numel: int, padded: int, **factors: Sequence[object]) -> None:
        """Raise ValueError unless the runs cover the first `numel` of `padded` elements without gaps, and there is one
        of each of the `factors` for each run."""
        if self.covered != numel or self.end != numel or numel > padded:
            raise ValueError(
                f"runs that end at {self.end} do not cover the {numel} elements of a bucket of {padded} without gaps"
            )
        for name, values in factors.items():
            if len(values) != len(self.places):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.places)} runs: give one for each")

    def check_tensors(
        self, name: str, tensors: Sequence[Tensor | None], device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> None:
        """Raise TypeError or ValueError unless each tensor that there is is contiguous and of its run's elements."""
        for (_, numel), one in zip(self.places, tensors, strict=True):
            if one is None:
                continue
            if one.dtype not in dtypes:
                raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {one.dtype}: convert it first")
            if one.numel() != numel or not one.is_contiguous() or one.device != device:
                raise ValueError(
                    f"{name} must be contiguous, of its run's {numel} elements, on {device}, got {tuple(one.shape)} "
                    f"with strides {one.stride()} on {one.device}"
                )


@dataclass(frozen=True)
class Part:
    """Which elements of a bucket the packets are about: row r carries elements `first` to `last` of shard r.

    `shard`: elements of a whole shard. `numel`: elements of the bucket that are not padding. `header`: the 16 bytes
    that encoding begins every packet with; without one it leaves headers as they are.
    """

    first: int
    last: int
    shard: int
    numel: int
    block_size: int
    header: bytes | None = None

    def places(self, rows: int) -> list[slice]:
        """Of each row, in the flat vector."""
        return [slice(row * self.shard + self.first, row * self.shard + self.last) for row in range(rows)]

    def check(self, codec: str, packets: Tensor) -> None:
        """Raise TypeError or ValueError unless `packets` can carry it."""
        if self.header is not None and len(self.header) != HEADER_BYTES:
            raise ValueError(f"a header has {HEADER_BYTES} bytes, got {len(self.header)}")
        if not 0 <= self.first <= self.last <= self.shard:
            raise ValueError(f"elements {self.first} to {self.last} do not lie in a shard of {self.shard}")
        if self.first % self.block_size or self.shard % self.block_size:
            raise ValueError(f"element {self.first} of shards of {self.shard} begins no block of {self.block_size}")
        check_packets(codec, packets, self.last - self.first, self.block_size)


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
        check_vector("momentum", self.momentum, self.packets, numel=padded)
        check_vector("lost", self.lost, self.packets, numel=padded)
        if self.residual is not None:
            check_vector("residual", self.residual, self.packets, numel=padded)
        _check_denominators(self.form, self.denominators, padded, self.packets)
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
        check_vector("output", self.output, self.packets, numel=padded)
        _check_denominators("divided" if self.holds else self.form, self.denominators, padded, self.packets)
        columns = {"weights": self.weights, "replicas": self.replicas, "rates": self.rates, "decays": self.decays}
        self.segments.check(self.part.numel, padded, **columns)
        self.segments.check_tensors("weights", self.weights, self.packets.device, (torch.float32,))
        self.segments.check_tensors("replicas", self.replicas, self.packets.device, FLOAT_TYPES[1:])
        for weight, replica in zip(self.weights, self.replicas, strict=True):
            if weight is None and replica is not None:
                raise ValueError("a run has a replica and no weights to round into it: give both")
        check_factors(rates=self.rates, decays=self.decays)


@dataclass(eq=False)
class AverageAndEncode(KernelCall):
    """Encode the mean of the rows of `received`, plus `residual`, into `packets`, and leave in `lost` what was lost.

    Bits are those of `Decode` and then `Encode`, in one pass. received: uint8 [workers, packet_bytes]. residual, lost:
    fp32 [shard]; lost is overwritten, and may not be the residual. packets: uint8 [1, packet_bytes], overwritten except
    for the header. numel: valid elements of the shard. mask: uint8 [shard]; where it is 0 the mean is times 0, so that
    what is not finite stays so.
    """

    kernel = "average_and_encode"

    codec: str
    received: Tensor
    residual: Tensor | None
    lost: Tensor
    packets: Tensor
    numel: int
    block_size: int
    mask: Tensor | None = None

    @override
    def check(self) -> None:
        shard = self.lost.numel()
        for packets in (self.packets, self.received):
            Part(0, shard, shard, shard, self.block_size).check(self.codec, packets)
        check_device("received", self.received, self.packets)
        check_vector("lost", self.lost, self.packets)
        if self.residual is not None:
            check_vector("residual", self.residual, self.packets, numel=shard)
        if self.mask is not None:
            check_vector("mask", self.mask, self.packets, (torch.uint8,), shard)
        if self.packets.size(0) != 1:
            raise ValueError(f"packets must have one row, got {self.packets.size(0)}")
        if not 0 <= self.numel <= shard:
            raise ValueError(f"numel is {self.numel}: it must lie between 0 and the {shard} elements of lost")


@dataclass(eq=False)
class RenewFactors(KernelCall):
    """Have the launches of `EncodePayload` and `DecodeAndMove` that were captured with `tables` find these factors, one
    for each run, when they are replayed."""

    kernel = "renew_factors"
    beside = "tables"

    tables: CapturedTables
    beta1: Sequence[float]
    divisors: Sequence[float]
    rates: Sequence[float]
    decays: Sequence[float]

    @override
    def check(self) -> None:
        check_divisors(self.beta1, self.divisors)
        check_factors(rates=self.rates, decays=self.decays)


def check_packets(codec: str, packets: Tensor, shard: int | None = None, block_size: int = 0) -> None:
    """Raise unless `packets` are contiguous rows of bytes, one at least, of a codec that has kernels; with a `shard`,
    rows that carry so many elements."""
    check_codec(codec)
    if packets.dtype != torch.uint8:
        raise TypeError(f"packets must be torch.uint8, got {packets.dtype}")
    if packets.dim() != 2 or packets.size(0) < 1:
        raise ValueError(
            f"packets must have the shape [rows, packet_bytes] with at least one row, got {tuple(packets.shape)}"
        )
    if not packets.is_contiguous():
        raise ValueError("packets must be contiguous: call .contiguous() first")
    if shard is not None and packets.size(1) != (expected := packet_bytes(codec, shard, block_size)):
        raise ValueError(
            f"packets has rows of {packets.size(1)} bytes, but a {codec} row of {shard} elements in "
            f"blocks of {block_size} takes {expected}: size it with packet_bytes()"
        )


def check_vector(
    name: str,
    vector: Tensor,
    packets: Tensor,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    numel: int | None = None,
) -> None:
    """Raise unless `vector` is contiguous, of one of the `dtypes` and so many elements, beside `packets`."""
    if vector.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {vector.dtype}: convert it first")
    if vector.dim() != 1 or not vector.is_contiguous() or numel not in (None, vector.numel()):
        of = "" if numel is None else f" of {numel} elements"
        raise ValueError(
            f"{name} must be a contiguous vector{of}, got shape {tuple(vector.shape)} "
            f"with strides {vector.stride()}: flatten it first"
        )
    check_device(name, vector, packets)


def check_device(name: str, tensor: Tensor, packets: Tensor) -> None:
    """Raise unless a tensor is where `packets` are."""
    if tensor.device != packets.device:
        raise ValueError(f"{name} is on {tensor.device} and packets on {packets.device}: use one device")


def _check_denominators(form: str, denominators: Tensor | None, numel: int, packets: Tensor) -> None:
    if form not in ("plain", "divided", "masked"):
        raise ValueError(f"form must be 'plain', 'divided' or 'masked', got {form!r}")
    if denominators is not None:
        check_vector("denominators", denominators, packets, numel=numel)
    elif form != "plain":
        raise ValueError(f"form {form!r} takes denominators: give them, or form 'plain'")


def check_divisors(beta1: Sequence[float], divisors: Sequence[float]) -> None:
    """Raise for a beta1 outside of [0, 1], and for a divisor that is 0 or not finite."""
    for one in set(beta1):
        if not 0.0 <= one <= 1.0:
            raise ValueError(f"beta1 must lie between 0 and 1, got {list(beta1)}")
    for one in set(divisors):
        if not _LEAST <= abs(one) <= _LARGEST:
            raise ValueError(f"divisors must be finite and not 0, in float32, got {list(divisors)}")


def check_factors(**factors: Sequence[float]) -> None:
    """Raise for a number that float32 does not hold."""
    for name, values in factors.items():
        for one in set(values):
            if not abs(one) <= _LARGEST:
                raise ValueError(f"{name} must be finite, in float32, got {list(values)}")
