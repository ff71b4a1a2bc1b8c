"""Exact averages in fewer passes: what an exchange through a codec that casts gives, to the bit, and says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.comm import Communicator, threads
from thinwire.compress import Exchange, Flags, PacketError, make_codec
from thinwire.compress.codecs import CodecName
from thinwire.compress.light_exchanges import make_exact_exchange

BLOCK = 64


def vector_of(rank: int, numel: int, step: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + step))


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("ranks", "numel"), [(1, 0), (1, 1001), (2, 5), (2, 600_001), (3, 640), (3, 0), (5, 1001), (5, 2)]
)
def test_the_bits_of_an_exchange(ranks: int, numel: int, codec: CodecName) -> None:
    def rank(comm: Communicator) -> None:
        exact = make_exact_exchange(comm, numel, make_codec(codec, BLOCK), bucket=3)
        plain = Exchange(comm, numel, make_codec(codec, BLOCK), bucket=3, error_feedback=False)
        assert numel < 600_000 or len(exact.parts) > 1
        assert (exact.padded_numel, exact.parts) == (plain.padded_numel, plain.parts)
        for step in range(3):
            vector = vector_of(comm.rank, numel, step)
            found, wanted = exact.average(vector, step), plain.average(vector, step)
            assert torch.equal(found, wanted)
            assert torch.equal(found.signbit(), wanted.signbit())

    threads.run(rank, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_every_rank_hears_what_one_rank_says(ranks: int, bad: float) -> None:
    def rank(comm: Communicator) -> None:
        exchange = make_exact_exchange(comm, 500, make_codec("none", BLOCK), bucket=0)
        last = comm.rank == comm.size - 1
        for step, flags in enumerate((Flags.NONE, Flags.INCOMPLETE, Flags.UNPLACED)):
            exchange.payload[:500] = vector_of(comm.rank, 500, step)
            if last and step == 1:
                exchange.payload[499] = bad
            exchange.start(step, flags if last else Flags.NONE)
            assert not exchange.has_arrived
            exchange.advance()
            exchange.wait()
            outcome = exchange.outcome()
            assert outcome.finite == (step != 1)
            assert (outcome.incomplete, outcome.unplaced) == (step == 1, step == 2)
            assert exchange.has_arrived
            exchange.read(exchange.payload)
            assert not exchange.has_arrived
            assert bool(torch.isfinite(exchange.payload).all()) == outcome.finite

    threads.run(rank, ranks)


def test_an_average_can_be_adjusted_before_it_leaves() -> None:
    def rank(comm: Communicator) -> Tensor:
        exchange = make_exact_exchange(comm, 100, make_codec("none", BLOCK), bucket=0)
        exchange.payload[:100] = comm.rank + 1.0
        exchange.start(0)
        exchange.advance(lambda average, place: average.mul_(2))
        exchange.wait()
        exchange.outcome()
        output = torch.empty_like(exchange.payload)
        exchange.read(output)
        return output[:100]

    for ranks in (1, 3):
        for output in threads.run(rank, ranks):
            assert torch.equal(output, torch.full((100,), 1.0 + ranks))


def test_ranks_that_lost_step_are_told() -> None:
    def rank(comm: Communicator) -> None:
        exchange = make_exact_exchange(comm, 100, make_codec("none", BLOCK), bucket=0)
        exchange.start(comm.rank)
        exchange.advance()
        exchange.wait()
        with pytest.raises(PacketError, match="of step"):
            exchange.outcome()

    threads.run(rank, 2)
