"""Headers of packets, 16 bytes, of which bytes 4 and 5 are flags, a bit each: written and checked where the packets
are; on a GPU the host waits for neither."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from thinwire.compress.kernels.buckets import KernelCall, check_device
from thinwire.compress.packet_layout import HEADER_BYTES, SCALE_BYTES

__all__ = [
    "FLAG_SHIFT",
    "REPORT_WORDS",
    "CheckHeaders",
    "WriteHeaders",
    "check_headers",
    "header_words",
    "new_reports",
    "write_headers",
]

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
class WriteHeaders(KernelCall):
    """Arguments of `write_headers`."""

    kernel = "write_headers"

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

    @override
    def check(self) -> None:
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
            check_device("condition", self.condition, self.packets)


@dataclass(eq=False)
class CheckHeaders(KernelCall):
    """Arguments of `check_headers`."""

    kernel = "check_headers"

    headers: Tensor
    first: int
    second: int
    known: int
    report: Tensor

    @property
    @override
    def device(self) -> torch.device:
        return self.headers.device

    @override
    def check(self) -> None:
        _check_rows("headers", self.headers)
        _check_flags("known_flags", self.known)
        if self.report.dtype != torch.int64:
            raise TypeError(f"report must be torch.int64, got {self.report.dtype}")
        if self.report.shape != (REPORT_WORDS,) or not self.report.is_contiguous():
            raise ValueError(
                f"report must be a contiguous vector of {REPORT_WORDS}, got shape {tuple(self.report.shape)}"
            )
        check_device("report", self.report, self.headers)


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


def write_headers(
    packets: Tensor, header: bytes, *, flag: int = 0, condition: Tensor | None = None, scales: int = 0
) -> None:
    """Put `header`, 16 bytes, at the start of every row of `packets`, uint8 [rows, bytes]: one launch, by value.

    `flag` is set in the flags, bytes 4 and 5, of a row where `condition`, one bool on the packets' device, holds, or
    where not all of the first `scales` fp32 that follow the row's header are finite: so that a packet says of itself
    that what it carries is not. Raises TypeError or ValueError for arguments that do not fit together.
    """
    first, second = header_words(header)
    torch.ops.thinwire.write_headers(packets, first, second, scales, condition, flag)


def check_headers(headers: Tensor, expected: bytes, known_flags: int, report: Tensor) -> None:
    """Compare what came with the header that was expected, and leave the answer on the device, in `report`.

    headers: uint8 [rows, 16 or more], rows that may lie apart. report: int64 [4], a row of `new_reports`: to its first
    word the flags of all rows are added; if it names no odd row yet, the others become one more than the number of the
    first row that is not `expected`, flags aside, or has flags that are not among `known_flags`, and its 16 bytes.
    Several checks may share a report. Raises TypeError or ValueError for arguments that do not fit together.
    """
    first, second = header_words(expected)
    torch.ops.thinwire.check_headers(headers, first, second, known_flags, report)


def new_reports(count: int, device: torch.device | str) -> Tensor:
    """Reports of checks that have not taken place: int64 [count, 4], zeros. Read all of them at once, once a step."""
    return torch.zeros(count, REPORT_WORDS, dtype=torch.int64, device=device)
