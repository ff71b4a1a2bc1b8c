"""Headers of packets, written and checked where the packets are: on a GPU the host waits for neither."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.kernels.header_calls import REPORT_WORDS, header_words

__all__ = ["REPORT_WORDS", "check_headers", "new_reports", "write_headers"]


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
