"""What every kernel backend must do, on any device: the body of the kernel tests, held against exact arithmetic.

A test class names its subjects by overriding the `subject` fixture.
"""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.compress import codecs
from thinwire.compress.kernels import bucket_reference
from thinwire.compress.kernels.calls import Decode, Encode
from thinwire.compress.kernels.loading import compiled_backend
from thinwire.compress.packet_layout import BLOCK_SCALES, CODE_BITS, HEADER_BYTES, packet_bytes

CODECS = tuple(CODE_BITS)
HEADER_FILL = 0xA5


class Unchecked:
    """A backend's kernels over single vectors, with arguments that nothing checks."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def encode(self, *arguments: Any) -> None:
        self.backend.encode(Encode(*arguments))

    def encode_rounded(
        self, codec: str, payload: Tensor, residual: Tensor | None, new: Tensor, packets: Tensor, *rest: Any
    ) -> None:
        numel, block_size, *place = rest
        self.backend.encode(Encode(codec, payload, residual, packets, numel, block_size, new, *place))

    def decode(self, *arguments: Any) -> None:
        self.backend.decode(Decode(*arguments))

    def decode_mean(self, *arguments: Any) -> None:
        self.backend.decode(Decode(*arguments, mean=True))


def backends() -> dict[str, Any]:
    """The backends that can run here: "reference" always, "cpu" with numba, "cuda" with a GPU and a compiler for it."""
    found = {"reference": bucket_reference}
    if importlib.util.find_spec("numba"):
        found["cpu"] = compiled_backend("cpu")
    if torch.cuda.is_available() and (cuda := compiled_backend("cuda")) is not None:
        found["cuda"] = cuda
    return found


BACKENDS = {name: Unchecked(backend) for name, backend in backends().items()}
REFERENCE = BACKENDS["reference"]


@dataclass(frozen=True)
class Subject:
    """A backend under test; `block_sizes` are those it compiles quickly enough."""

    name: str
    backend: Any
    device: str = "cpu"
    block_sizes: Sequence[int] = (64, 128, 192, 320, 1024, 2048)

    def __str__(self) -> str:
        return self.name


@dataclass
class Encoded:
    """Results of one encode, and what it was given."""

    codec: str
    corrected: Tensor  # float64, payload + residual before
    lost: Tensor  # float32, payload after
    packets: Tensor
    numel: int
    block_size: int


def uninitialised_packets(codec: str, rows: int, shard: int, block_size: int, device: str) -> Tensor:
    packets = torch.randint(0, 256, (rows, packet_bytes(codec, shard, block_size)), dtype=torch.uint8, device=device)
    packets[:, :HEADER_BYTES] = HEADER_FILL
    return packets


def encode(
    subject: Subject, codec: str, payload: Tensor, residual: Tensor | None, rows: int, numel: int, block_size: int
) -> Encoded:
    payload = payload.to(subject.device).clone()
    residual = None if residual is None else residual.to(subject.device)
    before = None if residual is None else residual.clone()
    corrected = payload.double() if residual is None else payload.double() + residual.double()
    packets = uninitialised_packets(codec, rows, payload.numel() // rows, block_size, subject.device)
    subject.backend.encode(codec, payload, residual, packets, numel, block_size)
    assert (packets[:, :HEADER_BYTES] == HEADER_FILL).all(), "headers must stay as they were"
    if residual is not None:
        assert same(residual, before), "the residual must only be read"
    return Encoded(codec, corrected, payload, packets, numel, block_size)


def decode(subject: Subject, encoded: Encoded) -> Tensor:
    output = torch.full_like(encoded.lost, math.nan)
    subject.backend.decode(encoded.codec, encoded.packets, output, encoded.numel, encoded.block_size)
    return output


def exact(encoded: Encoded) -> Encoded:
    """The same encode by the reference in float64."""
    payload, packets = encoded.corrected.clone(), encoded.packets.clone()
    REFERENCE.encode(encoded.codec, payload, None, packets, encoded.numel, encoded.block_size)
    return Encoded(encoded.codec, encoded.corrected, payload, packets, encoded.numel, encoded.block_size)


def scales(encoded: Encoded) -> Tensor:
    """Float32 [blocks, scales a block], over all rows."""
    return codecs.scales(encoded.codec, encoded.packets, encoded.block_size).reshape(-1, BLOCK_SCALES[encoded.codec])


def codes(encoded: Encoded) -> Tensor:
    """Uint8 [rows, bytes]."""
    found = codecs.scales(encoded.codec, encoded.packets, encoded.block_size)
    return encoded.packets[:, HEADER_BYTES + 4 * found.size(1) :]


def levels(encoded: Encoded) -> Tensor:
    """Codes as whole numbers, next to each other where the numbers that they stand for are."""
    found = codes(encoded)
    if encoded.codec == "int4":
        found = torch.stack([found << 4, found & 0xF0], dim=2)
        return found.view(torch.int8).int().view(-1) >> 4
    if encoded.codec == "fp8":
        magnitudes = (found & 0x7F).int()
        return torch.where(found > 0x7F, -magnitudes, magnitudes).view(-1)
    return found.view(torch.int8).int().view(-1)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal values, NaN equal to NaN."""
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def check_rows_apart(backend: Unchecked, codec: str, device: str, shard: int, place: slice, numel: int) -> None:
    """The same part of three shards of which `numel` elements are valid: the bits that each row has by itself, and
    nothing else written."""
    payload, residual = torch.randn(2, 3 * shard, device=device)
    new, half = torch.zeros(3 * shard, dtype=torch.bfloat16, device=device), residual.bfloat16()
    part = place.stop - place.start
    packets = uninitialised_packets(codec, 3, part, 64, device)
    rounded, alone = packets.clone(), packets.clone()
    lost, decoded = payload.clone(), torch.zeros(3 * shard, device=device)
    backend.encode(codec, lost, residual, packets, numel, 64, None, place)
    backend.encode_rounded(codec, payload, half, new, rounded, numel, 64, place)
    backend.decode(codec, packets, decoded, numel, 64, False, place)
    places = torch.arange(3 * shard, device=device) % shard
    elsewhere = (places < place.start) | (places >= place.stop)
    assert not any(bool(one[elsewhere].any()) for one in (lost - payload, new, decoded))
    for row in range(3):
        mine = min(max(numel - row * shard - place.start, 0), part)
        here = slice(row * shard + place.start, row * shard + place.stop)
        one, of_row, values = payload[here].clone(), alone[row : row + 1], torch.empty(part, device=device)
        backend.encode(codec, one, residual[here].clone(), of_row, mine, 64)
        assert torch.equal(lost[here], one)
        assert torch.equal(packets[row], of_row[0])
        backend.decode(codec, of_row, values, mine, 64)
        assert torch.equal(decoded[here], values)
        after = torch.empty(part, dtype=torch.bfloat16, device=device)
        backend.encode_rounded(codec, payload[here].clone(), half[here].clone(), after, of_row, mine, 64)
        assert torch.equal(new[here], after)
        assert torch.equal(rounded[row], of_row[0])


def check_against_exact(subject: Subject, encoded: Encoded) -> None:
    """Scales to a few roundings, codes but for ties, and what was lost, all against float64."""
    wanted, numel, block_size = exact(encoded), encoded.numel, encoded.block_size
    if encoded.codec == "stat2" and not torch.equal(codes(encoded), codes(wanted)):
        check_splits(encoded, wanted)
    else:
        torch.testing.assert_close(scales(encoded), scales(wanted), rtol=2e-6, atol=2e-45)
    if encoded.codec == "sign1":
        assert torch.equal(codes(encoded), codes(wanted))
    elif encoded.codec != "stat2":
        assert ((levels(encoded) - levels(wanted)).abs() <= 1).all()
    decoded = decode(subject, encoded)
    assert (decoded[numel:] == 0).all()
    assert (encoded.lost[numel:] == 0).all()
    tolerance = 4e-7 * (encoded.corrected.abs() + decoded.double().abs()) + 3e-45
    error = (decoded.double() + encoded.lost.double() - encoded.corrected).abs()
    assert (error <= tolerance)[:numel].all(), "decoded + lost must be what came in"
    if encoded.codec in ("int4", "int8"):
        half_step = 0.5 * scales(encoded).double().view(-1).repeat_interleave(block_size)
        assert (encoded.lost.double().abs() <= half_step * (1 + 1e-4) + 3e-45)[:numel].all()


def check_splits(encoded: Encoded, wanted: Encoded) -> None:
    """Magnitudes may be taken for others where they are next to their block's split only."""
    blocks = encoded.corrected.clone()
    blocks[encoded.numel :] = 0.0
    blocks = blocks.view(-1, encoded.block_size)
    counts = [
        min(max(encoded.numel - first, 1), encoded.block_size) for first in range(0, blocks.numel(), len(blocks[0]))
    ]
    splits = 0.98 * (blocks.square().sum(1, keepdim=True) / torch.tensor(counts).view(-1, 1).to(blocks)).sqrt()
    close = ((blocks.abs() - splits).abs() <= 1e-6 * splits).any(dim=1)
    given, expected = (codes(one).reshape(len(blocks), -1) for one in (encoded, wanted))
    assert torch.equal(given[~close], expected[~close])
    plane = encoded.block_size // 8
    assert torch.equal(given[:, :plane], expected[:, :plane]), "signs have no split"


class KernelsBody:
    """Tests of one backend; `subject` is a fixture of the class that inherits."""

    @pytest.fixture(params=CODECS)
    def codec(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_encode_and_decode_agree_with_exact_arithmetic(
        self, subject: Subject, codec: str, data: st.DataObject
    ) -> None:
        block_size = data.draw(st.sampled_from(subject.block_sizes), "block_size")
        rows = data.draw(st.integers(1, 4), "rows")
        shard = block_size * data.draw(st.integers(1, 3), "blocks")
        numel = data.draw(st.integers(0, rows * shard), "numel")
        magnitude = 10.0 ** data.draw(st.integers(-12, 12), "magnitude")
        torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
        payload = torch.randn(rows * shard) * magnitude
        residual = torch.randn(rows * shard) * magnitude if data.draw(st.booleans(), "residual") else None
        encoded = encode(subject, codec, payload, residual, rows, numel, block_size)
        check_against_exact(subject, encoded)
        wanted = torch.empty_like(encoded.lost)
        REFERENCE.decode(codec, encoded.packets, wanted, numel, block_size)
        assert torch.equal(decode(subject, encoded), wanted)

    @settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_decode_mean_gives_the_bits_of_the_reference(
        self, subject: Subject, codec: str, data: st.DataObject
    ) -> None:
        block_size = data.draw(st.sampled_from(subject.block_sizes), "block_size")
        workers = data.draw(st.integers(1, 7), "workers")
        shard = block_size * data.draw(st.integers(0, 3), "blocks")
        numel = data.draw(st.integers(0, shard), "numel")
        torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
        packets = encode(
            subject, codec, torch.randn(workers * shard), None, workers, workers * shard, block_size
        ).packets
        output, wanted = (torch.full((shard,), math.nan, device=subject.device) for _ in range(2))
        subject.backend.decode_mean(codec, packets, output, numel, block_size)
        REFERENCE.decode_mean(codec, packets, wanted, numel, block_size)
        assert torch.equal(output, wanted)

    @pytest.mark.parametrize(("rows", "blocks"), [(1, 0), (1, 1), (4, 1), (5, 0)])
    def test_no_valid_element_at_all(self, subject: Subject, codec: str, rows: int, blocks: int) -> None:
        payload = torch.full((rows * blocks * 64,), math.nan)
        encoded = encode(subject, codec, payload, payload, rows, 0, 64)
        assert (scales(encoded) == 0).all()
        assert (codes(encoded) == 0).all()
        assert (encoded.lost == 0).all()
        assert (decode(subject, encoded) == 0).all()

    @pytest.mark.parametrize("value", [-3.5, 0.25])
    def test_one_element(self, subject: Subject, codec: str, value: float) -> None:
        payload = torch.full((3 * 64,), math.inf)  # whatever lies in the padding must not show
        payload[0] = value
        encoded = encode(subject, codec, payload, None, 3, 1, 64)
        check_against_exact(subject, encoded)
        torch.testing.assert_close(decode(subject, encoded)[0].item(), value, rtol=1e-6, atol=0)

    def test_zeros_keep_scale_zero_and_minus_zero_counts_as_plus(self, subject: Subject, codec: str) -> None:
        payload = torch.zeros(128)
        payload[::2] = -0.0
        encoded = encode(subject, codec, payload, payload, 1, 128, 64)
        assert (scales(encoded) == 0).all()
        assert (codes(encoded) == (0xFF if codec in ("sign1", "stat2") else 0)).all()
        assert (decode(subject, encoded) == 0).all()
        assert (encoded.lost == 0).all()

    @pytest.mark.parametrize("magnitude", [1e30, 1e-30, 1e-38, 1e-40, 3e-45])
    def test_extreme_magnitudes(self, subject: Subject, codec: str, magnitude: float) -> None:
        block_size = subject.block_sizes[0]
        payload = (torch.rand(2 * block_size) - 0.5) * 2 * magnitude
        encoded = encode(subject, codec, payload, None, 2, 2 * block_size - 1, block_size)
        if magnitude > 1e-37:
            check_against_exact(subject, encoded)
        total = decode(subject, encoded).double() + encoded.lost.double()
        rounding = 1e-6 * magnitude + 3e-45
        assert ((total - encoded.corrected).abs() <= rounding)[: encoded.numel].all()

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("in_residual", [False, True])
    def test_a_non_finite_element_shows_in_its_block_and_no_other(
        self, subject: Subject, codec: str, bad: float, in_residual: bool
    ) -> None:
        block_size = subject.block_sizes[-1]
        payload, residual = torch.randn(2, 4 * block_size)
        victim = int(torch.randint(block_size, 2 * block_size, ()))
        clean = encode(subject, codec, payload, residual, 2, 4 * block_size - 5, block_size)
        (residual if in_residual else payload)[victim] = bad
        encoded = encode(subject, codec, payload, residual, 2, 4 * block_size - 5, block_size)
        decoded = decode(subject, encoded).view(4, block_size)
        assert not decoded[1].isfinite().any()
        assert not scales(encoded)[1].isfinite().any()
        others = [0, 2, 3]
        assert torch.equal(decoded[others], decode(subject, clean).view(4, block_size)[others])
        assert torch.equal(encoded.lost.view(4, block_size)[others], clean.lost.view(4, block_size)[others])
        mean = torch.empty(2 * block_size, device=subject.device)
        subject.backend.decode_mean(codec, encoded.packets, mean, 2 * block_size, block_size)
        assert mean[:block_size].isfinite().all()
        assert not mean[block_size:].isfinite().any()

    def test_a_sum_beyond_float32_is_an_overflow(self, subject: Subject) -> None:
        for codec in ("sign1", "stat2"):
            encoded = encode(subject, codec, torch.full((64,), 3e38), None, 1, 64, 64)
            assert not decode(subject, encoded).isfinite().any()

    def test_padding_behind_what_is_not_finite_loses_nothing(self, subject: Subject, codec: str) -> None:
        encoded = encode(subject, codec, torch.full((64,), math.inf), None, 1, 63, 64)
        assert encoded.lost[63] == 0
        assert decode(subject, encoded)[63] == 0

    def test_no_residual_is_a_residual_of_zeros(self, subject: Subject, codec: str) -> None:
        block_size = subject.block_sizes[-1]
        payload = torch.randn(3 * block_size)
        without = encode(subject, codec, payload, None, 1, 3 * block_size - 9, block_size)
        zeros = encode(subject, codec, payload, torch.zeros_like(payload), 1, 3 * block_size - 9, block_size)
        assert torch.equal(without.lost, zeros.lost)
        assert torch.equal(without.packets, zeros.packets)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_encode_with_rounded_residuals_is_encode(self, subject: Subject, codec: str, data: st.DataObject) -> None:
        block_size = data.draw(st.sampled_from(subject.block_sizes), "block_size")
        rows = data.draw(st.integers(1, 3), "rows")
        capacity = rows * block_size * data.draw(st.integers(0, 3), "blocks")
        numel = data.draw(st.integers(0, capacity), "numel")
        torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
        payload = torch.randn(capacity)
        if capacity and data.draw(st.booleans(), "non-finite"):
            payload[int(torch.randint(capacity, ()))] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        residual = data.draw(st.sampled_from([None, torch.randn(capacity).to(subject.device).bfloat16()]))
        wide = None if residual is None else residual.float()
        wanted = encode(subject, codec, payload, wide, rows, numel, block_size)
        in_place = residual is not None and data.draw(st.booleans(), "in place")
        new_residual = residual if in_place else torch.full_like(wanted.lost, math.nan, dtype=torch.bfloat16)
        packets = torch.full_like(wanted.packets, HEADER_FILL)
        given_payload = payload.to(subject.device)
        subject.backend.encode_rounded(codec, given_payload, residual, new_residual, packets, numel, block_size)
        assert same(new_residual, wanted.lost.bfloat16())
        assert torch.equal(packets, wanted.packets)
        assert same(given_payload, payload.to(subject.device)), "the payload must only be read"
        if residual is not None and not in_place:
            assert same(residual.float(), wide), "the residual must only be read"
