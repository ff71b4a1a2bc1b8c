"""Arguments of the kernels over a whole bucket: where its runs lie, since gradients and weights lie apart in memory
while the bucket's state is flat; and a record for each kernel, which refuses what does not fit together, so that no
backend has to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.kernels.tables import KeptTables, Tables
from thinwire.compress.packet_layout import HEADER_BYTES, check_codec, packet_bytes

__all__ = [
    "DIGESTED",
    "AverageAndEncode",
    "DecodeAndMove",
    "DigestGradients",
    "EncodePayload",
    "Part",
    "PayloadForm",
    "Segments",
    "UpdateForm",
    "check_covered",
    "check_device",
    "check_divisors",
    "check_factors",
    "check_finite",
    "check_flat",
    "check_runs",
    "digest_count",
]


class Segments:
    """Runs of a flat vector, in order and without overlap: run k is `numels[k]` elements from element `firsts[k]` on.

    What no run covers is padding; `covered` counts the other elements, which end at `end`. `tables`: where a backend
    finds on its device what it tells launches of these runs.
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
        self.tables: Tables = KeptTables()
        self.end = end
        self.covered = sum(numel for _, numel in self.places)

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """First element and end of each run: int64 [runs, 2]."""
        firsts = np.array([first for first, _ in self.places], dtype=np.int64)
        numels = np.array([numel for _, numel in self.places], dtype=np.int64)
        return np.stack([firsts, firsts + numels], axis=1)


PayloadForm = Literal["plain", "divided", "masked"]
"""What is done with denominators in `encode_payload`."""

UpdateForm = Literal["plain", "divided"]
"""What is done with denominators in `decode_and_move`."""

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


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
        check_codec(codec)
        if packets.dtype != torch.uint8 or packets.dim() != 2 or not packets.is_contiguous() or not packets.size(0):
            raise TypeError(
                f"packets must be contiguous torch.uint8 [rows, packet_bytes] with at least one row, got "
                f"{packets.dtype} {tuple(packets.shape)}"
            )
        if self.header is not None and len(self.header) != HEADER_BYTES:
            raise ValueError(f"a header has {HEADER_BYTES} bytes, got {len(self.header)}")
        if not 0 <= self.first <= self.last <= self.shard:
            raise ValueError(f"elements {self.first} to {self.last} do not lie in a shard of {self.shard}")
        if self.first % self.block_size or self.shard % self.block_size:
            raise ValueError(f"element {self.first} of shards of {self.shard} begins no block of {self.block_size}")
        expected = packet_bytes(codec, self.last - self.first, self.block_size)
        if packets.size(1) != expected:
            raise ValueError(
                f"packets has rows of {packets.size(1)} bytes, but {self.last - self.first} elements in blocks of "
                f"{self.block_size} take {expected}: size it with packet_bytes()"
            )


@dataclass(eq=False)
class EncodePayload:
    """Arguments of `encode_payload`."""

    kernel: ClassVar = "encode_payload"

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

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        self.part.check(self.codec, self.packets)
        padded = self.part.shard * self.packets.size(0)
        check_flat("momentum", self.momentum, padded, self.packets)
        check_flat("lost", self.lost, padded, self.packets)
        if self.residual is not None:
            check_flat("residual", self.residual, padded, self.packets)
        _check_denominators(self.form, self.denominators, padded, self.packets)
        check_runs("gradients", self.gradients, self.segments, self.packets, _FLOAT_TYPES)
        check_factors(self.segments, beta1=self.beta1, divisors=self.divisors)
        check_covered(self.segments, self.part.numel, padded)
        check_divisors(self.beta1, self.divisors)


@dataclass(eq=False)
class DecodeAndMove:
    """Arguments of `decode_and_move`."""

    kernel: ClassVar = "decode_and_move"

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

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        self.part.check(self.codec, self.packets)
        padded = self.part.shard * self.packets.size(0)
        check_flat("output", self.output, padded, self.packets)
        _check_denominators("divided" if self.holds else self.form, self.denominators, padded, self.packets)
        check_runs("weights", self.weights, self.segments, self.packets, (torch.float32,))
        check_runs("replicas", self.replicas, self.segments, self.packets, _FLOAT_TYPES[1:])
        check_factors(self.segments, rates=self.rates, decays=self.decays)
        check_covered(self.segments, self.part.numel, padded)
        for weight, replica in zip(self.weights, self.replicas, strict=True):
            if weight is None and replica is not None:
                raise ValueError("a run has a replica and no weights to round into it: give both")
        check_finite(rates=self.rates, decays=self.decays)


@dataclass(eq=False)
class AverageAndEncode:
    """Arguments of `average_and_encode`."""

    kernel: ClassVar = "average_and_encode"

    codec: str
    received: Tensor
    residual: Tensor | None
    lost: Tensor
    packets: Tensor
    numel: int
    block_size: int

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        shard = self.lost.numel()
        Part(0, shard, shard, shard, self.block_size).check(self.codec, self.packets)
        Part(0, shard, shard, shard, self.block_size).check(self.codec, self.received)
        check_device("received", self.received, self.packets)
        check_flat("lost", self.lost, shard, self.packets)
        if self.residual is not None:
            check_flat("residual", self.residual, shard, self.packets)
        if self.packets.size(0) != 1:
            raise ValueError(f"packets must have one row, got {self.packets.size(0)}")
        if not 0 <= self.numel <= shard:
            raise ValueError(f"numel is {self.numel}: it must lie between 0 and the {shard} elements of lost")


def check_flat(
    name: str, vector: Tensor, numel: int, packets: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> None:
    """Raise unless `vector` is a contiguous vector of so many elements beside `packets`."""
    if vector.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {vector.dtype}: convert it first")
    if vector.dim() != 1 or not vector.is_contiguous() or vector.numel() != numel:
        raise ValueError(
            f"{name} must be a contiguous vector of {numel} elements, got shape {tuple(vector.shape)} with strides "
            f"{vector.stride()}"
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
        check_flat("denominators", denominators, numel, packets)
    elif form != "plain":
        raise ValueError(f"form {form!r} takes denominators: give them, or form 'plain'")


def check_runs(
    name: str, tensors: Sequence[Tensor | None], segments: Segments, packets: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless there is a tensor, or None, for each run, contiguous and beside `packets`."""
    if len(tensors) != len(segments):
        raise ValueError(f"{name} has {len(tensors)} tensors for {len(segments)} runs: give one, or None, for each")
    device = packets.device
    for (_, numel), one in zip(segments.places, tensors, strict=True):
        if one is None:
            continue
        if one.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {one.dtype}: convert it first")
        if one.numel() != numel or not one.is_contiguous() or one.device != device:
            raise ValueError(
                f"{name} must be contiguous, of its run's {numel} elements, on {device}, got {tuple(one.shape)} with "
                f"strides {one.stride()} on {one.device}"
            )


def check_factors(segments: Segments, **factors: Sequence[float]) -> None:
    """Raise unless there is a number for each run."""
    for name, values in factors.items():
        if len(values) != len(segments):
            raise ValueError(f"{name} has {len(values)} numbers for {len(segments)} runs: give one for each")


def check_divisors(beta1: Sequence[float], divisors: Sequence[float]) -> None:
    """Raise for a beta1 outside of [0, 1], and for a divisor that is 0 or not finite."""
    if not all(0.0 <= one <= 1.0 for one in set(beta1)):
        raise ValueError(f"beta1 must lie between 0 and 1, got {list(beta1)}")
    if not all(_LEAST <= abs(one) <= _LARGEST for one in set(divisors)):
        raise ValueError(f"divisors must be finite and not 0, in float32, got {list(divisors)}")


def check_finite(**factors: Sequence[float]) -> None:
    """Raise for a number that float32 does not hold."""
    for name, values in factors.items():
        if not all(abs(one) <= _LARGEST for one in set(values)):
            raise ValueError(f"{name} must be finite, in float32, got {list(values)}")


def check_covered(segments: Segments, numel: int, padded: int) -> None:
    """Raise unless the runs cover the first `numel` of `padded` elements without gaps."""
    if segments.covered != numel or segments.end != numel or numel > padded:
        raise ValueError(
            f"runs that end at {segments.end} do not cover the {numel} elements of a bucket of {padded} without gaps"
        )


DIGESTED = 8192
"""Elements of a bucket that share a digest."""


def digest_count(segments: Segments) -> int:
    """Digests of a bucket."""
    return -(-segments.end // DIGESTED)


@dataclass(eq=False)
class DigestGradients:
    """Arguments of `digest_gradients`."""

    kernel: ClassVar = "digest_gradients"

    segments: Segments
    gradients: Sequence[Tensor | None]
    digests: Tensor

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        if self.digests.dtype != torch.int32 or self.digests.shape != (digest_count(self.segments),):
            raise ValueError(
                f"digests must be torch.int32 [{digest_count(self.segments)}], got {self.digests.dtype} "
                f"{tuple(self.digests.shape)}"
            )
        check_runs("gradients", self.gradients, self.segments, self.digests, _FLOAT_TYPES)
