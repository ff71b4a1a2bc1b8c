"""Headers: 16 bytes there and back, written alike by every backend, and anything else is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.kernels import emulation
from thinwire.compress import Flags, Header, PacketError
from thinwire.compress.kernels import reference
from thinwire.compress.kernels.calls import WriteHeaders
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet import HEADER_BYTES, Headers, write_headers

headers = st.builds(
    Header,
    codec=st.integers(0, 255),
    block_size=st.integers(0, 1024).map(lambda units: units * 64),
    bucket=st.integers(0, 2**16 - 1),
    part=st.integers(0, 2**16 - 1),
    step=st.integers(0, 2**16 - 1),
    flags=st.sampled_from([Flags.NONE, Flags.NON_FINITE, Flags.INCOMPLETE, Flags.NON_FINITE | Flags.INCOMPLETE]),
)
HEADER = Header(2, 65536, 65535, 4464, Flags.INCOMPLETE, 9, 0xBEEF)
BACKENDS = {"reference": reference} | ({"emulated cuda": emulation.BACKEND} if emulation.COMPILER else {})


@given(header=headers)
def test_what_is_packed_is_unpacked(header) -> None:
    raw = header.pack()
    assert len(raw) == HEADER_BYTES == 16
    assert Header.unpack(raw) == header


@given(header=headers, other=headers, rows=st.integers(2, 5), data=st.data())
def test_the_odd_one_out_is_named(header, other, rows, data) -> None:
    other = replace(other, flags=header.flags)
    assume(other != header)
    odd = data.draw(st.integers(0, rows - 1))
    packets = torch.full((rows, HEADER_BYTES + 3), 7, dtype=torch.uint8)
    write_headers(packets, header.pack())
    assert (packets[:, HEADER_BYTES:] == 7).all()
    found = Headers(packets[:, :HEADER_BYTES], header.part)
    assert found.check(replace(header, flags=Flags.NONE)) == header.flags
    write_headers(packets[odd : odd + 1], other.pack())
    with pytest.raises(PacketError, match=f"rank {odd} sent a packet"):
        found.check(header)


@given(raw=st.binary(min_size=16, max_size=16).filter(lambda raw: raw[:3] != b"TW\x03"))
def test_other_bytes_are_no_header(raw) -> None:
    with pytest.raises(PacketError, match="not a thinwire packet"):
        Header.unpack(raw)


def test_steps_beyond_32_bits_wrap_and_still_match() -> None:
    step = 2**32 + 5
    Header.unpack(Header(1, 64, 0, step).pack()).check(Header(1, 64, 0, step), sender=0)


@pytest.mark.parametrize(("finite", "bad_scale"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_what_is_not_finite_raises_a_flag_beside_those_already_there(
    finite: bool, bad_scale: bool, as_tensor: bool
) -> None:
    packets = torch.zeros(2, 32, dtype=torch.uint8)
    packets[1, 16:20] = torch.tensor([torch.inf if bad_scale else 1.0]).view(torch.uint8)
    header = Header(1, 64, 3, 5, Flags.INCOMPLETE)
    write_headers(packets, header.pack(), torch.tensor(finite) if as_tensor else finite, scales=int(bad_scale))
    found = [Headers(row[None, :HEADER_BYTES], 0).check(replace(header, flags=Flags.NONE)) for row in packets]
    of_rows = [Flags.NONE if finite else Flags.NON_FINITE, Flags.NONE if finite and not bad_scale else Flags.NON_FINITE]
    assert found == [Flags.INCOMPLETE | flag for flag in of_rows]


@pytest.mark.parametrize("backend", BACKENDS)
class TestBackends:
    def write(self, backend: str, packets: Tensor, *more: Any) -> None:
        call = WriteHeaders(packets, HEADER.pack(), *more)
        call.check()
        BACKENDS[backend].write_headers(call)

    @pytest.mark.parametrize(("rows", "apart"), [(1, 0), (3, 0), (3, 4)])
    def test_every_row_is_written_and_nothing_else(self, backend: str, rows: int, apart: int) -> None:
        memory = torch.full((rows, 40 + apart), 7, dtype=torch.uint8)
        self.write(backend, memory[:, :40])
        assert [Header.unpack(row[:16].numpy().tobytes()) for row in memory] == [HEADER] * rows
        assert bool((memory[:, 16:] == 7).all())

    @pytest.mark.parametrize("condition", [True, False])
    @pytest.mark.parametrize("scales", [1, 5, 300])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_flag_says_what_is_not_finite(self, backend: str, scales: int, bad: float, condition: bool) -> None:
        packets = torch.full((4, 16 + 4 * scales + 4), 0xFF, dtype=torch.uint8)  # NaN behind the last scale
        values = torch.rand(4, scales) * 3e38
        values[1, -1] = values[2, 0] = bad
        packets[:, 16:-4] = values.view(torch.uint8)
        self.write(backend, packets, scales, torch.tensor(condition), 256)
        flags = packets[:, 4].int() + packets[:, 5].int() * 256
        assert flags.tolist() == ([258] * 4 if condition else [2, 258, 258, 2])
        assert torch.equal(packets[:, 16:-4], values.view(torch.uint8))


PACKETS = torch.zeros(2, 24, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "a header has 16 bytes, got 3", (PACKETS, b"abc")),
        (ValueError, "have room for 2", (PACKETS, HEADER.pack(), 3)),
        (ValueError, "flags have 16 bits", (PACKETS, HEADER.pack(), 0, None, 1 << 16)),
        (TypeError, "condition must be one bool", (PACKETS, HEADER.pack(), 0, torch.ones(1))),
        (ValueError, "packets on cpu", (PACKETS, HEADER.pack(), 0, torch.ones(1, dtype=torch.bool, device="meta"))),
        (TypeError, r"packets must be torch\.uint8", (PACKETS.char(), HEADER.pack())),
        (ValueError, "at least 16 bytes", (PACKETS[:, :12], HEADER.pack())),
    ],
)
def test_what_does_not_fit_is_refused(error: type[Exception], message: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(error, match=message):
        execute(WriteHeaders(*arguments))
