"""Momentum kept as sign1 packets, its specification against exact arithmetic, and rounding to 16 bits, at random with
the bits of the reference and to the nearest as torch does. `bucket_body` holds the backends against it."""

import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.compress.kernels import emulation
from tests.compress.kernels.body import BACKENDS, REFERENCE, uninitialised_packets
from tests.compress.kernels.bucket_body import assert_same
from tests.refusing import refused
from thinwire.compress.kernels import bucket_reference, buckets, reference
from thinwire.compress.kernels.bucket_reference import write_packed_payload
from thinwire.compress.kernels.buckets import MovePacked, PackedState, Segments
from thinwire.compress.kernels.calls import StoreRounded
from thinwire.compress.kernels.loading import execute
from thinwire.compress.kernels.reference import random_bits

HAS_NUMBA = importlib.util.find_spec("numba") is not None
BACKEND: Any = importlib.import_module("thinwire.compress.kernels.cpu.backend") if HAS_NUMBA else bucket_reference
TYPES = (torch.float32, torch.bfloat16, torch.float16)
BETA1, LOSS_SCALE = 0.9, 1536.0


@dataclass
class Momentum:
    """Packets of a momentum, and a range of its elements with its codes and their table."""

    packets: Tensor
    codes: Tensor
    table: Tensor
    first: int
    shard: int
    block_size: int

    @property
    def numel(self) -> int:
        return self.codes.numel()

    def values(self) -> Tensor:
        """Float64 [numel], by the reference."""
        rows = self.packets.size(0)
        decoded = torch.empty(rows * self.shard, device=self.packets.device)
        REFERENCE.decode("sign1", self.packets, decoded, rows * self.shard, self.block_size)
        return decoded[self.first : self.first + self.numel].double()

    def state(self) -> PackedState:
        """Of the whole bucket; codes that are not given are 0."""
        rows = self.packets.size(0)
        codes = torch.zeros(rows * self.shard, dtype=torch.uint8, device=self.packets.device)
        codes[self.first : self.first + self.numel] = self.codes
        return PackedState(self.packets, codes, self.shard, rows * self.shard, self.block_size)

    def payload(self, gradient: Tensor | None, divisor: float = LOSS_SCALE) -> Tensor:
        """What the specification makes of it, before it is encoded."""
        u = self.values().float()
        write_packed_payload(
            u, self.codes, Segments([(0, self.numel)]), [gradient], [BETA1], [divisor], tables=self.table[None]
        )
        return u

    def apply(self, backend: Any, weights: Tensor, lr: float, decay: float, seed: int) -> Tensor:
        """New weights."""
        state, moved = self.state(), weights.clone()
        call = MovePacked(state, Segments([(0, state.numel)]), moved, self.first, [True], [lr], [decay], seed)
        call.check()
        backend.move_packed(call)
        return moved


def make_momentum(rows: int, shard: int, block_size: int, first: int, numel: int) -> Momentum:
    packets = uninitialised_packets("sign1", rows, shard, block_size, "cpu")
    blocks = shard // block_size
    scales = 10 ** (4 * torch.rand(rows, blocks) - 3)
    packets[:, 16 : 16 + 4 * blocks] = scales.view(rows, blocks).view(torch.uint8).view(rows, -1)
    codes = torch.randint(0, 256, (numel,), dtype=torch.uint8)
    codes[torch.rand(numel) < 0.1] = 0
    return Momentum(packets, codes, 10 ** (6 * torch.rand(256) - 1), first, shard, block_size)


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_large_ranges_have_the_bits_of_the_reference(
    first: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several threads."""
    monkeypatch.setattr(BACKEND._workers, "threads", lambda: 3)
    shard = 280 * 2048
    momentum = make_momentum(2, shard, 2048, first, 2 * shard - 9)
    arguments = (torch.randn(momentum.numel).to(dtype), 1e-3, 1.0, 3)
    assert_same(momentum.apply(BACKEND, *arguments), momentum.apply(bucket_reference, *arguments))


class TestMoves:
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_weights_follow_the_formula_to_one_of_two_neighbours(self, dtype: torch.dtype) -> None:
        momentum = make_momentum(2, 640, 64, first=37, numel=1201)
        weights = (torch.randn(1201) * 10 ** (-6 * torch.rand(1201))).to(dtype)
        moved = momentum.apply(bucket_reference, weights, lr=1e-4, decay=0.99, seed=5).double()
        exact = 0.99 * weights.double() - 1e-4 * torch.where(momentum.codes > 0, momentum.values(), 0.0)
        spacing = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal).log2().floor().exp2()
        spacing *= torch.finfo(dtype).eps
        slack = 3e-7 * (weights.double().abs() + exact.abs()) + 2.0**-37
        assert ((moved - exact).abs() <= spacing + slack).all()

    @pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
    def test_what_is_representable_stays_and_what_is_not_finite_too(self, dtype: torch.dtype) -> None:
        """Every value of the format, with nothing to add."""
        weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        momentum = make_momentum(1, 2**16, 2048, first=0, numel=2**16)
        momentum.codes.zero_()
        assert_same(momentum.apply(bucket_reference, weights, lr=1.0, decay=1.0, seed=1), weights)

    @pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
    def test_beyond_the_largest_value_is_rounded_to_it_or_to_infinity(self, dtype: torch.dtype) -> None:
        largest = torch.finfo(dtype).max
        momentum = make_momentum(1, 2048, 64, first=0, numel=2048)
        momentum.codes.zero_()
        weights = torch.full((2048,), -largest, dtype=dtype)
        step_up = 1 + torch.finfo(dtype).eps / 4  # half of the way to where the next value would be
        moved = momentum.apply(bucket_reference, weights, lr=1.0, decay=step_up, seed=8)
        assert 800 < (moved == -math.inf).sum() < 1248
        assert ((moved == -math.inf) | (moved == -largest)).all()
        assert (momentum.apply(bucket_reference, weights, lr=1.0, decay=1.01, seed=8) == -math.inf).all()

    def test_the_noise_belongs_to_the_element_not_to_the_call(self) -> None:
        whole = make_momentum(2, 640, 64, first=0, numel=1280)
        weights = torch.randn(1280).bfloat16()
        wanted = whole.apply(BACKEND, weights, 1e-3, 1.0, seed=77)
        for first, last in ((0, 1), (1, 30), (30, 641), (641, 1279), (1279, 1280), (1280, 1280)):
            part = Momentum(whole.packets, whole.codes[first:last], whole.table, first, 640, 64)
            assert torch.equal(part.apply(BACKEND, weights[first:last], 1e-3, 1.0, seed=77), wanted[first:last])
        assert not torch.equal(whole.apply(BACKEND, weights, 1e-3, 1.0, seed=78), wanted)


class TestPayload:
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_it_is_the_formula(self, dtype: torch.dtype) -> None:
        momentum = make_momentum(3, 384, 64, first=131, numel=777)
        gradient = (LOSS_SCALE * torch.randn(777)).to(dtype)
        preconditioner = torch.where(momentum.codes > 0, momentum.table[momentum.codes.long()], 0.0).double()
        kept = BETA1 * torch.where(momentum.codes > 0, momentum.values(), 0.0)
        change = (1 - BETA1) * gradient.double() / LOSS_SCALE * preconditioner
        error = momentum.payload(gradient).double() - (kept + change)
        assert (error.abs() <= 4e-7 * (kept.abs() + change.abs())).all()
        torch.testing.assert_close(momentum.payload(None).double(), kept, rtol=2e-7, atol=0)

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_non_finite_gradient_shows_even_where_nothing_moves(self, dtype: torch.dtype, bad: float) -> None:
        momentum = make_momentum(1, 192, 64, first=3, numel=181)
        momentum.codes[50] = 0
        momentum.codes[100] = 9
        gradient = torch.randn(181).to(dtype)
        gradient[[50, 100]] = bad
        payload = momentum.payload(gradient)
        assert payload[50].isnan()
        assert not payload[100].isfinite()
        payload[[50, 100]] = 0
        assert payload.isfinite().all()

    def test_what_stays_still_is_plus_zero_whatever_scale_and_table_say(self) -> None:
        momentum = make_momentum(1, 64, 64, first=0, numel=64)
        momentum.packets[:, 16:20] = torch.tensor([math.nan]).view(torch.uint8)
        momentum.table[0] = math.nan
        momentum.codes.zero_()
        assert (momentum.payload(torch.full((64,), -1.0)).view(torch.int32) == 0).all()


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"weights": torch.zeros(300).double()}, TypeError, "weights must be torch.float32 or torch.bfloat16"),
        ({"weights": torch.zeros(20, 15)}, ValueError, "weights must be a contiguous vector"),
        ({"codes": torch.zeros(385, dtype=torch.uint8)}, ValueError, "codes must be a contiguous vector of 384"),
        ({"codes": torch.zeros(384)}, TypeError, "codes must be torch.uint8"),
        ({"packets": torch.zeros(3, 41, dtype=torch.uint8)}, ValueError, "rows of 41 bytes.* takes 40"),
        ({"packets": torch.zeros(3, 40)}, TypeError, "packets must be torch.uint8"),
        ({"first": 85}, ValueError, "300 weights from element 85 on"),
        ({"first": -1}, ValueError, "from element -1"),
        ({"rates": [math.nan]}, ValueError, "rates must be finite"),
        ({"decays": [1e39]}, ValueError, "decays must be finite"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], kind: type[Exception], match: str) -> None:
    momentum = make_momentum(3, 128, 64, first=5, numel=300)
    weights = torch.randn(300).bfloat16()
    arguments = {"weights": weights, "first": 5, "moves": [True], "rates": [1e-3], "decays": [0.99], "seed": -5}
    given = {name: changes.get(name, value) for name, value in arguments.items()}
    tensors = {"packets": momentum.packets, "codes": momentum.state().codes}
    tensors |= {name: value for name, value in changes.items() if name in tensors}
    before = weights.clone()
    state = buckets.PackedState(**tensors, shard=128, numel=384, block_size=64)
    refused(kind, match, execute, buckets.MovePacked(state, Segments([(0, 384)]), **given))
    assert torch.equal(weights, before)


class TestNoise:
    """Fixed seeds: each result is what it is, and would be improbable if the bits were not as good as random."""

    NUMEL = 1 << 20

    @staticmethod
    def surprise(values: Tensor, choices: int) -> float:
        """Standard deviations by which chi squared of the counts of `values` exceeds that of uniform ones."""
        expected = values.numel() / choices
        squared = ((torch.bincount(values, minlength=choices) - expected) ** 2 / expected).sum().item()
        return (squared - (choices - 1)) / math.sqrt(2 * (choices - 1))

    @pytest.mark.parametrize("seed", [0, -1, 2**40])
    def test_uniform_and_independent_of_neighbours_and_of_the_next_seed(self, seed: int) -> None:
        bits = random_bits(seed, torch.arange(self.NUMEL))
        assert abs(self.surprise(bits, 1 << 16)) < 5
        for lag in (1, 2, 16, 2048, 65536):
            for shift in (0, 8):
                early, late = bits[:-lag] >> shift & 0xFF, bits[lag:] >> shift & 0xFF
                assert abs(self.surprise(early * 256 + late, 1 << 16)) < 5, (lag, shift)
        other = random_bits(seed ^ 1, torch.arange(self.NUMEL))
        assert abs(self.surprise(bits ^ other, 1 << 16)) < 5

    def test_repeats_after_two_to_the_33_only(self) -> None:
        numbers = torch.arange(1000)
        assert not torch.equal(random_bits(3, numbers), random_bits(3, numbers + 2**32))
        assert torch.equal(random_bits(3, numbers), random_bits(3, numbers + 2**33))

    @pytest.mark.parametrize(
        ("dtype", "weight"),
        [(torch.bfloat16, 1.0), (torch.bfloat16, -3e-39), (torch.float16, -1.0), (torch.float16, 2e-6)],
    )
    def test_rounding_keeps_the_mean(self, dtype: torch.dtype, weight: float) -> None:
        numel = 1 << 17
        momentum = make_momentum(1, numel, 2048, 0, numel)
        momentum.codes.zero_()
        weights = torch.full((numel,), weight).to(dtype)
        for decay in (1.0001, 1.001, 1.0029, 1.02):
            exact = weights[0].double() * decay
            moved = momentum.apply(BACKEND, weights, 0.0, decay, seed=int(decay * 1e4)).double()
            error = (moved.mean() - exact).abs() / (moved.std() / math.sqrt(numel) + exact.abs() * 2e-7)
            assert moved.unique().numel() == 2
            assert error < 4.5


# Rounding


SUBJECTS = {name: one.backend for name, one in BACKENDS.items() if name != "cuda"}
if emulation.COMPILER:
    SUBJECTS["emulated cuda"] = emulation.BACKEND
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1000, 4096, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_the_bits_of_the_reference(subject: str, dtype: torch.dtype, numel: int) -> None:
    if subject == "emulated cuda" and numel > 4096:
        numel = 4097  # a third thread block, of one element
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 10 ** (6 * torch.rand(numel, generator=generator) - 5)
    values[::7] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3e38]).repeat(numel)[
        : len(values[::7])
    ]
    mine, expected = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    SUBJECTS[subject].store_rounded(StoreRounded(mine, values, 1234567 << 40))
    reference.store_rounded(StoreRounded(expected, values, 1234567 << 40))
    torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mine.signbit() | mine.isnan(), expected.signbit() | expected.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_kept_and_other_seeds_round_otherwise(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    values = torch.full((100_000,), 1 + 0.3 * step)
    first, second = torch.empty(100_000, dtype=dtype), torch.empty(100_000, dtype=dtype)
    execute(StoreRounded(first, values, seed=1))
    execute(StoreRounded(second, values, seed=2))
    assert set(first.float().unique().tolist()) == {1.0, 1 + step}
    # 5 standard deviations of a fraction of 0.3 among 100,000.
    assert float((first.double() - 1).mean() / step) == pytest.approx(0.3, abs=0.0073)
    assert 0.3 < float((first != second).double().mean()) < 0.55  # 0.42 where independent


def test_what_does_not_fit_is_refused() -> None:
    values = torch.zeros(4)
    with pytest.raises(TypeError, match="values must be fp32"):
        execute(StoreRounded(torch.zeros(4), torch.zeros(4, dtype=torch.float64), 0))
    refused(ValueError, "vectors of one size", execute, StoreRounded(torch.zeros(5, dtype=torch.bfloat16), values, 0))
    refused(ValueError, "contiguous", execute, StoreRounded(torch.zeros(8, dtype=torch.bfloat16)[::2], values, 0))


def neighbours() -> torch.Tensor:
    """Every float16 and bfloat16, the float32 just beside them and half way to the next, and random bits."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    wide = torch.cat([every.view(torch.float16).float(), every.view(torch.bfloat16).float()])
    bits = wide.view(torch.int32)
    half = [bits + offset for offset in (-1, 0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)]
    # Half way between subnormal float16.
    between = (torch.arange(0, 2048) + 0.5) * 2.0**-24
    tips = [between, torch.nextafter(between, torch.zeros(2048)), torch.nextafter(between, torch.ones(2048))]
    random = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, 1 << 16, dtype=np.int32))
    return torch.cat([*(one.view(torch.float32) for one in (*half, random)), *tips, *(-one for one in tips)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_the_nearest_and_made_wide_as_torch_does(dtype: torch.dtype) -> None:
    numba = pytest.importorskip("numba")
    from thinwire.compress.kernels.cpu.small_floats import FORMATS, nearest_bits, widen_at
    from thinwire.simd import memory

    @numba.njit
    def convert(values: int, rounded: int, again: int, kind: int, numel: int) -> None:
        for i in range(0, numel, 16):
            memory.store_shorts(rounded + 2 * i, nearest_bits(memory.load_floats(values + 4 * i), kind))
            memory.store_floats(again + 4 * i, widen_at(rounded + 2 * i, kind, 16))

    values = neighbours()  # which round to every value of the format
    assert values.numel() % 16 == 0
    rounded, again, wanted = torch.empty_like(values, dtype=dtype), torch.empty_like(values), values.to(dtype)
    convert(values.data_ptr(), rounded.data_ptr(), again.data_ptr(), FORMATS[dtype], values.numel())
    for found, expected, bits in ((rounded, wanted, torch.int16), (again, wanted.float(), torch.int32)):
        assert bool(((found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())).all())
