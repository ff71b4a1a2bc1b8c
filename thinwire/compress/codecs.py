"""Codecs: each turns rows of floats into packets and back, over kernels that differ by device.
One interface, so that the exchange, the optimizers and the DDP hook need not know which codec they carry."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.buckets import AverageAndEncode
from thinwire.compress.kernels.calls import Decode, Encode
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet_layout import (
    BLOCK_SCALES,
    CODE_BITS,
    DEFAULT_BLOCK_SIZE,
    HEADER_BYTES,
    SCALE_BYTES,
    CodecName,
    check_block_size,
    codec_packet_bytes,
    scale_block,
)

_IDENTIFIERS = {"sign1": 1, "int8": 2, "bf16": 3, "none": 4, "fp16": 5, "int4": 6, "stat2": 7, "fp8": 8}
_DTYPES: Mapping[CodecName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": torch.float32}


class Codec(ABC):
    """A lossy map of rows of fp32 to packets.

    A row of packets is of one shard, a multiple of `block_size`, or of the same part of each, the elements `place`.
    Shards of floats lie end to end, [rows · shard]. `numel` counts their valid elements; what lies beyond is padding,
    which holds zeros, enters no scale and decodes to zero.
    """

    has_kernels: ClassVar[bool] = False

    def __init__(self, name: CodecName, block_size: int) -> None:
        self.name = name
        self.identifier = _IDENTIFIERS[name]  # the codec byte of a packet's header
        self.block_size = block_size
        self.scale_block = scale_block(name, block_size)
        """Elements that share their scales: a block to the kernels. It divides `block_size`."""

    def packet_bytes(self, shard: int) -> int:
        """Bytes of one packet that carries `shard` elements, header included."""
        return codec_packet_bytes(self.name, shard, self.block_size)

    @abstractmethod
    def encode(
        self,
        payload: Tensor,
        residual: Tensor | None,
        packets: Tensor,
        numel: int,
        place: slice | None = None,
        new_residual: Tensor | None = None,
    ) -> None:
        """Write `payload + residual`, fp32, both laid out alike, into `packets`, uint8 [rows, packet_bytes].

        `payload` becomes what the codec lost, that is the next residual; `residual` itself is only read, so that a
        step that is skipped can keep it. With a `new_residual`, which may be `residual`, both are bf16, what was lost
        goes there, and `payload` is spent. Headers are not touched.
        """

    @abstractmethod
    def decode(self, packets: Tensor, output: Tensor, numel: int, place: slice | None = None) -> None:
        """Read `packets`, uint8 [rows, packet_bytes], into `output`, fp32."""

    @abstractmethod
    def scale(self, packets: Tensor, factor: float) -> None:
        """Multiply all that `packets`, uint8 [rows, packet_bytes], decode to."""

    def average_and_encode(
        self,
        received: Tensor,
        residual: Tensor | None,
        average: Tensor,
        packets: Tensor,
        numel: int,
        mask: Tensor | None = None,
    ) -> None:
        """Encode the mean of `received`, plus `residual`, and leave in `average`, fp32 [shard], what the codec lost.

        received: uint8 [workers, packet_bytes]; packets: uint8 [1, packet_bytes]; mask: uint8 [shard], 0 where the mean
        is times 0.
        """
        self.decode_mean(received, average, numel)
        if mask is not None:
            average.mul_(mask.ne(0))
        self.encode(average, residual, packets, numel)

    @abstractmethod
    def all_finite(self, packets: Tensor) -> bool | Tensor:
        """Whether nothing that `packets` carry is NaN or infinite: on an accelerator a bool scalar that is there.

        Residuals are finite, so that what is encoded is not exactly where an average is not.
        """

    def finite_scales(self, packets: Tensor) -> int:
        """Fp32 scales behind the header of each row of `packets` that are finite exactly where `all_finite` says so,
        for `write_headers` to look at; 0 where no scales tell."""
        return 0

    @abstractmethod
    def decode_mean(self, packets: Tensor, output: Tensor, numel: int) -> None:
        """Average `packets`, uint8 [workers, packet_bytes], summed in row order, into `output`, fp32 [shard]."""

    def decode_mean_of(self, packets: Tensor, output: Tensor, numel: int, weights: Sequence[float] | None) -> None:
        """Like `decode_mean`, with `weights` of the rows, which add up to 1; a row of weight 0 may hold anything."""
        if weights is None:
            self.decode_mean(packets, output, numel)
            return
        output.zero_()
        for row, weight in enumerate(weights):
            if weight:
                one = torch.empty_like(output)
                self.decode(packets[row : row + 1], one, numel)
                output.add_(one, alpha=weight)

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The packets, uint8 [rows, packet_bytes], of rows whose parts `parts` are the packets of, in order."""


class _BlockCodec(Codec):
    """Scales for each block, then codes of a fixed number of bits: on the kernels."""

    has_kernels = True

    @override
    def encode(
        self,
        payload: Tensor,
        residual: Tensor | None,
        packets: Tensor,
        numel: int,
        place: slice | None = None,
        new_residual: Tensor | None = None,
    ) -> None:
        valid = _within(payload, numel)
        execute(Encode(self.name, payload, residual, packets, valid, self.scale_block, new_residual, place))

    @override
    def decode(self, packets: Tensor, output: Tensor, numel: int, place: slice | None = None) -> None:
        execute(Decode(self.name, packets, output, _within(output, numel), self.scale_block, place=place))

    @override
    def scale(self, packets: Tensor, factor: float) -> None:
        scales(self.name, packets, self.scale_block).mul_(factor)

    @override
    def average_and_encode(
        self,
        received: Tensor,
        residual: Tensor | None,
        average: Tensor,
        packets: Tensor,
        numel: int,
        mask: Tensor | None = None,
    ) -> None:
        execute(AverageAndEncode(self.name, received, residual, average, packets, numel, self.scale_block, mask))

    @override
    def all_finite(self, packets: Tensor) -> bool | Tensor:
        return all_finite(scales(self.name, packets, self.scale_block))

    @override
    def finite_scales(self, packets: Tensor) -> int:
        return scales(self.name, packets, self.scale_block).shape[1]

    @override
    def decode_mean(self, packets: Tensor, output: Tensor, numel: int) -> None:
        execute(Decode(self.name, packets, output, numel, self.scale_block, mean=True))

    @override
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        of_parts = [scales(self.name, part, self.scale_block).view(torch.uint8) for part in parts]
        codes = [part[:, HEADER_BYTES + found.shape[1] :] for part, found in zip(parts, of_parts, strict=True)]
        return torch.cat([parts[0][:, :HEADER_BYTES], *of_parts, *codes], dim=1)


def scales(codec: str, packets: Tensor, block_size: int) -> Tensor:
    """The scales in `packets`, uint8 [rows, packet_bytes]: fp32 [rows, blocks · scales a block], a view."""
    scale_bytes = SCALE_BYTES * BLOCK_SCALES[codec]
    blocks = (packets.shape[1] - HEADER_BYTES) // (scale_bytes + block_size * CODE_BITS[codec] // 8)
    return packets[:, HEADER_BYTES : HEADER_BYTES + scale_bytes * blocks].view(torch.float32)


def all_finite(values: Tensor) -> bool | Tensor:
    """Whether all of `values`, fp32 [n], are finite: on an accelerator a bool scalar that is there."""
    if not values.numel():
        return True
    if values.device.type == "cpu":
        least, greatest = torch.aminmax(values)  # NaN where there is one
        return math.isfinite(least) and math.isfinite(greatest)
    magnitude: Tensor = torch.linalg.vector_norm(values, math.inf)
    return magnitude < math.inf


_FEW = 16
"""One in so many: numbers of 8 bytes then take less memory than a mask, and less time than a pass over it."""


def held_coordinates(mask: Tensor) -> Tensor:
    """What `zero_held` takes, of a bool mask [numel]: on a CPU the numbers of the coordinates, ascending, int64, where
    they are few; else the mask."""
    if mask.device.type != "cpu" or _FEW * int(mask.count_nonzero()) > mask.numel():
        return mask
    return mask.nonzero().view(-1)


def _within(vector: Tensor, numel: int) -> int:
    """Of `numel` elements those that a vector has."""
    return min(max(numel, 0), vector.numel())


def _rows(vector: Tensor, packets: Tensor, place: slice | None) -> Tensor:
    """What each of the packets is of in a vector, [rows, elements], a view."""
    shards = vector.view(packets.shape[0], -1)
    return shards if place is None else shards[:, place]


class CastCodec(Codec):
    """The values themselves in a narrower (`bf16`, `fp16`) or the same (`none`) dtype: torch's own copies do it."""

    def __init__(self, name: CodecName, block_size: int) -> None:
        super().__init__(name, block_size)
        self._dtype = _DTYPES[name]

    def values(self, packets: Tensor, shard: int | None = None) -> Tensor:
        """What `packets` carry, in their own memory and the dtype in which it travels: [rows, shard].

        Raises ValueError for packets that do not carry `shard` elements each, which would be stretched over them.
        """
        if packets.dim() != 2 or (shard is not None and packets.shape[1] != self.packet_bytes(shard)):
            raise ValueError(
                f"packets of shape {tuple(packets.shape)} carry no {shard} elements of {self.name} each, which take "
                f"{self.packet_bytes(shard or 0)} bytes"
            )
        return packets[:, HEADER_BYTES:].view(self._dtype)

    @override
    def encode(
        self,
        payload: Tensor,
        residual: Tensor | None,
        packets: Tensor,
        numel: int,
        place: slice | None = None,
        new_residual: Tensor | None = None,
    ) -> None:
        rows, values = _rows(payload, packets, place), self.values(packets)
        if residual is not None:
            rows.add_(_rows(residual, packets, place))
        values.copy_(rows)
        if self._dtype == payload.dtype:
            rows.zero_()
        else:
            rows.sub_(values)
        if new_residual is not None:
            _rows(new_residual, packets, place).copy_(rows)

    @override
    def decode(self, packets: Tensor, output: Tensor, numel: int, place: slice | None = None) -> None:
        count = packets.shape[0]
        if not count or output.numel() % count:
            raise ValueError(f"output has {output.numel()} elements, not a multiple of the {count} rows of packets")
        rows = _rows(output, packets, place)
        rows.copy_(self.values(packets, rows.shape[1]))

    @override
    def scale(self, packets: Tensor, factor: float) -> None:
        self.values(packets).mul_(factor)

    @override
    def all_finite(self, packets: Tensor) -> bool | Tensor:
        return all_finite(self.values(packets))

    @override
    def decode_mean(self, packets: Tensor, output: Tensor, numel: int) -> None:
        values = self.values(packets, output.numel())
        if not len(values):
            raise ValueError("a mean needs at least one row of packets")
        if len(values) > 1 and values.dtype == output.dtype:
            torch.add(values[0], values[1], out=output)
        else:
            output.copy_(values[0])
            for row in values[1:2]:
                output.add_(row)
        for row in values[2:]:
            output.add_(row)
        if len(values) > 1:
            output.div_(len(values))

    @override
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([parts[0], *(part[:, HEADER_BYTES:] for part in parts[1:])], dim=1)


_LEAST_ELEMENTS = 1 << 19  # under this the calls for a part, and Gloo's own work, are felt beside what kernels do
_LEAST_BYTES = 128 << 10  # of a message to one peer: 1 ms at 1 Gb/s, where a collective's latency is about 50 µs
_WHOLE = 1 << 62
_WITHOUT_PARTS = ("nccl",)
"""Backends on which a part costs more than it hides: launches on a GPU, for a transfer that takes microseconds."""


def least_part(codec: Codec, backend: str) -> int:
    """Elements of a shard in the smallest part worth its own two collectives over a communicator of this `backend`: a
    whole number of blocks, or more than any shard has.

    It counts what goes to one peer, whatever the number of ranks: each message has its own latency. So many ranks have
    small shards, and then no parts.
    """
    if backend in _WITHOUT_PARTS:
        return _WHOLE
    block_bytes = codec.packet_bytes(codec.block_size) - codec.packet_bytes(0)
    return max(-(-_LEAST_ELEMENTS // codec.block_size), -(-_LEAST_BYTES // block_bytes)) * codec.block_size


def cut_shard(shard: int, block_size: int, least: int) -> Sequence[slice]:
    """Places in a shard of `shard` elements of as many equal parts, but for blocks, as hold at least `least` elements.

    One at least; every rank must give the same `least`.
    """
    blocks = shard // block_size
    parts = min(blocks, max(1, shard // least))
    edges = [blocks * part // parts * block_size for part in range(parts + 1)]
    return [slice(edges[part], edges[part + 1]) for part in range(parts)]


def make_codec(name: CodecName, block_size: int = DEFAULT_BLOCK_SIZE) -> Codec:
    """The codec called `name`, with scales for each `block_size` elements; of `int4` for each 256.

    name: `sign1` (the sign, and mean magnitudes of blocks), `stat2` (2 bits: the sign and one of two magnitudes),
    `int4`, `int8` (whole multiples of a scale), `fp8` (e4m3), `bf16`, `fp16` or `none`.

    Raises ValueError for another name, or a block size that is not a multiple of 64 from 64 to 65536.
    """
    check_block_size(block_size)
    if name not in _IDENTIFIERS:
        *some, last = map(repr, get_args(CodecName))
        raise ValueError(f"codec must be {', '.join(some)} or {last}, got {name!r}")
    return (CastCodec if name in _DTYPES else _BlockCodec)(name, block_size)


_ROOM = 1 << 17
_ALIGNED = 16


def zeros_with_room(numel: int, *, device: torch.device) -> Tensor:
    """Zeros of a bucket, fp32, in memory that is large enough for its padding to a few more ranks, for `resized`."""
    if device.type != "cpu":
        return torch.zeros(numel + _ROOM, device=device)[:numel]
    # NumPy's cost nothing until they are touched, and those of a bucket that is cut anew never are.
    raw = torch.from_numpy(np.zeros(numel + _ROOM + _ALIGNED, dtype=np.float32))
    first = -(raw.data_ptr() // 4) % _ALIGNED
    return raw[first : first + numel]


def resized(values: Tensor, numel: int, padded: int) -> Tensor:
    """The first `numel` values, fp32, and zeros up to `padded`; in their own memory where that is large enough."""
    first = values.storage_offset()
    if values.untyped_storage().nbytes() >= (first + padded) * values.element_size():
        found = values.as_strided((padded,), (1,), first)
        found[numel:].zero_()
    else:
        found = zeros_with_room(padded, device=values.device)
        found[:numel].copy_(values[:numel])
    return found
