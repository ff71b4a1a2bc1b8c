"""The compressed all-reduce: equal to the algorithm in float64, safe against overflow, exact in its bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compress.bodies import exchange_equals_the_algorithm
from tests.pairwise import each_once, pairwise
from thinwire.comm import threads
from thinwire.compress import Codec, Exchange, Flags, PacketError, make_codec
from thinwire.compress.exchange import held_coordinates, zero_held

BLOCK = 64


def random_payloads(seed: int, world_size: int, numel: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((world_size, numel)).astype(np.float32)


@pytest.mark.parametrize(("world_size", "numel"), [(1, 63), (2, 777), (3, 63), (4, 777)])
def test_equals_the_algorithm_in_float64_over_100_steps(world_size, numel) -> None:
    threads.run(lambda comm: exchange_equals_the_algorithm(comm, numel), world_size)


@pytest.mark.parametrize(
    ("codec", "world_size", "numel"),
    pairwise(["sign1", "stat2", "int4", "fp8", "int8", "bf16", "none"], [1, 2, 3, 5], [0, 1, 5, 640, 1001]),
)
def test_nothing_is_lost_outputs_and_residuals_add_up_to_the_inputs(codec, world_size, numel) -> None:
    steps = [random_payloads(7 * world_size + numel + step, world_size, numel) for step in range(20)]

    def rank(comm):
        exchange = Exchange(comm, numel, make_codec(codec, BLOCK))
        total = sum(
            (exchange.average(torch.from_numpy(p[comm.rank]), i).double() for i, p in enumerate(steps)),
            torch.zeros(numel, dtype=torch.float64),
        )
        return total, exchange.worker_residual[:numel].double(), exchange.owner_residual.double()

    results = threads.run(rank, world_size)
    inputs = torch.from_numpy(np.stack(steps).astype(np.float64)).sum(dim=0).mean(dim=0)
    worker = torch.stack([residual for _, residual, _ in results]).mean(dim=0)
    owner = torch.cat([residual for _, _, residual in results])[:numel]
    for total, _, _ in results:
        assert torch.equal(total, results[0][0])
        torch.testing.assert_close(total + worker + owner, inputs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_none_is_the_exact_mean(world_size) -> None:
    payloads = random_payloads(3, world_size, 777)

    def rank(comm):
        exchange = Exchange(comm, 777, make_codec("none", BLOCK), error_feedback=False)
        return exchange.average(torch.from_numpy(payloads[comm.rank]))

    expected = torch.from_numpy(payloads).double().mean(dim=0).float()
    for output in threads.run(rank, world_size):
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("codec", "bad"),
    each_once(["sign1", "stat2", "int4", "fp8", "int8", "bf16", "none"], [float("nan"), float("inf"), -float("inf")]),
)
def test_one_rank_overflows_every_rank_knows_and_residuals_stay(codec, bad) -> None:
    def rank(comm):
        exchange = Exchange(comm, 500, make_codec(codec, BLOCK))
        generator = torch.Generator().manual_seed(comm.rank)
        exchange.average(torch.randn(500, generator=generator))
        before = exchange.worker_residual.clone(), exchange.owner_residual.clone()
        vector = torch.randn(500, generator=generator)
        if comm.rank == 1:
            vector[499] = bad
        output = exchange.average(vector, step=1)
        unchanged = torch.equal(before[0], exchange.worker_residual) and torch.equal(before[1], exchange.owner_residual)
        after = exchange.average(torch.randn(500, generator=generator), step=2)
        return bool(torch.isfinite(output).all()), unchanged, bool(torch.isfinite(after).all())

    assert threads.run(rank, 3) == [(False, True, True)] * 3


def test_more_ranks_than_elements() -> None:
    def rank(comm):
        exchange = Exchange(comm, 2, make_codec("sign1", BLOCK))
        return exchange.average(torch.tensor([3.0, -1.0]))

    for output in threads.run(rank, 5):
        assert torch.equal(output, torch.tensor([2.0, -2.0]))


@pytest.mark.parametrize(("numel", "parts"), [(1_000_000, 1), (1_234_567, 1), (4_194_304, 2), (12_000_001, 5)])
def test_bytes_on_the_wire_and_two_collectives_a_part(numel, parts) -> None:
    world_size = 4

    def rank(comm):
        exchange = Exchange(comm, numel, make_codec("sign1"))
        exchange.average(torch.zeros(numel))
        return comm.traffic.bytes_sent, dict(comm.traffic.calls_by_collective)

    for sent, calls in threads.run(rank, world_size):
        assert sent <= 1.03 * 2 * (world_size - 1) / world_size * numel / 8
        assert calls == {"all_to_all": parts, "all_gather": parts}


class Relabelled(Codec):
    """The codec inside, under another name: the same bytes on the wire but for the header."""

    def __init__(self, inner: Codec, identifier: int, block_size: int) -> None:
        self.inner, self.identifier, self.block_size = inner, identifier, block_size

    def packet_bytes(self, shard):
        return self.inner.packet_bytes(shard)

    def encode(self, *arguments):
        self.inner.encode(*arguments)

    def decode(self, *arguments):
        self.inner.decode(*arguments)

    def scale(self, *arguments):
        self.inner.scale(*arguments)

    def decode_mean(self, *arguments):
        self.inner.decode_mean(*arguments)

    def all_finite(self, packets):
        return self.inner.all_finite(packets)

    def join(self, parts):
        return self.inner.join(parts)


@pytest.mark.parametrize("attribute", ["step", "bucket", "block_size", "codec"])
def test_a_packet_that_is_not_the_expected_one_is_an_error_on_every_rank(attribute) -> None:
    def rank(comm):
        odd = comm.rank == 1
        codec = Relabelled(
            make_codec("sign1", 64),
            identifier=2 if odd and attribute == "codec" else 1,
            block_size=128 if odd and attribute == "block_size" else 64,
        )
        exchange = Exchange(comm, 3 * 128, codec, bucket=9 if odd and attribute == "bucket" else 0)
        exchange.start(step=9 if odd and attribute == "step" else 4)
        exchange.advance()
        exchange.wait()
        with pytest.raises(PacketError, match=f"of {attribute} .* was expected"):
            exchange.outcome()

    threads.run(rank, 3)


def test_packets_of_one_size_and_another_codec_are_an_error_on_every_rank() -> None:
    def rank(comm):
        exchange = Exchange(comm, 500, make_codec("fp8" if comm.rank else "int8", BLOCK))
        with pytest.raises(PacketError, match=r"of codec (2|8) where codec (8|2) was expected"):
            exchange.average(torch.ones(500))

    threads.run(rank, 2)


def test_a_missing_gradient_is_told_to_every_rank() -> None:
    def rank(comm):
        exchange = Exchange(comm, 10, make_codec("sign1", BLOCK))
        exchange.start(0, Flags.INCOMPLETE if comm.rank == 2 else Flags.NONE)
        exchange.advance()
        exchange.wait()
        return exchange.outcome().incomplete

    assert threads.run(rank, 3) == [True] * 3


@pytest.mark.parametrize("part", [0.0, 0.001, 1 / 16, 0.5, 1.0])
@pytest.mark.parametrize("numel", [0, 1, 1000, 4099])
def test_zeros_are_where_the_mask_is(numel: int, part: float) -> None:
    mask = torch.rand(numel) < part
    held = held_coordinates(mask)
    few = 16 * int(mask.sum()) <= numel
    assert held.dtype == (torch.int64 if few else torch.bool)
    for begin, end in ((0, numel), (numel // 3, numel // 2), (numel, numel)):
        values = torch.randn(end - begin) + 5
        wanted = values.masked_fill(mask[begin:end], 0.0)
        zero_held(values, held, slice(begin, end))
        assert torch.equal(values, wanted)
