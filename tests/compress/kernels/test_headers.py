"""Headers written and checked on the device: the bytes that packet.py knows, and reports that name the odd row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compress.kernels import emulation
from thinwire.compress.kernels import backends
from thinwire.compress.kernels.headers import (
    CheckHeaders,
    WriteHeaders,
    check_headers,
    header_words,
    new_reports,
    write_headers,
)
from thinwire.compress.packet import Flags, Header

BACKENDS = {name: backend for name, backend in backends().items() if name not in ("cuda", "cpu")}
if emulation.COMPILER:
    BACKENDS["emulated cuda"] = emulation.BACKEND
KNOWN = int(sum(Flags))
HEADER = Header(2, 65536, 65535, 4464, Flags.INCOMPLETE, 9, 0xBEEF)
PLAIN = Header(2, 65536, 65535, 4464, Flags.NONE, 9, 0xBEEF)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    return BACKENDS[request.param]


def write(backend, packets: Tensor, scales: int = 0, condition: Tensor | None = None, flag: int = 0) -> None:
    call = WriteHeaders(packets, *header_words(HEADER.pack()), scales, condition, flag)
    call.check()
    backend.write_headers(call)


def check(backend, headers: Tensor, report: Tensor, expected: Header = PLAIN) -> None:
    call = CheckHeaders(headers, *header_words(expected.pack()), KNOWN, report)
    call.check()
    backend.check_headers(call)


def unpacked(packets: Tensor) -> list[Header]:
    return [Header.unpack(row[:16].numpy().tobytes()) for row in packets]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("apart", [0, 4])
def test_written_to_every_row_and_nowhere_else(backend, rows: int, apart: int) -> None:
    memory = torch.full((rows, 40 + apart), 7, dtype=torch.uint8)
    write(backend, memory[:, :40])
    assert unpacked(memory) == [HEADER] * rows
    assert bool((memory[:, 16:] == 7).all())


@pytest.mark.parametrize("condition", [True, False])
def test_a_flag_is_raised_where_the_condition_holds(backend, condition: bool) -> None:
    packets = torch.zeros(2, 32, dtype=torch.uint8)
    write(backend, packets, condition=torch.tensor(condition), flag=Flags.NON_FINITE)
    flags = Flags.INCOMPLETE | Flags.NON_FINITE if condition else Flags.INCOMPLETE
    assert {header.flags for header in unpacked(packets)} == {flags}


@pytest.mark.parametrize("scales", [1, 5, 300])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_packet_says_that_what_it_carries_is_not_finite(backend, scales: int, bad: float) -> None:
    packets = torch.full((4, 16 + 4 * scales + 4), 0xFF, dtype=torch.uint8)  # NaN behind the last scale
    values = torch.rand(4, scales) * 3e38
    values[1, -1] = values[2, 0] = bad
    packets[:, 16:-4] = values.view(torch.uint8)
    write(backend, packets, scales=scales, flag=256)
    flags = packets[:, 4].int() + packets[:, 5].int() * 256
    assert flags.tolist() == [2, 258, 258, 2]
    assert torch.equal(packets[:, 16:-4], values.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_all_is_well(backend, rows: int) -> None:
    packets = torch.zeros(rows, 64, dtype=torch.uint8)
    write(backend, packets)
    packets[-1, 4] |= Flags.NON_FINITE
    report = new_reports(2, "cpu")[1]
    check(backend, packets[:, :16], report)
    assert report.tolist() == [Flags.INCOMPLETE | Flags.NON_FINITE, 0, 0, 0]


@pytest.mark.parametrize("byte", [*range(4), 5, *range(6, 16)])
def test_the_first_odd_row_is_reported(backend, byte: int) -> None:
    """Whatever byte is another one; of the flags' bytes an unknown bit."""
    packets = torch.zeros(5, 16, dtype=torch.uint8)
    write(backend, packets)
    packets[2:4, byte] ^= 0x80
    report = new_reports(1, "cpu")[0]
    check(backend, packets, report)
    assert report[1] == 3
    assert report[2:].view(torch.uint8).tolist() == packets[2].tolist()
    assert report[0] & 0xFF == Flags.INCOMPLETE


def test_later_checks_add_flags_and_keep_the_first_odd_row(backend) -> None:
    report = new_reports(1, "cpu")[0]
    packets = torch.zeros(3, 16, dtype=torch.uint8)
    write(backend, packets)
    check(backend, packets, report)
    check(backend, packets[1:], report, Header(2, 64, 1, 1))
    packets[:, 4] = int(Flags.UNPLACED)
    check(backend, packets, report, Header(1, 64, 1, 1))
    assert report[:2].tolist() == [Flags.INCOMPLETE | Flags.UNPLACED, 1]
    assert report[2].item() >> 32 & 0xFFFF == Flags.INCOMPLETE


def test_operators() -> None:
    packets = torch.zeros(2, 24, dtype=torch.uint8)
    write_headers(packets, HEADER.pack(), flag=1, condition=torch.tensor(True), scales=2)
    assert {header.flags for header in unpacked(packets)} == {Flags.INCOMPLETE | Flags.NON_FINITE}
    report = new_reports(1, "cpu")[0]
    check_headers(packets[:, :16], PLAIN.pack(), KNOWN, report)
    assert report.tolist() == [3, 0, 0, 0]
    words = header_words(PLAIN.pack())
    torch.library.opcheck(torch.ops.thinwire.write_headers.default, (packets, *words, 1, None, 1))
    torch.library.opcheck(torch.ops.thinwire.check_headers.default, (packets, *words, KNOWN, report))


def test_what_does_not_fit_is_refused() -> None:
    packets, report = torch.zeros(2, 24, dtype=torch.uint8), new_reports(1, "cpu")[0]
    with pytest.raises(ValueError, match="a header has 16 bytes, got 3"):
        write_headers(packets, b"abc")
    with pytest.raises(ValueError, match="have room for 2"):
        write_headers(packets, HEADER.pack(), scales=3)
    with pytest.raises(ValueError, match="flags have 16 bits"):
        write_headers(packets, HEADER.pack(), flag=1 << 16)
    with pytest.raises(TypeError, match="condition must be one bool"):
        write_headers(packets, HEADER.pack(), condition=torch.ones(1))
    with pytest.raises(TypeError, match=r"packets must be torch\.uint8"):
        write_headers(packets.char(), HEADER.pack())
    with pytest.raises(ValueError, match="at least 16 bytes"):
        check_headers(packets[:, :12], HEADER.pack(), KNOWN, report)
    with pytest.raises(TypeError, match=r"report must be torch\.int64"):
        check_headers(packets, HEADER.pack(), KNOWN, report.int())
    with pytest.raises(ValueError, match="a contiguous vector of 4"):
        check_headers(packets, HEADER.pack(), KNOWN, report[1:])
    with pytest.raises(ValueError, match="packets on cpu"):
        check_headers(packets, HEADER.pack(), KNOWN, report.to("meta"))
