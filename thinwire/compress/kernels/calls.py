"""Arguments of the kernels over single vectors: a record for each, which refuses what does not fit together, so that no
backend has to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.buckets import FLOAT_TYPES, KernelCall, check_packets, check_row_bytes, check_vector
from thinwire.compress.packet_layout import (
    BLOCK_SCALES,
    CODE_BITS,
    HEADER_BYTES,
    SCALE_BYTES,
)

__all__ = [
    "Decode",
    "Encode",
    "PacketCall",
    "StoreRounded",
    "scales",
    "span",
]


def scales(codec: str, packets: Tensor, block_size: int) -> Tensor:
    """The scales in `packets`, uint8 [rows, packet_bytes]: fp32 [rows, blocks · scales a block], a view."""
    scale_bytes = SCALE_BYTES * BLOCK_SCALES[codec]
    blocks = (packets.shape[1] - HEADER_BYTES) // (scale_bytes + block_size * CODE_BITS[codec] // 8)
    return packets[:, HEADER_BYTES : HEADER_BYTES + scale_bytes * blocks].view(torch.float32)


def span(vector: Tensor) -> int:
    """Elements from the first of a vector, or of [rows, shard], to its last, what lies between rows included."""
    if vector.dim() < 2 or not vector.numel():
        return vector.numel()
    return (vector.size(0) - 1) * vector.stride(0) + vector.size(1)


@dataclass(eq=False)
class Encode(KernelCall):
    """Arguments of `encode`, or with a `new_residual` those of `encode_rounded`."""

    kernel = "encode"

    codec: str
    payload: Tensor
    residual: Tensor | None
    packets: Tensor
    numel: int
    block_size: int
    new_residual: Tensor | None = None

    @property
    def shard(self) -> int:
        """Elements that a row of `packets` carries."""
        return self.payload.numel() // self.packets.size(0)

    def runs(self) -> Iterator[Encode]:
        """The same, flat: all at once, or row after row where the rows of floats lie apart."""
        return _runs(self, payload=self.payload, residual=self.residual, new_residual=self.new_residual)

    @override
    def check(self) -> None:
        kept = torch.float32 if self.new_residual is None else torch.bfloat16
        check_packets(self.codec, self.packets)
        _check_run("payload", self.payload, self.packets, torch.float32)
        for name, vector in (("residual", self.residual), ("new_residual", self.new_residual)):
            if vector is None:
                continue
            _check_run(name, vector, self.packets, kept)
            given, wanted = vector.numel(), self.payload.numel()
            if given != wanted:
                raise ValueError(f"{name} has {given} elements and payload {wanted}: give both the same")
            strides = vector.stride(), self.payload.stride()
            if vector.dim() != self.payload.dim() or (vector.dim() == 2 and strides[0] != strides[1]):
                raise ValueError(f"{name} has strides {strides[0]} and payload {strides[1]}: lay both out alike")
        rows = self.packets.size(0)
        _check_rows(self.codec, "payload", self.payload, rows, self.packets, self.block_size, self.numel)


@dataclass(eq=False)
class Decode(KernelCall):
    """Arguments of `decode`, or those of `decode_mean`."""

    kernel = "decode"

    codec: str
    packets: Tensor
    output: Tensor
    numel: int
    block_size: int
    mean: bool

    @property
    def averaged(self) -> int:
        """How many rows of `packets` are about the same elements of `output`."""
        return self.packets.size(0) if self.mean else 1

    @property
    def shard(self) -> int:
        """Elements that a row of `packets` carries."""
        return self.output.numel() * self.averaged // self.packets.size(0)

    def runs(self) -> Iterator[Decode]:
        """The same, flat: all at once, or row after row where the rows of floats lie apart."""
        return _runs(self, output=self.output)

    @override
    def check(self) -> None:
        check_packets(self.codec, self.packets)
        if self.mean:
            check_vector("output", self.output, self.packets)
        else:
            _check_run("output", self.output, self.packets, torch.float32)
        rows = self.packets.size(0) // self.averaged
        _check_rows(self.codec, "output", self.output, rows, self.packets, self.block_size, self.numel)


@dataclass(eq=False)
class StoreRounded(KernelCall):
    """Arguments of `store_rounded`."""

    kernel = "store_rounded"

    weights: Tensor
    values: Tensor
    seed: int

    @property
    @override
    def device(self) -> torch.device:
        return self.weights.device

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


PacketCall = Encode | Decode
"""Calls that read or write the packets of a codec."""


_OfRows = TypeVar("_OfRows", Encode, Decode)


def _runs(call: _OfRows, **vectors: Any) -> Iterator[_OfRows]:
    """`call` in pieces in which the `vectors`, None or all laid out alike, are flat."""
    first = next(iter(vectors.values()))
    if first.dim() == 1:
        yield call
        return
    if first.is_contiguous():
        pieces = {name: one if one is None else one.view(-1) for name, one in vectors.items()}
        yield type(call)(**(vars(call) | pieces))
        return
    rows, shard = first.shape
    for row in range(rows):
        pieces = {name: one if one is None else one[row] for name, one in vectors.items()}
        pieces |= {"packets": call.packets[row : row + 1]}
        valid = min(max(call.numel - row * first.stride(0), 0), shard)
        yield type(call)(**(vars(call) | pieces | {"numel": valid}))


def _check_run(name: str, vector: Tensor, packets: Tensor, dtype: torch.dtype) -> None:
    """A vector, or rows of floats that may lie apart, one for each packet."""
    if vector.dim() != 2:
        check_vector(name, vector, packets, (dtype,))
        return
    rows, shard = vector.shape
    if rows != packets.size(0) or vector.stride(1) != 1 or (rows > 1 and vector.stride(0) < shard):
        raise ValueError(
            f"{name} must be a contiguous vector, or have a row without gaps for each of the {packets.size(0)} rows of "
            f"packets, got shape {tuple(vector.shape)} with strides {vector.stride()}"
        )
    check_vector(name, vector[0], packets, (dtype,))


def _check_rows(codec: str, name: str, vector: Tensor, rows: int, packets: Tensor, block_size: int, valid: int) -> None:
    """Whether `packets` carry the elements of a vector, of which `valid` are no padding, in so many rows."""
    if vector.numel() % rows:
        raise ValueError(f"{name} has {vector.numel()} elements, not a multiple of the {rows} rows of packets")
    check_row_bytes(codec, vector.numel() // rows, packets, block_size)
    if not 0 <= valid <= span(vector):
        raise ValueError(f"numel is {valid}: it must lie between 0 and the {span(vector)} elements of {name}")
