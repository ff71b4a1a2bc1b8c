"""What the kernels of packets' headers are called with: 16 bytes, of which bytes 4 and 5 are flags, a bit each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.packet_layout import HEADER_BYTES, SCALE_BYTES

__all__ = ["FLAG_SHIFT", "REPORT_WORDS", "CheckHeaders", "WriteHeaders", "header_words"]

FLAG_SHIFT = 32
"""Where the flags lie in the first of a header's two words."""

REPORT_WORDS = 4
_FLAGS = 0xFFFF


def header_words(raw: bytes) -> tuple[int, int]:
    """The 16 bytes of a header as two little-endian int64; raises ValueError for another number of bytes."""
    if len(raw) != HEADER_BYTES:
        raise ValueError(f"a header has {HEADER_BYTES} bytes, got {len(raw)}")
    first, second = (int.from_bytes(raw[at : at + 8], "little", signed=True) for at in (0, 8))
    return first, second


@dataclass(eq=False)
class WriteHeaders:
    """Arguments of `write_headers`."""

    kernel: ClassVar = "write_headers"

    packets: Tensor
    first: int
    second: int
    scales: int
    condition: Tensor | None
    flag: int

    @property
    def raw(self) -> bytes:
        """The 16 bytes, without the flag that is raised."""
        return b"".join(word.to_bytes(8, "little", signed=True) for word in (self.first, self.second))

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        _check_rows("packets", self.packets)
        room = (self.packets.size(1) - HEADER_BYTES) // SCALE_BYTES
        if not 0 <= self.scales <= room:
            raise ValueError(f"scales is {self.scales}: rows of {self.packets.size(1)} bytes have room for {room}")
        _check_flags("flag", self.flag)
        if self.condition is not None:
            if self.condition.dtype != torch.bool or self.condition.numel() != 1:
                raise TypeError(
                    f"condition must be one bool, got {tuple(self.condition.shape)} of {self.condition.dtype}"
                )
            _check_device("condition", self.condition, self.packets)


@dataclass(eq=False)
class CheckHeaders:
    """Arguments of `check_headers`."""

    kernel: ClassVar = "check_headers"

    headers: Tensor
    first: int
    second: int
    known: int
    report: Tensor

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        _check_rows("headers", self.headers)
        _check_flags("known_flags", self.known)
        if self.report.dtype != torch.int64:
            raise TypeError(f"report must be torch.int64, got {self.report.dtype}")
        if self.report.shape != (REPORT_WORDS,) or not self.report.is_contiguous():
            raise ValueError(
                f"report must be a contiguous vector of {REPORT_WORDS}, got shape {tuple(self.report.shape)}"
            )
        _check_device("report", self.report, self.headers)


def _check_rows(name: str, rows: Tensor) -> None:
    if rows.dtype != torch.uint8:
        raise TypeError(f"{name} must be torch.uint8, got {rows.dtype}")
    if rows.dim() != 2 or rows.size(0) < 1 or rows.size(1) < HEADER_BYTES or rows.stride(1) != 1:
        raise ValueError(
            f"{name} must have at least one row of at least {HEADER_BYTES} bytes without gaps, got shape "
            f"{tuple(rows.shape)} with strides {rows.stride()}"
        )


def _check_flags(name: str, flags: int) -> None:
    if not 0 <= flags <= _FLAGS:
        raise ValueError(f"{name} is {flags}: flags have 16 bits")


def _check_device(name: str, tensor: Tensor, rows: Tensor) -> None:
    if tensor.device != rows.device:
        raise ValueError(f"{name} is on {tensor.device} and the packets on {rows.device}: use one device")
