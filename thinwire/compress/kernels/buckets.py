"""Arguments of fused kernels over a whole bucket, one call for all of its parameters, whose gradients and weights lie
apart: the runs and parts of a bucket, what is checked of them, and the calls over packed state, which is momentum as
sign1 packets, a preconditioner of 8 bits, and weights that lie in one run of memory. `calls` has those over fp32."""

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
_TABLE_ENTRIES = 256
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
        check_packets(codec, packets, self.last - self.first, self.block_size)
        if self.first % self.block_size or self.shard % self.block_size:
            raise ValueError(f"element {self.first} of shards of {self.shard} begins no block of {self.block_size}")


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
        check_vectors(self.packets, shard, lost=self.lost, residual=self.residual)
        check_vectors(self.packets, shard, (torch.uint8,), mask=self.mask)
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


@dataclass(frozen=True, eq=False)
class PackedState:
    """Momentum u, as sign1 packets, and a preconditioner of 8 bits, of a whole bucket.

    packets: uint8 [rows, packet_bytes("sign1", shard, block_size)], what u_e is decoded from for element e of the
    bucket: place e mod shard of row e // shard. codes: uint8 [padded_numel]; where one is 0 the coordinate does not
    move. numel: elements that are not padding.
    """

    packets: Tensor
    codes: Tensor
    shard: int
    numel: int
    block_size: int

    @property
    def whole(self) -> Part:
        """The part that is all of every shard."""
        return Part(0, self.shard, self.shard, self.numel, self.block_size)

    def check(self, segments: Segments, **factors: Sequence[object]) -> None:
        """Raise TypeError or ValueError unless the tensors fit together, and there are `factors` for each run."""
        self.whole.check("sign1", self.packets)
        padded = self.shard * self.packets.size(0)
        check_vectors(self.packets, padded, (torch.uint8,), codes=self.codes)
        segments.check(self.numel, padded, **factors)


@dataclass(eq=False)
class EncodePackedPayload(KernelCall):
    """Encode the next preconditioned momentum, plus `residual`, as sign1 packets, and leave in `lost` what was lost.

        payload_e = beta1_k · u_e + ((1 - beta1_k) · (gradient_k / divisor_k)) · tables[k][codes_e]

    for the elements e of run k, each operation rounded to fp32 by itself: 0, or NaN where the quotient is not finite,
    where the code is 0. Then what `encode` does, or `encode_rounded`.

    gradients: fp32, bf16 or fp16, contiguous, of any shape; None counts as zeros. tables: fp32 [runs, 256]; entry 0 is
    not looked at. residual, lost: fp32 or bf16 [padded_numel], both alike; lost is overwritten where the part lies, to
    the nearest, and may be the residual itself. packets: uint8 [rows, packet_bytes], overwritten, but for the
    headers where the part has none.
    """

    kernel = "encode_packed_payload"
    codec: ClassVar[str] = "sign1"

    state: PackedState
    segments: Segments
    gradients: Sequence[Tensor | None]
    beta1: Sequence[float]
    divisors: Sequence[float]
    tables: Tensor
    residual: Tensor
    lost: Tensor
    packets: Tensor
    part: Part

    @override
    def check(self) -> None:
        self.state.check(self.segments, gradients=self.gradients, beta1=self.beta1, divisors=self.divisors)
        check_device("state.packets", self.state.packets, self.packets)
        self.part.check("sign1", self.packets)
        padded = self.part.shard * self.packets.size(0)
        if padded != self.state.codes.numel() or self.part.numel != self.state.numel:
            raise ValueError(f"the part is of a bucket of {padded} elements, the state of {self.state.codes.numel()}")
        check_vectors(self.packets, padded, (torch.float32, torch.bfloat16), residual=self.residual)
        check_vectors(self.packets, padded, (self.residual.dtype,), lost=self.lost)
        self.segments.check_tensors("gradients", self.gradients, self.packets.device, FLOAT_TYPES)
        check_divisors(self.beta1, self.divisors)
        if self.tables.dtype != torch.float32 or self.tables.shape != (len(self.segments), _TABLE_ENTRIES):
            raise ValueError(
                f"tables must be float32 [{len(self.segments)}, {_TABLE_ENTRIES}], got {self.tables.dtype} "
                f"{tuple(self.tables.shape)}"
            )
        check_device("tables", self.tables, self.packets)


@dataclass(eq=False)
class MovePacked(KernelCall):
    """Move the weights of a bucket in place by u: w_e = decay_k · w_e - rate_k · u_e for the elements e of run k.

    u_e is 0 where the code is 0. weights: fp32, bf16 or fp16 [n], elements `first` to `first` + n of the bucket. moves:
    whether a run's weights move.

    Calculated in fp32. 16 bits are rounded at random to one of their two neighbours, the nearer the likelier, so that
    the mean is kept: by 16 bits for bf16 and 13 for fp16, which depend on `seed` (an int64) and e only
    (`reference.random_bits`). Equal arguments give equal bits on every rank, device and backend. Give every step and
    every bucket a seed of its own. Infinities and NaN stay; values beyond the largest finite one round to it or to
    infinity.
    fp16 below 2^-14 are rounded as finely, from the nearest multiple of 2^-37.
    """

    kernel = "move_packed"
    beside = "weights"

    state: PackedState
    segments: Segments
    weights: Tensor
    first: int
    moves: Sequence[bool]
    rates: Sequence[float]
    decays: Sequence[float]
    seed: int

    @override
    def check(self) -> None:
        self.state.check(self.segments, rates=self.rates, decays=self.decays, moves=self.moves)
        check_vectors(self.state.packets, None, FLOAT_TYPES, weights=self.weights)
        if self.first < 0 or self.first + self.weights.numel() > self.state.codes.numel():
            raise ValueError(
                f"{self.weights.numel()} weights from element {self.first} on do not lie in a bucket of "
                f"{self.state.codes.numel()}"
            )
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


def check_vectors(
    packets: Tensor,
    numel: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    **vectors: Tensor | None,
) -> None:
    """Raise unless each vector that there is is contiguous, of one of the `dtypes` and so many elements, beside
    `packets`."""
    device = packets.device
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {vector.dtype}: convert it first")
        if vector.dim() != 1 or not vector.is_contiguous() or numel not in (None, vector.numel()):
            of = "" if numel is None else f" of {numel} elements"
            raise ValueError(
                f"{name} must be a contiguous vector{of}, got shape {tuple(vector.shape)} "
                f"with strides {vector.stride()}: flatten it first"
            )
        if vector.device != device:
            check_device(name, vector, packets)


def check_device(name: str, tensor: Tensor, packets: Tensor) -> None:
    """Raise unless a tensor is where `packets` are."""
    if tensor.device != packets.device:
        raise ValueError(f"{name} is on {tensor.device} and packets on {packets.device}: use one device")


def check_form(form: str, denominators: Tensor | None) -> None:
    """Raise unless there are denominators, if the form takes some."""
    if form not in ("plain", "divided", "masked"):
        raise ValueError(f"form must be 'plain', 'divided' or 'masked', got {form!r}")
    if denominators is None and form != "plain":
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


def keys(seed: int) -> tuple[int, int]:
    """Two 32-bit keys from a seed modulo 2^64, by SplitMix64: seeds that differ in one bit give unrelated keys."""
    wide = 0xFFFFFFFFFFFFFFFF
    mixed = (seed + 0x9E3779B97F4A7C15) & wide
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & wide
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & wide
    mixed ^= mixed >> 31
    return mixed & 0xFFFFFFFF, mixed >> 32
