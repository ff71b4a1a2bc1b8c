"""Moves of weights by a momentum kept as sign1 packets, on every backend: the bits of the specification, which itself
is held against exact arithmetic. A test class names its subjects by overriding the `subject` fixture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.kernels.body import REFERENCE, uninitialised_packets
from thinwire.compress.kernels import bucket_reference
from thinwire.compress.kernels.bucket_reference import packed_payload
from thinwire.compress.kernels.buckets import MovePacked, PackedState, Segments

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

    def state(self) -> PackedState:
        """Of the whole bucket; codes that are not given are 0."""
        rows = self.packets.size(0)
        codes = torch.zeros(rows * self.shard, dtype=torch.uint8, device=self.packets.device)
        codes[self.first : self.first + self.numel] = self.codes
        return PackedState(self.packets, codes, self.shard, rows * self.shard, self.block_size)

    def payload(self, gradient: Tensor | None, divisor: float = LOSS_SCALE) -> Tensor:
        """What the specification makes of it, before it is encoded."""
        place = slice(self.first, self.first + self.numel)
        return packed_payload(self.state(), place, gradient, self.table, BETA1, divisor)

    def apply(self, backend: Any, weights: Tensor, lr: float, decay: float, seed: int, offset: int = 0) -> Tensor:
        """New weights, which lie `offset` elements off the alignment of an allocation."""
        guarded = torch.full((self.numel + 2 * GUARD,), 7.0, dtype=weights.dtype, device=weights.device)
        moved = guarded[GUARD + offset : GUARD + offset + self.numel].copy_(weights)
        state = self.state()
        segments = Segments([(0, state.numel)])
        call = MovePacked(state, segments, moved, self.first, [True], [lr], [decay], seed)
        call.check()
        backend.move_packed(call)
        assert (guarded[: GUARD + offset] == 7).all()
        assert (guarded[GUARD + offset + self.numel :] == 7).all()
        return moved


def make_momentum(
    rows: int, shard: int, block_size: int, first: int, numel: int, offset: int = 0, device: str = "cpu"
) -> Momentum:
    packets = uninitialised_packets("sign1", rows, shard, block_size, "cpu")
    blocks = shard // block_size
    scales = 10 ** (4 * torch.rand(rows, blocks) - 3)
    packets[:, 16 : 16 + 4 * blocks] = scales.view(rows, blocks).view(torch.uint8).view(rows, -1)
    codes = torch.randint(0, 256, (offset + numel,), dtype=torch.uint8)
    codes[torch.rand(offset + numel) < 0.1] = 0
    table = 10 ** (6 * torch.rand(256) - 1)
    return Momentum(packets.to(device), codes.to(device)[offset:], table.to(device), first, shard, block_size)


def draw_momentum(data: st.DataObject, device: str) -> Momentum:
    block_size = data.draw(st.sampled_from((64, 192, 1024)), "block_size")
    rows = data.draw(st.integers(1, 4), "rows")
    shard = block_size * data.draw(st.integers(0, 3), "blocks")
    first = data.draw(st.integers(0, rows * shard), "first")
    numel = data.draw(st.integers(0, rows * shard - first), "numel")
    torch.manual_seed(data.draw(st.integers(0, 2**31), "random"))
    return make_momentum(rows, shard, block_size, first, numel, data.draw(st.integers(0, 4), "offset"), device)


class MovesBody:
    """`subject`: a backend, and the device that it serves."""

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_weights_have_the_bits_of_the_reference(self, subject: tuple[Any, str], data: st.DataObject) -> None:
        momentum = draw_momentum(data, subject[1])
        dtype = data.draw(st.sampled_from(TYPES), "dtype")
        weights = spread_floats(momentum.numel, dtype)
        if data.draw(st.booleans(), "ordinary"):
            weights = torch.randn(momentum.numel).to(dtype)
        lr = data.draw(st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 1e34]), "lr")
        decay = data.draw(st.sampled_from([1.0, 0.9997, 1.0007, 0.0, -0.3]), "decay")
        seed = data.draw(st.integers(-(2**63), 2**63 - 1), "seed")
        offset = data.draw(st.integers(0, 4), "weights offset")
        arguments = (weights.to(subject[1]), lr, decay, seed, offset)
        wanted = momentum.apply(bucket_reference, *arguments)
        assert same_bits(momentum.apply(subject[0], *arguments), wanted)

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_weights_follow_the_formula_to_one_of_two_neighbours(
        self, subject: tuple[Any, str], dtype: torch.dtype
    ) -> None:
        momentum = make_momentum(2, 640, 64, first=37, numel=1201, device=subject[1])
        weights = (torch.randn(1201) * 10 ** (-6 * torch.rand(1201))).to(dtype).to(subject[1])
        moved = momentum.apply(subject[0], weights, lr=1e-4, decay=0.99, seed=5).double()
        exact = 0.99 * weights.double() - 1e-4 * torch.where(momentum.codes > 0, momentum.values(), 0.0)
        spacing = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal).log2().floor().exp2()
        spacing *= torch.finfo(dtype).eps
        slack = 3e-7 * (weights.double().abs() + exact.abs()) + 2.0**-37
        assert ((moved - exact).abs() <= spacing + slack).all()

    @pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
    def test_what_is_representable_stays_and_what_is_not_finite_too(
        self, subject: tuple[Any, str], dtype: torch.dtype
    ) -> None:
        """Every value of the format, with nothing to add."""
        weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(subject[1])
        momentum = make_momentum(1, 2**16, 2048, first=0, numel=2**16, device=subject[1])
        momentum.codes.zero_()
        assert same_bits(momentum.apply(subject[0], weights, lr=1.0, decay=1.0, seed=1), weights)

    @pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
    def test_beyond_the_largest_value_is_rounded_to_it_or_to_infinity(
        self, subject: tuple[Any, str], dtype: torch.dtype
    ) -> None:
        largest = torch.finfo(dtype).max
        momentum = make_momentum(1, 2048, 64, first=0, numel=2048, device=subject[1])
        momentum.codes.zero_()
        weights = torch.full((2048,), -largest, dtype=dtype, device=subject[1])
        step_up = 1 + torch.finfo(dtype).eps / 4  # half of the way to where the next value would be
        moved = momentum.apply(subject[0], weights, lr=1.0, decay=step_up, seed=8)
        assert 800 < (moved == -math.inf).sum() < 1248
        assert ((moved == -math.inf) | (moved == -largest)).all()
        assert (momentum.apply(subject[0], weights, lr=1.0, decay=1.01, seed=8) == -math.inf).all()

    def test_the_noise_belongs_to_the_element_not_to_the_call(self, subject: tuple[Any, str]) -> None:
        whole = make_momentum(2, 640, 64, first=0, numel=1280, device=subject[1])
        weights = torch.randn(1280).bfloat16().to(subject[1])
        wanted = whole.apply(subject[0], weights, 1e-3, 1.0, seed=77)
        for first, last in ((0, 1), (1, 30), (30, 641), (641, 1279), (1279, 1280), (1280, 1280)):
            part = Momentum(whole.packets, whole.codes[first:last], whole.table, first, 640, 64)
            assert torch.equal(part.apply(subject[0], weights[first:last], 1e-3, 1.0, seed=77), wanted[first:last])
        assert not torch.equal(whole.apply(subject[0], weights, 1e-3, 1.0, seed=78), wanted)
