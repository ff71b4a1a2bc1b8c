"""What every kernel backend must do with a momentum kept as sign1 packets, on any device: the bits of the reference,
which itself is held against exact arithmetic.

A test class names its subjects by overriding the `subject` fixture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.kernels.body import REFERENCE, Subject, uninitialised_packets

TYPES = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 16  # elements around every tensor, so that a write beside it shows
BETA1, LOSS_SCALE = 0.9, 1536.0


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bits, or NaN on both sides."""
    integers = {4: torch.int32, 2: torch.int16}[left.element_size()]
    equal = left.view(integers) == right.view(integers)
    return bool((equal | (left.isnan() & right.isnan())).all())


def spread_floats(numel: int, dtype: torch.dtype) -> Tensor:
    """Values over the whole range of `dtype`, subnormals, infinities and NaN among them."""
    bits = torch.randint(-(2**15), 2**15, (numel,)) << (16 if dtype == torch.float32 else 0)
    if dtype == torch.float32:
        return (bits + torch.randint(2**16, (numel,))).to(torch.int32).view(dtype)
    return bits.to(torch.int16).view(dtype)


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

    def payload(self, subject: Subject, gradient: Tensor | None, loss_scale: float = LOSS_SCALE) -> Tensor:
        guarded = torch.full((self.numel + 2 * GUARD,), 7.0, device=self.packets.device)
        payload = guarded[GUARD : GUARD + self.numel]
        place = (self.first, self.shard, self.block_size)
        subject.backend.momentum_payload(
            self.packets, gradient, self.codes, self.table, payload, *place, BETA1, loss_scale
        )
        assert (guarded[:GUARD] == 7).all()
        assert (guarded[GUARD + self.numel :] == 7).all()
        return payload

    def apply(self, subject: Subject, weights: Tensor, lr: float, decay: float, seed: int, offset: int = 0) -> Tensor:
        """New weights, which lie `offset` elements off the alignment of an allocation."""
        guarded = torch.full((self.numel + 2 * GUARD,), 7.0, dtype=weights.dtype, device=weights.device)
        moved = guarded[GUARD + offset : GUARD + offset + self.numel].copy_(weights)
        place = (self.first, self.shard, self.block_size)
        subject.backend.apply_signs(moved, self.packets, self.codes, *place, lr, decay, seed)
        assert (guarded[: GUARD + offset] == 7).all()
        assert (guarded[GUARD + offset + self.numel :] == 7).all()
        return moved


def make_momentum(
    subject: Subject, rows: int, shard: int, block_size: int, first: int, numel: int, offset: int = 0
) -> Momentum:
    packets = uninitialised_packets("sign1", rows, shard, block_size, "cpu")
    blocks = shard // block_size
    scales = 10 ** (4 * torch.rand(rows, blocks) - 3)
    packets[:, 16 : 16 + 4 * blocks] = scales.view(rows, blocks).view(torch.uint8).view(rows, -1)
    codes = torch.randint(0, 256, (offset + numel,), dtype=torch.uint8)
    codes[torch.rand(offset + numel) < 0.1] = 0
    table = 10 ** (6 * torch.rand(256) - 1)
    device = subject.device
    return Momentum(packets.to(device), codes.to(device)[offset:], table.to(device), first, shard, block_size)


def draw_momentum(subject: Subject, data: st.DataObject) -> Momentum:
    block_size = data.draw(st.sampled_from(subject.block_sizes), "block_size")
    rows = data.draw(st.integers(1, 4), "rows")
    shard = block_size * data.draw(st.integers(0, 3), "blocks")
    first = data.draw(st.integers(0, rows * shard), "first")
    numel = data.draw(st.integers(0, rows * shard - first), "numel")
    torch.manual_seed(data.draw(st.integers(0, 2**31), "random"))
    return make_momentum(subject, rows, shard, block_size, first, numel, data.draw(st.integers(0, 4), "offset"))


class MomentumBody:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_payload_has_the_bits_of_the_reference(self, subject: Subject, data: st.DataObject) -> None:
        momentum = draw_momentum(subject, data)
        dtype = data.draw(st.sampled_from((None, *TYPES)), "dtype")
        gradient = None
        if dtype is not None:
            offset = data.draw(st.integers(0, 4), "gradient offset")
            gradient = spread_floats(offset + momentum.numel, dtype).to(subject.device)[offset:]
        loss_scale = data.draw(st.floats(1e-3, 1e6), "loss_scale")
        wanted = momentum.payload(Subject("reference", REFERENCE), gradient, loss_scale)
        assert same_bits(momentum.payload(subject, gradient, loss_scale), wanted)

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_payload_is_the_formula(self, subject: Subject, dtype: torch.dtype) -> None:
        momentum = make_momentum(subject, 3, 384, 64, first=131, numel=777)
        gradient = (LOSS_SCALE * torch.randn(777)).to(dtype).to(subject.device)
        preconditioner = torch.where(momentum.codes > 0, momentum.table[momentum.codes.long()], 0.0).double()
        kept = BETA1 * torch.where(momentum.codes > 0, momentum.values(), 0.0)
        change = (1 - BETA1) * gradient.double() / LOSS_SCALE * preconditioner
        error = momentum.payload(subject, gradient).double() - (kept + change)
        assert (error.abs() <= 4e-7 * (kept.abs() + change.abs())).all()
        torch.testing.assert_close(momentum.payload(subject, None).double(), kept, rtol=2e-7, atol=0)

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_non_finite_gradient_shows_even_where_nothing_moves(
        self, subject: Subject, dtype: torch.dtype, bad: float
    ) -> None:
        momentum = make_momentum(subject, 1, 192, 64, first=3, numel=181)
        momentum.codes[50] = 0
        momentum.codes[100] = 9
        gradient = torch.randn(181).to(dtype).to(subject.device)
        gradient[[50, 100]] = bad
        payload = momentum.payload(subject, gradient)
        assert payload[50].isnan()
        assert not payload[100].isfinite()
        payload[[50, 100]] = 0
        assert payload.isfinite().all()

    def test_what_stays_still_is_plus_zero_whatever_scale_and_table_say(self, subject: Subject) -> None:
        momentum = make_momentum(subject, 1, 64, 64, first=0, numel=64)
        momentum.packets[:, 16:20] = torch.tensor([math.nan], device=subject.device).view(torch.uint8)
        momentum.table[0] = math.nan
        momentum.codes.zero_()
        payload = momentum.payload(subject, torch.full((64,), -1.0, device=subject.device))
        assert (payload.view(torch.int32) == 0).all()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_weights_have_the_bits_of_the_reference(self, subject: Subject, data: st.DataObject) -> None:
        momentum = draw_momentum(subject, data)
        dtype = data.draw(st.sampled_from(TYPES), "dtype")
        weights = spread_floats(momentum.numel, dtype)
        if data.draw(st.booleans(), "ordinary"):
            weights = torch.randn(momentum.numel).to(dtype)
        lr = data.draw(st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 1e34]), "lr")
        decay = data.draw(st.sampled_from([1.0, 0.9997, 1.0007, 0.0, -0.3]), "decay")
        seed = data.draw(st.integers(-(2**63), 2**63 - 1), "seed")
        offset = data.draw(st.integers(0, 4), "weights offset")
        arguments = (weights.to(subject.device), lr, decay, seed, offset)
        wanted = momentum.apply(Subject("reference", REFERENCE), *arguments)
        assert same_bits(momentum.apply(subject, *arguments), wanted)

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_weights_follow_the_formula_to_one_of_two_neighbours(self, subject: Subject, dtype: torch.dtype) -> None:
        momentum = make_momentum(subject, 2, 640, 64, first=37, numel=1201)
        weights = (torch.randn(1201) * 10 ** (-6 * torch.rand(1201))).to(dtype).to(subject.device)
        moved = momentum.apply(subject, weights, lr=1e-4, decay=0.99, seed=5).double()
        exact = 0.99 * weights.double() - 1e-4 * torch.where(momentum.codes > 0, momentum.values(), 0.0)
        spacing = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal).log2().floor().exp2()
        spacing *= torch.finfo(dtype).eps
        slack = 3e-7 * (weights.double().abs() + exact.abs()) + 2.0**-37
        assert ((moved - exact).abs() <= spacing + slack).all()

    @pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
    def test_what_is_representable_stays_and_what_is_not_finite_too(self, subject: Subject, dtype: torch.dtype) -> None:
        """Every value of the format, with nothing to add."""
        weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(subject.device)
        momentum = make_momentum(subject, 1, 2**16, 2048, first=0, numel=2**16)
        momentum.codes.zero_()
        assert same_bits(momentum.apply(subject, weights, lr=1.0, decay=1.0, seed=1), weights)

    @pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
    def test_beyond_the_largest_value_is_rounded_to_it_or_to_infinity(
        self, subject: Subject, dtype: torch.dtype
    ) -> None:
        largest = torch.finfo(dtype).max
        momentum = make_momentum(subject, 1, 2048, 64, first=0, numel=2048)
        momentum.codes.zero_()
        weights = torch.full((2048,), -largest, dtype=dtype, device=subject.device)
        step_up = 1 + torch.finfo(dtype).eps / 4  # half of the way to where the next value would be
        moved = momentum.apply(subject, weights, lr=1.0, decay=step_up, seed=8)
        assert 800 < (moved == -math.inf).sum() < 1248
        assert ((moved == -math.inf) | (moved == -largest)).all()
        assert (momentum.apply(subject, weights, lr=1.0, decay=1.01, seed=8) == -math.inf).all()

    def test_the_noise_belongs_to_the_element_not_to_the_call(self, subject: Subject) -> None:
        whole = make_momentum(subject, 2, 640, 64, first=0, numel=1280)
        weights = torch.randn(1280).bfloat16().to(subject.device)
        wanted = whole.apply(subject, weights, 1e-3, 1.0, seed=77)
        for first, last in ((0, 1), (1, 30), (30, 641), (641, 1279), (1279, 1280), (1280, 1280)):
            part = Momentum(whole.packets, whole.codes[first:last], whole.table, first, 640, 64)
            assert torch.equal(part.apply(subject, weights[first:last], 1e-3, 1.0, seed=77), wanted[first:last])
        assert not torch.equal(whole.apply(subject, weights, 1e-3, 1.0, seed=78), wanted)
