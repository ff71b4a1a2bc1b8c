"""What kernels over a whole bucket must do, on any device: the bits of the specification in plain torch, put together
from the backend's own kernels for single tensors, which add up a block's magnitudes in their own order.

A test class names its subject by overriding the `subject` fixture.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.kernels.body import CODECS, uninitialised_packets
from thinwire.compress.codecs import scales
from thinwire.compress.kernels import bucket_reference
from thinwire.compress.kernels.buckets import (
    AverageAndEncode,
    EncodePackedPayload,
    MovePacked,
    PackedState,
    Part,
    Segments,
)
from thinwire.compress.kernels.calls import DecodeAndMove, EncodePayload

HEADER = bytes(range(16))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Subject:
    """The kernels under test, and those for single tensors of the same backend."""

    buckets: Any
    singles: Any
    device: str = "cpu"


@dataclass
class Bucket:
    """A bucket of parameters of odd sizes, `rows` shards of whole blocks, and the part of them that is sent."""

    segments: Segments
    part: Part
    rows: int
    generator: torch.Generator
    device: str

    @property
    def padded(self) -> int:
        return self.rows * self.part.shard

    def floats(self, numel: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.randn(self.padded if numel is None else numel, generator=self.generator)
        return made.to(device=self.device, dtype=dtype)

    def state(self) -> Tensor:
        """Fp32 [padded], 0 on the padding."""
        made = self.floats()
        made[self.part.numel :] = 0.0
        return made

    def denominators(self) -> Tensor:
        """Positive, infinite at some coordinates."""
        made = self.floats().abs() + 0.1
        made[torch.rand(self.padded, generator=self.generator).to(self.device) < 0.02] = torch.inf
        return made

    def runs(self, dtypes: Sequence[torch.dtype], missing: int = 0) -> list[Tensor | None]:
        """A tensor for each run, of the dtypes in turn; one in `missing` is None."""
        made: list[Tensor | None] = []
        for number, (_, numel) in enumerate(self.segments.places):
            gone = missing and number % missing == missing - 1
            made.append(None if gone else self.floats(numel, dtypes[number % len(dtypes)]))
        return made

    def factors(self, low: float, high: float) -> list[float]:
        return (low + (high - low) * torch.rand(len(self.segments), generator=self.generator).double()).tolist()

    def packets(self, codec: str) -> Tensor:
        part = self.part
        return uninitialised_packets(codec, self.rows, part.last - part.first, part.block_size, self.device)


def make(
    seed: int, device: str, rows: int, block_size: int = 128, cut: bool = False, numels: Sequence[int] = ()
) -> Bucket:
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(0, 400, (9,), generator=generator).tolist()
    numels = numels or [*some, 1, 16, 3 * block_size]
    firsts = [sum(numels[:k]) for k in range(len(numels))]
    numel = sum(numels)
    shard = -(-numel // (rows * block_size)) * block_size
    first, last = (block_size, shard - block_size) if cut and shard > 3 * block_size else (0, shard)
    part = Part(first, last, shard, numel, block_size)
    return Bucket(Segments(zip(firsts, numels, strict=True)), part, rows, generator, device)


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value.clone() if isinstance(value, Tensor) else value


def assert_same(left: Any, right: Any) -> None:
    """The same bits, or NaN in both, of tensors or lists of them."""
    if isinstance(left, list):
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif left is None or right is None:
        assert left is right
    else:
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
        nan = left.isnan() & right.isnan() if left.is_floating_point() else torch.zeros_like(left, dtype=torch.bool)
        assert bool(((left.view(integers) == right.view(integers)) | nan).all())


def payload_call(bucket: Bucket, codec: str, form: Any, gradients: Sequence[Tensor | None], **given: Any) -> Any:
    """An EncodePayload of a bucket's own momentum, denominators and residual, unless others are given."""
    runs = len(bucket.segments)
    made = {
        "beta1": [0.9] * runs,
        "divisors": [1.0] * runs,
        "momentum": bucket.state(),
        "denominators": None if form == "plain" else bucket.denominators(),
        "residual": bucket.state(),
        "lost": bucket.floats(),
        "packets": bucket.packets(codec),
        "part": bucket.part,
    }
    return EncodePayload(codec, form, bucket.segments, gradients, **(made | given))


def packed_call(bucket: Bucket, state: PackedState, gradients: Sequence[Tensor | None], **given: Any) -> Any:
    """An EncodePackedPayload, of a residual in fp32 unless another is given."""
    runs = len(bucket.segments)
    made = {
        "beta1": [0.9] * runs,
        "divisors": [1.0] * runs,
        "tables": bucket.floats(256 * runs).view(runs, 256).abs(),
        "residual": bucket.state(),
        "lost": bucket.floats(),
        "packets": bucket.packets("sign1"),
        "part": bucket.part,
    }
    return EncodePackedPayload(state, bucket.segments, gradients, **(made | given))


def move_call(bucket: Bucket, codec: str, form: Any, weights: Any, replicas: Any, **given: Any) -> Any:
    """A DecodeAndMove of packets of a state of its own, unless others are given."""
    made = {
        "packets": encoded(bucket, codec, bucket.state()),
        "output": bucket.floats(),
        "denominators": bucket.denominators(),
        "rates": bucket.factors(1e-4, 1e-1),
        "decays": bucket.factors(0.9, 1.0),
        "part": bucket.part,
    }
    return DecodeAndMove(codec, form, bucket.segments, weights=weights, replicas=replicas, **(made | given))


def encoded(bucket: Bucket, codec: str, values: Tensor) -> Tensor:
    """Packets of these values, by the specification."""
    nothing = [None] * len(bucket.segments)
    call = payload_call(bucket, codec, "plain", nothing, beta1=[1.0] * len(nothing), momentum=values, residual=None)
    bucket_reference.encode_payload(call)
    return call.packets


def packed_state(bucket: Bucket) -> PackedState:
    part = bucket.part
    whole = replace(bucket, part=replace(part, first=0, last=part.shard))
    codes = torch.randint(0, 256, (bucket.padded,), generator=bucket.generator, dtype=torch.uint8)
    codes[torch.rand(bucket.padded, generator=bucket.generator) < 0.02] = 0
    packets = encoded(whole, "sign1", bucket.state())
    return PackedState(packets, codes.to(bucket.device), part.shard, part.numel, part.block_size)


def every_magnitude(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values over the whole range of `dtype`, subnormals, infinities and NaN among them."""
    bits = torch.randint(-(2**15), 2**15, (numel,), generator=generator) << (16 if dtype == torch.float32 else 0)
    if dtype == torch.float32:
        return (bits + torch.randint(2**16, (numel,), generator=generator)).to(torch.int32).view(dtype)
    return bits.to(torch.int16).view(dtype)


SHARDS = pytest.mark.parametrize(("seed", "rows", "cut"), [(0, 1, False), (1, 2, False), (2, 3, True)])


class BucketKernels:
    """The body."""

    @pytest.fixture
    def subject(self) -> Subject:
        raise NotImplementedError

    @pytest.fixture(params=CODECS)
    def codec(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def holds(self, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """Checks and executes a call, and that what is `written` has the specification's bits; others that are named
        with it are not compared."""

        def hold(call: Any, *written: str, beside: Sequence[str] = ()) -> None:
            other = replace(call, **{name: copied(getattr(call, name)) for name in (*written, *beside)})
            call.check()
            getattr(subject.buckets, call.kernel)(call)
            # The specification on top of the subject's kernels for single tensors.
            monkeypatch.setattr(bucket_reference, "reference", subject.singles)
            getattr(bucket_reference, call.kernel)(other)
            monkeypatch.undo()
            for name in written:
                assert_same(getattr(call, name), getattr(other, name))

        return hold

    @pytest.mark.parametrize("form", ["plain", "divided", "masked"])
    @SHARDS
    def test_payloads_are_encoded(
        self, subject: Subject, holds: Any, codec: str, form: Any, seed: int, rows: int, cut: bool
    ) -> None:
        bucket = make(seed, subject.device, rows, cut=cut)
        beta1 = bucket.factors(0.3, 0.99)  # both of lerp's ways
        call = payload_call(
            bucket,
            codec,
            form,
            bucket.runs(DTYPES, missing=4),
            beta1=beta1,
            divisors=[1.0 if number % 2 else 3.7 for number in range(len(beta1))],
            part=replace(bucket.part, header=HEADER if cut else None),
            **({"residual": None} if seed == 1 else {}),
        )
        holds(call, "lost", "packets")

    @pytest.mark.parametrize(("block_size", "missing"), [(192, 0), (2048, 1), (65536, 0)])
    def test_blocks_that_lie_in_one_run(self, subject: Subject, holds: Any, block_size: int, missing: int) -> None:
        """Of every size that GPUs treat in its own way, at addresses that are aligned or not, with and without
        gradients."""
        bucket = make(3, subject.device, 2, block_size, numels=[block_size, block_size + 5, 2 * block_size])
        gradients = bucket.runs(DTYPES if missing else DTYPES[1:], missing=2 * missing)
        factors = {"beta1": [0.9, 0.4, 0.9], "divisors": [1.0, 3.7, 1024.0]}
        with_header = replace(bucket.part, header=HEADER)
        holds(payload_call(bucket, "int8", "divided", gradients, part=with_header, **factors), "lost", "packets")
        holds(packed_call(bucket, packed_state(bucket), gradients, **factors), "lost", "packets")
        weights = bucket.runs((torch.float32,))
        replicas = [weight.to(kind) for weight, kind in zip(weights, DTYPES, strict=True) if weight is not None]
        form = "divided" if missing else "plain"
        moves = move_call(bucket, "sign1", form, weights, [None, *replicas[1:]], holds=bool(missing))
        holds(moves, "output", "weights", "replicas")

    @pytest.mark.parametrize("kernel", ["encode_payload", "encode_packed_payload"])
    def test_packets_of_nothing_have_headers(self, subject: Subject, kernel: str) -> None:
        bucket = make(3, subject.device, 2)
        part = replace(bucket.part, first=bucket.part.shard, last=bucket.part.shard, header=HEADER)
        packets = uninitialised_packets("sign1", 2, 0, part.block_size, subject.device)
        given = {"packets": packets, "part": part}
        if kernel == "encode_payload":
            call = payload_call(bucket, "sign1", "plain", bucket.runs(DTYPES), **given)
        else:
            call = packed_call(bucket, packed_state(bucket), bucket.runs(DTYPES), **given)
        before = call.lost.clone()
        call.check()
        getattr(subject.buckets, kernel)(call)
        assert [row.tolist() for row in packets] == [list(HEADER)] * 2
        assert torch.equal(call.lost, before)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("form", ["plain", "divided", "masked"])
    def test_what_is_not_finite_is_seen(self, subject: Subject, holds: Any, form: Any, bad: float) -> None:
        bucket = make(7, subject.device, 2)
        gradients = bucket.runs(DTYPES)
        for gradient in gradients[::5]:
            assert gradient is not None
            gradient[-1:] = bad
        denominators = bucket.denominators()
        denominators[bucket.segments.places[0][1] - 1] = torch.inf
        call = payload_call(bucket, "sign1", form, gradients, denominators=denominators)
        holds(call, "lost", beside=["packets"])
        assert not bool(call.lost.isfinite().all())

    @pytest.mark.parametrize("form", ["plain", "divided"])
    @SHARDS
    def test_weights_move_by_what_is_decoded(
        self, subject: Subject, holds: Any, codec: str, form: Any, seed: int, rows: int, cut: bool
    ) -> None:
        bucket = make(seed, subject.device, rows, cut=cut)
        packets = bucket.packets(codec)
        packets[:, 16:] = encoded(bucket, codec, bucket.state())[:, 16:]
        weights = bucket.runs((torch.float32,), missing=5)
        replicas = [
            None if weight is None or number % 3 == 0 else weight.to(DTYPES[number % 3])
            for number, weight in enumerate(weights)
        ]
        given: dict[str, Any] = {"packets": packets, "holds": bool(seed)}
        if form == "plain" and not seed:
            given["denominators"] = None
        holds(move_call(bucket, codec, form, weights, replicas, **given), "output", "weights", "replicas")

    @pytest.mark.parametrize(("workers", "masked"), [(1, False), (1, True), (2, False), (5, True)])
    def test_means_are_encoded(self, subject: Subject, holds: Any, codec: str, workers: int, masked: bool) -> None:
        """With a mask also where one is not finite, and stays so."""
        bucket = make(workers, subject.device, 1)
        rows = [encoded(bucket, codec, bucket.state()) for _ in range(workers)]
        if masked:
            scales(codec, rows[0], bucket.part.block_size)[0, 0] = torch.inf
        call = AverageAndEncode(
            codec,
            torch.cat(rows),
            bucket.state() if workers > 1 else None,
            bucket.floats(),
            bucket.packets(codec),
            bucket.part.numel,
            bucket.part.block_size,
            (bucket.floats() > -0.5).to(torch.uint8) * 7 if masked else None,
        )
        assert call.lost.numel() == bucket.part.shard
        holds(call, "lost", "packets")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @SHARDS
    def test_packed_payloads_are_encoded(
        self, subject: Subject, holds: Any, dtype: torch.dtype, seed: int, rows: int, cut: bool
    ) -> None:
        """With `seed` 1 over the residual itself."""
        bucket = make(seed, subject.device, rows, cut=cut)
        residual = bucket.state().to(dtype)
        call = packed_call(
            bucket,
            packed_state(bucket),
            bucket.runs(DTYPES, missing=4),
            beta1=bucket.factors(0.3, 0.99),
            divisors=[1.0 if number % 2 else 3.7 for number in range(len(bucket.segments))],
            residual=residual,
            lost=residual if seed == 1 else bucket.floats().to(dtype),
            part=replace(bucket.part, header=HEADER if cut else None),
        )
        holds(call, "lost", "packets", beside=["residual"])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("seed", "rows", "own", "offset"), [(0, 1, False, 0), (1, 2, True, 1), (2, 3, True, 3), (3, 2, False, 2)]
    )
    def test_packed_weights_move(
        self, subject: Subject, holds: Any, dtype: torch.dtype, seed: int, rows: int, own: bool, offset: int
    ) -> None:
        """Off an allocation's alignment also those of every magnitude, at unusual rates; and nothing beside them."""
        bucket = make(seed, subject.device, rows)
        first, numel = ((rows - 1) * bucket.part.shard, bucket.part.shard) if own else (0, bucket.part.numel)
        guarded = torch.full((numel + 32,), 7.0, dtype=dtype, device=subject.device)
        weights = guarded[16 + offset : 16 + offset + numel].copy_(bucket.floats(numel))
        rates, decays = bucket.factors(1e-4, 1e-1), bucket.factors(0.9, 1.0)
        if offset:
            weights.copy_(every_magnitude(numel, dtype, bucket.generator))
            rates[:5], decays[:5] = [0.0, 1e-7, 1.0, 1e34, 1e-3], [1.0, 0.9997, 1.0007, 0.0, -0.3]
        moves = [number % 4 != 1 for number in range(len(bucket.segments))]
        noise = -(2**63) + seed if offset else seed << 20
        holds(MovePacked(packed_state(bucket), bucket.segments, weights, first, moves, rates, decays, noise), "weights")
        assert (guarded[: 16 + offset] == 7).all()
        assert (guarded[16 + offset + numel :] == 7).all()
