"""What is on the wire. Headers: 16 bytes there and back, written alike by every backend, and anything else is refused.
Codecs through one interface: sizes, padding, what they lose and what they refuse."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.kernels import emulation
from tests.refusing import refused
from thinwire.compress import Flags, Header, PacketError, make_codec
from thinwire.compress.kernels import reference
from thinwire.compress.kernels.calls import WriteHeaders
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet import (
    HEADER_BYTES,
    Headers,
    SettingsError,
    flags_on_device,
    pass_on_flags,
    write_headers,
)

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
    refused(PacketError, f"rank {odd} sent a packet", found.check, header)


@given(raw=st.binary(min_size=16, max_size=16).filter(lambda raw: raw[:3] != b"TW\x03"))
def test_other_bytes_are_no_header(raw) -> None:
    refused(PacketError, "not a thinwire packet", Header.unpack, raw)


def test_steps_beyond_32_bits_wrap_and_still_match() -> None:
    step = 2**32 + 5
    Header.unpack(Header(1, 64, 0, step).pack()).check(Header(1, 64, 0, step), sender=0)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, Flags.NONE),
        ({"settings": 8}, Flags.SETTINGS),
        ({"flags": Flags(1 << 10)}, Flags.MISMATCH),
        *(({name: 192}, Flags.MISMATCH) for name in ("codec", "block_size", "bucket", "step", "part")),
    ],
)
def test_a_device_finds_what_the_host_does_and_passes_it_on(changed: dict[str, Any], found: Flags) -> None:
    header = Header(2, 128, 3, 5, Flags.NONE, 1, 7)
    rows = [replace(header, flags=Flags.INCOMPLETE), replace(header, **({"flags": Flags.MEET} | changed))]
    raw = torch.frombuffer(bytearray(b"".join(row.pack() for row in rows)), dtype=torch.uint8).view(2, 16)
    flags = Flags.INCOMPLETE if "flags" in changed else Flags.INCOMPLETE | Flags.MEET
    if found:
        with pytest.raises(SettingsError if found is Flags.SETTINGS else PacketError, match=r"rank 1('s| sent)"):
            Headers(raw, 1).check(header)
    else:
        assert Headers(raw, 1).check(header) == flags
    assert flags_on_device(raw, header.pack()) == flags | found
    packets = torch.zeros(3, 20, dtype=torch.uint8)
    write_headers(packets, replace(header, flags=Flags.UNPLACED).pack())
    pass_on_flags(packets, flags_on_device(raw, header.pack()))
    assert Headers(packets[:, :16], 1).check(header) == flags | found | Flags.UNPLACED


@pytest.mark.parametrize("shape", [(0, 16), (2, 15)])
def test_too_few_bytes_are_no_headers(shape: tuple[int, int]) -> None:
    with pytest.raises(PacketError, match="where there should be 16 a packet"):
        Headers(torch.zeros(shape, dtype=torch.uint8), 0).check(HEADER)


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
    refused(error, message, execute, WriteHeaders(*arguments))


# Codecs


NAMES = ["sign1", "stat2", "int4", "fp8", "int8", "bf16", "fp16", "none"]
# Largest relative error of one element, as a part of its block's largest.
LOSS = {"int4": 0.5 / 7, "fp8": 16 / 448, "int8": 0.5 / 127, "bf16": 2**-8, "none": 0.0}


@settings(deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 4),
    block_size=st.sampled_from([64, 192]),
    missing=st.integers(0, 200),
    seed=st.integers(0, 2**31),
)
def test_decoded_and_lost_add_up_and_padding_stays_zero(name, rows, blocks, block_size, missing, seed) -> None:
    codec = make_codec(name, block_size)
    shard = blocks * block_size
    numel = max(0, rows * shard - missing)
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randn(rows * shard, generator=generator)
    payload[numel:] = 0.0
    residual = torch.randn(rows * shard, generator=generator) * 0.1
    residual[numel:] = 0.0
    wanted = payload + residual
    packets = torch.zeros(rows, codec.packet_bytes(shard), dtype=torch.uint8)
    codec.encode(payload, residual, packets, numel)
    decoded = torch.full((rows * shard,), float("nan"))
    codec.decode(packets, decoded, numel)
    torch.testing.assert_close(decoded + payload, wanted, rtol=1e-6, atol=1e-6)
    assert not decoded[numel:].any()
    assert not payload[numel:].any()
    if name in LOSS:
        assert (payload.abs() <= LOSS[name] * wanted.abs().max() + 1e-7).all()


@pytest.mark.parametrize("name", NAMES)
def test_decode_mean_is_the_mean_of_the_decoded(name) -> None:
    codec = make_codec(name, 64)
    workers, shard, numel = 3, 256, 200
    packets = torch.zeros(workers, codec.packet_bytes(shard), dtype=torch.uint8)
    for row in packets:
        payload = torch.randn(shard)
        payload[numel:] = 0
        codec.encode(payload, None, row[None], numel)
    each = []
    for row in packets:
        one = torch.empty(shard)
        codec.decode(row[None], one, numel)
        each.append(one)
    mean = torch.full((shard,), float("nan"))
    codec.decode_mean(packets, mean, numel)
    torch.testing.assert_close(mean, torch.stack(each).mean(dim=0), rtol=1e-6, atol=1e-7)


@settings(deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=st.integers(1, 3),
    blocks=st.integers(0, 4),
    block_size=st.sampled_from([64, 192, 2048]),
    factor=st.sampled_from([0.0, 0.5, 0.9, 3.0]),
)
def test_scaled_packets_decode_to_scaled_values(name, rows, blocks, block_size, factor) -> None:
    codec = make_codec(name, block_size)
    numel = rows * blocks * block_size
    packets = torch.full((rows, codec.packet_bytes(blocks * block_size)), 7, dtype=torch.uint8)
    codec.encode(torch.randn(numel), None, packets, numel)
    before, after = torch.empty(numel), torch.empty(numel)
    codec.decode(packets, before, numel)
    codec.scale(packets, factor)
    codec.decode(packets, after, numel)
    rounding = {"bf16": {"rtol": 2**-8, "atol": 0}, "fp16": {"rtol": 2**-10, "atol": 2**-24}}.get(
        name, {"rtol": 1e-6, "atol": 0}
    )
    torch.testing.assert_close(after, before * factor, **rounding)
    assert bool((packets[:, :16] == 7).all())  # the header is not a value


@pytest.mark.parametrize(
    ("name", "bits", "scales"),
    [
        ("sign1", 1, 16),
        ("stat2", 2, 32),
        ("int4", 4, 128),
        ("fp8", 8, 16),
        ("int8", 8, 16),
        ("bf16", 16, 0),
        ("fp16", 16, 0),
        ("none", 32, 0),
    ],
)
def test_packet_bytes(name, bits, scales) -> None:
    assert make_codec(name, 2048).packet_bytes(16 * 2048) == 16 + 4 * scales + 16 * 2048 * bits // 8


@pytest.mark.parametrize(
    ("name", "bound"), [("sign1", 0.375), ("stat2", 0.122), ("int4", 0.0165), ("fp8", 7.5e-4), ("int8", 7.6e-5)]
)
def test_how_much_of_a_gaussian_is_lost(name, bound) -> None:
    """As a part of its energy: 1 - 2/π for signs, 0.1175 for the best two magnitudes (Max 1960)."""
    values = torch.randn(64 * 2048) * 1e-3
    lost = values.clone()
    codec = make_codec(name)
    packets = torch.zeros(1, codec.packet_bytes(len(values)), dtype=torch.uint8)
    codec.encode(lost, None, packets, len(values))
    assert 0.8 * bound < float(lost.square().sum() / values.square().sum()) < bound


@pytest.mark.parametrize("name", ["int4", "fp8", "int8"])
def test_what_was_decoded_is_encoded_without_loss(name) -> None:
    codec = make_codec(name, 192)
    values = torch.randn(5 * 192) * torch.logspace(-30, 30, 5).repeat_interleave(192)
    packets = torch.zeros(1, codec.packet_bytes(len(values)), dtype=torch.uint8)
    codec.encode(values.clone(), None, packets, len(values))
    codec.decode(packets, values, len(values))
    lost = values.clone()
    codec.encode(lost, None, packets, len(values))
    assert (lost.abs() <= 1e-6 * values.abs()).all()


def test_fp8_has_the_values_of_torch() -> None:
    """Subnormal ones, ties and the sign of zero among them; a block's largest becomes 448."""
    codec = make_codec("fp8", 64 * 8)
    values = torch.cat([torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0)] * 2)
    values[256:] += values[:256] * torch.linspace(-0.07, 0.07, 256)
    values.clamp_(-448, 448)
    packets = torch.zeros(1, codec.packet_bytes(512), dtype=torch.uint8)
    codec.encode(values.clone(), None, packets, 512)
    assert torch.equal(packets[0, 20:], values.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("block_size", [0, -64, 100, 65600, 64.0, "64"])
def test_bad_block_sizes_are_refused(block_size) -> None:
    refused(ValueError, "block_size must be a multiple of 64", make_codec, "sign1", block_size)


def test_unknown_codecs_are_refused() -> None:
    known = "'sign1', 'stat2', 'int4', 'fp8', 'int8', 'bf16', 'fp16' or 'none', got 'topk'"
    refused(ValueError, known, make_codec, "topk")
