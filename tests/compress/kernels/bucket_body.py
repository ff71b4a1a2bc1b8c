"""What kernels over a whole bucket must do, on any device: the bits of the specification in plain torch, put together
from the backend's own kernels for single tensors, which add up a block's magnitudes in their own order.

A test class names its subject by overriding the `subject` fixture.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    DecodeAndMove,
    EncodePayload,
    Part,
    Segments,
)
from thinwire.compress.kernels.packed import EncodePackedPayload, MovePacked, PackedState

HEADER = bytes(range(16))
_MOVED = ("weights", "replicas")
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
    seed: int,
    device: str,
    rows: int,
    block_size: int = 128,
    cut: bool = False,
    numels: Sequence[int] = (),
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


def expected(subject: Subject, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    """Run the specification on top of the subject's kernels for single tensors."""
    monkeypatch.setattr(bucket_reference, "reference", subject.singles)
    getattr(bucket_reference, call.kernel)(call)
    monkeypatch.undo()


def assert_same(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> None:
    for one, other in zip(left, right, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
        nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.zeros_like(one, dtype=torch.bool)
        assert bool(((one.view(integers) == other.view(integers)) | nan).all())


class BucketKernels:
    """The body."""

    @pytest.fixture
    def subject(self) -> Subject:
        raise NotImplementedError

    @pytest.fixture(params=CODECS)
    def codec(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.mark.parametrize("form", ["plain", "divided", "masked"])
    @pytest.mark.parametrize(("seed", "rows", "cut"), [(0, 1, False), (1, 2, False), (2, 3, True)])
    def test_payloads_are_encoded(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, codec: str, form: Any, seed: int, rows: int, cut: bool
    ) -> None:
        bucket = make(seed, subject.device, rows, cut=cut)
        gradients = bucket.runs(DTYPES, missing=4)
        beta1 = bucket.factors(0.3, 0.99)  # both of lerp's ways
        divisors = [1.0 if number % 2 else 3.7 for number in range(len(beta1))]
        call = EncodePayload(
            codec,
            form,
            bucket.segments,
            gradients,
            beta1,
            divisors,
            bucket.state(),
            None if form == "plain" else bucket.denominators(),
            None if seed == 1 else bucket.state(),
            bucket.floats(),
            bucket.packets(codec),
            replace(bucket.part, header=HEADER if cut else None),
        )
        other = replace(call, lost=call.lost.clone(), packets=call.packets.clone())
        call.check()
        subject.buckets.encode_payload(call)
        expected(subject, monkeypatch, other)
        assert_same([call.lost, call.packets], [other.lost, other.packets])

    @pytest.mark.parametrize(("block_size", "missing"), [(192, 0), (2048, 1), (65536, 0)])
    def test_blocks_that_lie_in_one_run(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, block_size: int, missing: int
    ) -> None:
        """Of every size that GPUs treat in its own way, at addresses that are aligned or not, with and without
        gradients."""
        bucket = make(3, subject.device, 2, block_size, numels=[block_size, block_size + 5, 2 * block_size])
        gradients = bucket.runs(DTYPES if missing else DTYPES[1:], missing=2 * missing)
        beta1, divisors = [0.9, 0.4, 0.9], [1.0, 3.7, 1024.0]
        ready = (bucket.state(), bucket.denominators(), bucket.state(), bucket.floats(), bucket.packets("int8"))
        payload = EncodePayload(
            "int8", "divided", bucket.segments, gradients, beta1, divisors, *ready, replace(bucket.part, header=HEADER)
        )
        packed = EncodePackedPayload(
            self._packed(subject, bucket),
            bucket.segments,
            gradients,
            beta1,
            divisors,
            bucket.floats(3 * 256).view(3, 256).abs(),
            bucket.state(),
            bucket.floats(),
            bucket.packets("sign1"),
            bucket.part,
        )
        weights = bucket.runs((torch.float32,))
        replicas = [weight.to(kind) for weight, kind in zip(weights, DTYPES, strict=True) if weight is not None]
        moves = DecodeAndMove(
            "sign1",
            "divided" if missing else "plain",
            bucket.segments,
            self._encoded(subject, bucket, "sign1", bucket.state()),
            bucket.floats(),
            bucket.denominators(),
            bool(missing),
            weights,
            [None, *replicas[1:]],
            bucket.factors(1e-4, 1e-1),
            bucket.factors(0.9, 1.0),
            bucket.part,
        )
        for call, written in ((payload, ("lost", "packets")), (packed, ("lost", "packets"))):
            copies = {name: getattr(call, name).clone() for name in written}
            self._as_expected(subject, monkeypatch, call, replace(call, **copies), written)
        copied = {name: [None if one is None else one.clone() for one in getattr(moves, name)] for name in _MOVED}
        other = replace(moves, output=moves.output.clone(), **copied)
        self._as_expected(subject, monkeypatch, moves, other, ("output",))
        for name in _MOVED:
            assert_same(getattr(moves, name), getattr(other, name))

    @staticmethod
    def _as_expected(
        subject: Subject, monkeypatch: pytest.MonkeyPatch, call: Any, other: Any, written: Sequence[str]
    ) -> None:
        call.check()
        getattr(subject.buckets, call.kernel)(call)
        expected(subject, monkeypatch, other)
        for name in written:
            assert_same([getattr(call, name)], [getattr(other, name)])

    @pytest.mark.parametrize("kernel", ["encode_payload", "encode_packed_payload"])
    def test_packets_of_nothing_have_headers(self, subject: Subject, kernel: str) -> None:
        bucket = make(3, subject.device, 2)
        part = replace(bucket.part, first=bucket.part.shard, last=bucket.part.shard, header=HEADER)
        packets = uninitialised_packets("sign1", 2, 0, part.block_size, subject.device)
        runs, lost = len(bucket.segments), bucket.floats()
        of_runs = (bucket.segments, bucket.runs(DTYPES), [0.9] * runs, [1.0] * runs)
        call: EncodePayload | EncodePackedPayload
        if kernel == "encode_payload":
            state = bucket.state()
            call = EncodePayload("sign1", "plain", *of_runs, state, None, None, lost, packets, part)
        else:
            tables = bucket.floats(256 * runs).view(runs, 256)
            packed = self._packed(subject, bucket)
            call = EncodePackedPayload(packed, *of_runs, tables, bucket.state(), lost, packets, part)
        call.check()
        before = lost.clone()
        getattr(subject.buckets, kernel)(call)
        assert [row.tolist() for row in packets] == [list(HEADER)] * 2
        assert torch.equal(lost, before)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("form", ["plain", "divided", "masked"])
    def test_what_is_not_finite_is_seen(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, form: Any, bad: float
    ) -> None:
        bucket = make(7, subject.device, 2)
        gradients = bucket.runs(DTYPES)
        for gradient in gradients[::5]:
            assert gradient is not None
            gradient[-1:] = bad
        denominators = bucket.denominators()
        denominators[bucket.segments.places[0][1] - 1] = torch.inf
        ones = [1.0] * len(gradients)
        call = EncodePayload(
            "sign1",
            form,
            bucket.segments,
            gradients,
            [0.9] * len(gradients),
            ones,
            bucket.state(),
            denominators,
            bucket.state(),
            bucket.floats(),
            bucket.packets("sign1"),
            bucket.part,
        )
        other = replace(call, lost=call.lost.clone(), packets=call.packets.clone())
        subject.buckets.encode_payload(call)
        expected(subject, monkeypatch, other)
        assert_same([call.lost], [other.lost])
        assert not bool(call.lost.isfinite().all())

    @pytest.mark.parametrize("form", ["plain", "divided"])
    @pytest.mark.parametrize(("seed", "rows", "cut"), [(0, 1, False), (1, 2, False), (2, 3, True)])
    def test_weights_move_by_what_is_decoded(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, codec: str, form: Any, seed: int, rows: int, cut: bool
    ) -> None:
        bucket = make(seed, subject.device, rows, cut=cut)
        packets = bucket.packets(codec)
        packets[:, 16:] = self._encoded(subject, bucket, codec, bucket.state())[:, 16:]
        weights = bucket.runs((torch.float32,), missing=5)
        replicas = [
            None if weight is None or number % 3 == 0 else weight.to(DTYPES[number % 3])
            for number, weight in enumerate(weights)
        ]
        denominators = bucket.denominators() if form == "divided" or seed else None
        call = DecodeAndMove(
            codec,
            form,
            bucket.segments,
            packets,
            bucket.floats(),
            denominators,
            bool(seed) and denominators is not None,
            weights,
            replicas,
            bucket.factors(1e-4, 1e-1),
            bucket.factors(0.9, 1.0),
            bucket.part,
        )
        other = replace(
            call,
            output=call.output.clone(),
            weights=[None if one is None else one.clone() for one in weights],
            replicas=[None if one is None else one.clone() for one in replicas],
        )
        call.check()
        subject.buckets.decode_and_move(call)
        expected(subject, monkeypatch, other)
        assert_same([call.output, *call.weights, *call.replicas], [other.output, *other.weights, *other.replicas])

    @pytest.mark.parametrize(("workers", "masked"), [(1, False), (1, True), (2, False), (5, True)])
    def test_means_are_encoded(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, codec: str, workers: int, masked: bool
    ) -> None:
        """With a mask also where one is not finite, and stays so."""
        bucket = make(workers, subject.device, 1)
        shard, numel = bucket.part.shard, bucket.part.numel
        rows = [self._encoded(subject, bucket, codec, bucket.state()) for _ in range(workers)]
        if masked:
            scales(codec, rows[0], bucket.part.block_size)[0, 0] = torch.inf
        call = AverageAndEncode(
            codec,
            torch.cat(rows),
            bucket.state() if workers > 1 else None,
            bucket.floats(),
            bucket.packets(codec),
            numel,
            bucket.part.block_size,
            (bucket.floats() > -0.5).to(torch.uint8) * 7 if masked else None,
        )
        other = replace(call, lost=call.lost.clone(), packets=call.packets.clone())
        call.check()
        assert call.lost.numel() == shard
        subject.buckets.average_and_encode(call)
        expected(subject, monkeypatch, other)
        assert_same([call.lost, call.packets], [other.lost, other.packets])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("seed", "rows", "cut"), [(0, 1, False), (1, 2, False), (2, 3, True)])
    def test_packed_payloads_are_encoded(
        self,
        subject: Subject,
        monkeypatch: pytest.MonkeyPatch,
        dtype: torch.dtype,
        seed: int,
        rows: int,
        cut: bool,
    ) -> None:
        bucket = make(seed, subject.device, rows, cut=cut)
        residual = bucket.state().to(dtype)
        call = EncodePackedPayload(
            self._packed(subject, bucket),
            bucket.segments,
            bucket.runs(DTYPES, missing=4),
            bucket.factors(0.3, 0.99),
            [1.0 if number % 2 else 3.7 for number in range(len(bucket.segments))],
            bucket.floats(256 * len(bucket.segments)).view(-1, 256).abs(),
            residual,
            residual if seed == 1 else bucket.floats().to(dtype),
            bucket.packets("sign1"),
            replace(bucket.part, header=HEADER if cut else None),
        )
        other = replace(call, residual=residual.clone(), lost=call.lost.clone(), packets=call.packets.clone())
        call.check()
        subject.buckets.encode_packed_payload(call)
        expected(subject, monkeypatch, other)
        assert_same([call.lost, call.packets], [other.lost, other.packets])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("seed", "rows", "own"), [(0, 1, False), (1, 2, True), (2, 3, True)])
    def test_packed_weights_move(
        self,
        subject: Subject,
        monkeypatch: pytest.MonkeyPatch,
        dtype: torch.dtype,
        seed: int,
        rows: int,
        own: bool,
    ) -> None:
        bucket = make(seed, subject.device, rows)
        first = (rows - 1) * bucket.part.shard if own else 0
        call = MovePacked(
            self._packed(subject, bucket),
            bucket.segments,
            bucket.floats(bucket.part.shard if own else bucket.part.numel).to(dtype),
            first,
            [number % 4 != 1 for number in range(len(bucket.segments))],
            bucket.factors(1e-4, 1e-1),
            bucket.factors(0.9, 1.0),
            seed << 20,
        )
        other = replace(call, weights=call.weights.clone())
        call.check()
        subject.buckets.move_packed(call)
        expected(subject, monkeypatch, other)
        assert_same([call.weights], [other.weights])

    @staticmethod
    def _encoded(subject: Subject, bucket: Bucket, codec: str, values: Tensor) -> Tensor:
        part, packets = bucket.part, bucket.packets(codec)
        form = EncodePayload(
            codec,
            "plain",
            bucket.segments,
            [None] * len(bucket.segments),
            [1.0] * len(bucket.segments),
            [1.0] * len(bucket.segments),
            values,
            None,
            None,
            values.clone(),
            packets,
            part,
        )
        bucket_reference.encode_payload(form)
        return packets

    def _packed(self, subject: Subject, bucket: Bucket) -> PackedState:
        part = bucket.part
        whole = replace(bucket, part=replace(part, first=0, last=part.shard))
        packets = self._encoded(subject, whole, "sign1", bucket.state())
        codes = torch.randint(0, 256, (bucket.padded,), generator=bucket.generator, dtype=torch.uint8)
        codes[torch.rand(bucket.padded, generator=bucket.generator) < 0.02] = 0
        return PackedState(packets, codes.to(bucket.device), part.shard, part.numel, part.block_size)
