"""Headers written on the device: the bytes that packet.py knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.kernels import emulation
from tests.compress.kernels.body import REFERENCE
from thinwire.compress.kernels.calls import WriteHeaders
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet import Flags, Header

BACKENDS = {"reference": REFERENCE.backend}
if emulation.COMPILER:
    BACKENDS["emulated cuda"] = emulation.BACKEND
HEADER = Header(2, 65536, 65535, 4464, Flags.INCOMPLETE, 9, 0xBEEF)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    return BACKENDS[request.param]


def write(backend, packets: Tensor, scales: int = 0, condition: Tensor | None = None, flag: int = 0) -> None:
    call = WriteHeaders(packets, HEADER.pack(), scales, condition, flag)
    call.check()
    backend.write_headers(call)


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


def test_what_does_not_fit_is_refused() -> None:
    packets, header = torch.zeros(2, 24, dtype=torch.uint8), HEADER.pack()

    def refused(kind: type[Exception], match: str, *arguments: Any) -> None:
        with pytest.raises(kind, match=match):
            execute(WriteHeaders(*arguments))

    refused(ValueError, "a header has 16 bytes, got 3", packets, b"abc")
    refused(ValueError, "have room for 2", packets, header, 3)
    refused(ValueError, "flags have 16 bits", packets, header, 0, None, 1 << 16)
    refused(TypeError, "condition must be one bool", packets, header, 0, torch.ones(1))
    refused(ValueError, "packets on cpu", packets, header, 0, torch.ones(1, dtype=torch.bool, device="meta"))
    refused(TypeError, r"packets must be torch\.uint8", packets.char(), header)
    refused(ValueError, "at least 16 bytes", packets[:, :12], header)
