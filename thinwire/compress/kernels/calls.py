"""Arguments of the kernels: a record for each, which refuses what does not fit together, so that no backend has to; and
the ops that call them, each with its schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.compress.kernels.headers import CheckHeaders, WriteHeaders
from thinwire.compress.packet_layout import (
    BLOCK_SCALES,
    CODE_BITS,
    HEADER_BYTES,
    SCALE_BYTES,
    check_codec,
    packet_bytes,
)

__all__ = [
    "CODEC_OPERATIONS",
    "OPERATIONS",
    "Call",
    "Decode",
    "Encode",
    "Operation",
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


_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Encode:
    """Arguments of `encode`, or with a `new_residual` those of `encode_rounded`."""

    kernel: ClassVar = "encode"

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

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        kept = torch.float32 if self.new_residual is None else torch.bfloat16
        _check_packets(self.codec, self.packets)
        _check_run("payload", self.payload, self.packets, torch.float32)
        for name, vector in (("residual", self.residual), ("new_residual", self.new_residual)):
            if vector is not None:
                _check_laid_out_like(name, vector, kept, self.payload, self.packets)
        _check_rows(self.codec, "payload", self.payload.numel(), self.packets.size(0), self.packets, self.block_size)
        _check_numel(self.numel, "payload", span(self.payload))


@dataclass(eq=False)
class Decode:
    """Arguments of `decode`, or those of `decode_mean`."""

    kernel: ClassVar = "decode"

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

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        _check_packets(self.codec, self.packets)
        if self.mean:
            _check_vector("output", self.output, self.packets)
        else:
            _check_run("output", self.output, self.packets, torch.float32)
        rows = self.packets.size(0) // self.averaged
        _check_rows(self.codec, "output", self.output.numel(), rows, self.packets, self.block_size)
        _check_numel(self.numel, "output", span(self.output))


@dataclass(eq=False)
class StoreRounded:
    """Arguments of `store_rounded`."""

    kernel: ClassVar = "store_rounded"

    weights: Tensor
    values: Tensor
    seed: int

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        weights, values = self.weights, self.values
        if values.dtype != torch.float32 or weights.dtype not in _FLOAT_TYPES:
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

Call = PacketCall | StoreRounded | WriteHeaders | CheckHeaders


class Operation(NamedTuple):
    """What an op takes, after the codec where there is one for each, and the call that it makes of it."""

    schema: str
    call: Callable[..., Call]


def _encode_rounded(
    codec: str,
    payload: Tensor,
    residual: Tensor | None,
    new_residual: Tensor,
    packets: Tensor,
    numel: int,
    block_size: int,
) -> Encode:
    return Encode(codec, payload, residual, packets, numel, block_size, new_residual)


CODEC_OPERATIONS = {
    "encode": Operation(
        "(Tensor(a!) payload, Tensor? residual, Tensor(b!) packets, int numel, int block_size) -> ()", Encode
    ),
    "encode_rounded": Operation(
        "(Tensor payload, Tensor? residual, Tensor(a!) new_residual, Tensor(b!) packets, int numel, int block_size) "
        "-> ()",
        _encode_rounded,
    ),
    "decode": Operation(
        "(Tensor packets, Tensor(a!) output, int numel, int block_size) -> ()", partial(Decode, mean=False)
    ),
    "decode_mean": Operation(
        "(Tensor packets, Tensor(a!) output, int numel, int block_size) -> ()", partial(Decode, mean=True)
    ),
}
OPERATIONS = {
    "store_rounded": Operation("(Tensor(a!) weights, Tensor values, int seed) -> ()", StoreRounded),
    "write_headers": Operation(
        "(Tensor(a!) packets, int first, int second, int scales, Tensor? condition, int flag) -> ()", WriteHeaders
    ),
    "check_headers": Operation(
        "(Tensor headers, int first, int second, int known, Tensor(a!) report) -> ()", CheckHeaders
    ),
}


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


def _check_packets(codec: str, packets: Tensor) -> None:
    check_codec(codec)
    if packets.dtype != torch.uint8:
        raise TypeError(f"packets must be torch.uint8, got {packets.dtype}")
    if packets.dim() != 2 or packets.size(0) < 1:
        raise ValueError(
            f"packets must have the shape [rows, packet_bytes] with at least one row, got {tuple(packets.shape)}"
        )
    if not packets.is_contiguous():
        raise ValueError("packets must be contiguous: call .contiguous() first")


def _check_vector(
    name: str, vector: Tensor, packets: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> None:
    if vector.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {vector.dtype}: convert it first")
    if vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous vector, got shape {tuple(vector.shape)} "
            f"with strides {vector.stride()}: flatten it first"
        )
    if vector.device != packets.device:
        raise ValueError(f"{name} is on {vector.device} and packets on {packets.device}: use one device")


def _check_run(name: str, vector: Tensor, packets: Tensor, dtype: torch.dtype) -> None:
    """A vector, or rows of floats that may lie apart, one for each packet."""
    if vector.dim() != 2:
        _check_vector(name, vector, packets, (dtype,))
        return
    rows, shard = vector.shape
    if rows != packets.size(0) or vector.stride(1) != 1 or (rows > 1 and vector.stride(0) < shard):
        raise ValueError(
            f"{name} must be a contiguous vector, or have a row without gaps for each of the {packets.size(0)} rows of "
            f"packets, got shape {tuple(vector.shape)} with strides {vector.stride()}"
        )
    _check_vector(name, vector[0], packets, (dtype,))


def _check_laid_out_like(name: str, vector: Tensor, dtype: torch.dtype, payload: Tensor, packets: Tensor) -> None:
    """A second vector or rows of floats, laid out in memory as the payload is."""
    _check_run(name, vector, packets, dtype)
    if vector.numel() != payload.numel():
        raise ValueError(f"{name} has {vector.numel()} elements and payload {payload.numel()}: give both the same")
    if vector.dim() != payload.dim() or (vector.dim() == 2 and vector.stride() != payload.stride()):
        raise ValueError(f"{name} has strides {vector.stride()} and payload {payload.stride()}: lay both out alike")


def _check_rows(codec: str, name: str, numel: int, rows: int, packets: Tensor, block_size: int) -> None:
    if numel % rows:
        raise ValueError(f"{name} has {numel} elements, not a multiple of the {rows} rows of packets")
    _check_row_bytes(codec, numel // rows, packets, block_size)


def _check_row_bytes(codec: str, shard: int, packets: Tensor, block_size: int) -> None:
    expected = packet_bytes(codec, shard, block_size)
    if packets.size(1) != expected:
        raise ValueError(
            f"packets has rows of {packets.size(1)} bytes, but a {codec} row of {shard} elements in "
            f"blocks of {block_size} takes {expected}: size it with packet_bytes()"
        )


def _check_numel(numel: int, name: str, capacity: int) -> None:
    if numel < 0 or numel > capacity:
        raise ValueError(f"numel is {numel}: it must lie between 0 and the {capacity} elements of {name}")
