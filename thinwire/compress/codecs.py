"""What is sent: each codec turns rows of floats into packets and back, over kernels that differ by device.
One interface, so that the exchange, the optimizers and the DDP hook need not know which codec they carry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from thinwire.compress import kernels
from thinwire.compress.kernels import HEADER_BYTES

__all__ = ["DEFAULT_BLOCK_SIZE", "Codec", "CodecName", "make_codec"]

CodecName = Literal["sign1", "int8", "bf16", "none"]

# One fp32 scale a block: at 2048 elements the scales add 1.6% to sign1's bits.
DEFAULT_BLOCK_SIZE = 2048


class Codec(ABC):
    """A lossy map of rows of fp32 to packets.

    A row is one shard: `shard` elements, a multiple of `block_size`. `numel` counts the valid elements over all
    rows laid end to end; what lies beyond is padding, which holds zeros, enters no scale and decodes to zero.
    """

    name: CodecName
    identifier: int  # the codec byte of a packet's header
    block_size: int

    @abstractmethod
    def packet_bytes(self, shard: int) -> int:
        """Bytes of one packet that carries `shard` elements, header included."""

    @abstractmethod
    def encode(self, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int) -> None:
        """Write `payload + residual`, fp32 [rows · shard], into `packets`, uint8 [rows, packet_bytes].

        `payload` becomes what the codec lost, that is the next residual; `residual` itself is only read, so that a
        step that is skipped can keep it. Headers are not touched.
        """

    def encode_rounded(
        self, payload: Tensor, residual: Tensor, new_residual: Tensor, packets: Tensor, numel: int
    ) -> None:
        """Like `encode`, with residuals in bf16 [rows · shard]; `new_residual` may be `residual`. Spends `payload`."""
        payload.add_(residual)
        self.encode(payload, None, packets, numel)
        new_residual.copy_(payload)

    @abstractmethod
    def decode(self, packets: Tensor, output: Tensor, numel: int) -> None:
        """Read `packets`, uint8 [rows, packet_bytes], into `output`, fp32 [rows · shard]."""

    @abstractmethod
    def scale(self, packets: Tensor, factor: float) -> None:
        """Multiply all that `packets`, uint8 [rows, packet_bytes], decode to."""

    @abstractmethod
    def decode_mean(self, packets: Tensor, output: Tensor, numel: int) -> None:
        """Average `packets`, uint8 [workers, packet_bytes], summed in row order, into `output`, fp32 [shard]."""


class _BlockCodec(Codec):
    """A scale a block, then codes of a fixed number of bits: `sign1` and `int8`, on the kernels."""

    def __init__(self, name: Literal["sign1", "int8"], identifier: int, block_size: int) -> None:
        self.name = name
        self.identifier = identifier
        self.block_size = block_size

    def packet_bytes(self, shard: int) -> int:
        return kernels.packet_bytes(self.name, shard, self.block_size)

    def encode(self, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int) -> None:
        kernels.encode(self.name, payload, residual, packets, numel, self.block_size)

    def encode_rounded(
        self, payload: Tensor, residual: Tensor, new_residual: Tensor, packets: Tensor, numel: int
    ) -> None:
        kernels.encode_rounded(self.name, payload, residual, new_residual, packets, numel, self.block_size)

    def decode(self, packets: Tensor, output: Tensor, numel: int) -> None:
        kernels.decode(self.name, packets, output, numel, self.block_size)

    def scale(self, packets: Tensor, factor: float) -> None:
        kernels.scales(self.name, packets, self.block_size).mul_(factor)

    def decode_mean(self, packets: Tensor, output: Tensor, numel: int) -> None:
        kernels.decode_mean(self.name, packets, output, numel, self.block_size)


class _CastCodec(Codec):
    """The values themselves in a narrower (`bf16`) or the same (`none`) dtype: torch's own copies do it."""

    def __init__(self, name: Literal["bf16", "none"], identifier: int, block_size: int, dtype: torch.dtype) -> None:
        self.name = name
        self.identifier = identifier
        self.block_size = block_size
        self._dtype = dtype

    def _values(self, packets: Tensor) -> Tensor:
        return packets[:, HEADER_BYTES:].view(self._dtype)

    def packet_bytes(self, shard: int) -> int:
        return HEADER_BYTES + shard * self._dtype.itemsize

    def encode(self, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int) -> None:
        if residual is not None:
            payload.add_(residual)
        rows = payload.view(packets.shape[0], -1)
        values = self._values(packets)
        values.copy_(rows)
        if self._dtype == payload.dtype:
            payload.zero_()
        else:
            rows.sub_(values)

    def decode(self, packets: Tensor, output: Tensor, numel: int) -> None:
        output.view(packets.shape[0], -1).copy_(self._values(packets))

    def scale(self, packets: Tensor, factor: float) -> None:
        self._values(packets).mul_(factor)

    def decode_mean(self, packets: Tensor, output: Tensor, numel: int) -> None:
        values = self._values(packets)
        output.copy_(values[0])
        for row in values[1:]:
            output.add_(row)
        output.div_(packets.shape[0])


def make_codec(name: CodecName, block_size: int = DEFAULT_BLOCK_SIZE) -> Codec:
    """The codec called `name`: `sign1` (1 bit), `int8`, `bf16` or `none`, with one scale a `block_size` elements.

    Raises ValueError for another name, or a block size that is not a multiple of 64 from 64 to 65536.
    """
    if not isinstance(block_size, int) or block_size % 64 or not 64 <= block_size <= 65536:
        raise ValueError(f"block_size must be a multiple of 64 from 64 to 65536, got {block_size!r}")
    match name:
        case "sign1":
            return _BlockCodec("sign1", 1, block_size)
        case "int8":
            return _BlockCodec("int8", 2, block_size)
        case "bf16":
            return _CastCodec("bf16", 3, block_size, torch.bfloat16)
        case "none":
            return _CastCodec("none", 4, block_size, torch.float32)
    raise ValueError(f"codec must be 'sign1', 'int8', 'bf16' or 'none', got {name!r}")
