"""Headers: 16 bytes there and back, and anything else is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from thinwire.compress import Flags, Header, PacketError
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


@given(header=headers)
def test_what_is_packed_is_unpacked(header) -> None:
    raw = header.pack()
    assert len(raw) == HEADER_BYTES == 16
    assert Header.unpack(raw) == header


@given(header=headers, rows=st.integers(1, 5), body=st.integers(0, 40))
def test_written_to_every_row_and_nowhere_else(header, rows, body) -> None:
    packets = torch.full((rows, HEADER_BYTES + body), 7, dtype=torch.uint8)
    write_headers(packets, header.pack())
    assert [Header.unpack(row[:HEADER_BYTES].numpy().tobytes()) for row in packets] == [header] * rows
    assert Headers(packets[:, :HEADER_BYTES], header.part).check(replace(header, flags=Flags.NONE)) == header.flags
    assert (packets[:, HEADER_BYTES:] == 7).all()


@pytest.mark.parametrize("condition", [True, False])
def test_a_flag_is_raised_beside_those_already_there(condition) -> None:
    packets = torch.zeros(2, 32, dtype=torch.uint8)
    write_headers(packets, Header(1, 64, 3, 5, Flags.INCOMPLETE).pack(), finite=torch.tensor(not condition))
    wanted = Flags.INCOMPLETE | Flags.NON_FINITE if condition else Flags.INCOMPLETE
    assert Headers(packets[:1, :HEADER_BYTES], 0).check(Header(1, 64, 3, 5)) == wanted
    assert Headers(packets[:, :HEADER_BYTES], 0).check(Header(1, 64, 3, 5)) == wanted


def test_scales_that_are_not_finite_raise_the_flag() -> None:
    packets = torch.zeros(2, 32, dtype=torch.uint8)
    packets[1, 16:20] = torch.tensor([torch.inf]).view(torch.uint8)
    for scales, wanted in ((0, Flags.NONE), (1, Flags.NON_FINITE)):
        write_headers(packets, Header(1, 64, 3, 5).pack(), scales=scales)
        assert Headers(packets[:1, :HEADER_BYTES], 0).check(Header(1, 64, 3, 5)) == Flags.NONE
        assert Headers(packets[1:, :HEADER_BYTES], 0).check(Header(1, 64, 3, 5)) == wanted


@given(header=headers, other=headers, rows=st.integers(2, 5), data=st.data())
def test_the_odd_one_out_is_named(header, other, rows, data) -> None:
    other = replace(other, flags=header.flags)
    assume(other != header)
    odd = data.draw(st.integers(0, rows - 1))
    packets = torch.zeros(rows, HEADER_BYTES, dtype=torch.uint8)
    write_headers(packets, header.pack())
    write_headers(packets[odd : odd + 1], other.pack())
    with pytest.raises(PacketError, match=f"rank {odd} sent a packet"):
        Headers(packets, header.part).check(header)


@given(raw=st.binary(min_size=16, max_size=16).filter(lambda raw: raw[:3] != b"TW\x03"))
def test_other_bytes_are_no_header(raw) -> None:
    with pytest.raises(PacketError, match="not a thinwire packet"):
        Header.unpack(raw)


def test_steps_beyond_32_bits_wrap_and_still_match() -> None:
    step = 2**32 + 5
    Header.unpack(Header(1, 64, 0, step).pack()).check(Header(1, 64, 0, step), sender=0)
