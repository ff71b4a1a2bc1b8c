"""The compressed all-reduce: equal to the algorithm in float64, safe against overflow, exact in its bytes; and the
exchanges that take less memory, or fewer passes over it, with its bits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.compress.bodies import exchange_equals_the_algorithm
from tests.launching import on_threads
from tests.pairwise import each_once, pairwise
from thinwire.comm import Communicator, threads
from thinwire.compress import Exchange, Flags, PacketError, make_codec
from thinwire.compress.codecs import CodecName, held_coordinates
from thinwire.compress.exchange import Adjust, zero_held
from thinwire.compress.light_exchanges import make_exact_exchange
from thinwire.compress.packet import Outcome

BLOCK = 64
NAMES = ["sign1", "stat2", "int4", "fp8", "int8", "bf16", "none"]


def random_payloads(seed: int, world_size: int, numel: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((world_size, numel)).astype(np.float32)


def vector_of(comm: Communicator, numel: int, step: int) -> Tensor:
    return torch.from_numpy(random_payloads(step, comm.size, numel)[comm.rank])


def both_legs(
    exchange: Exchange, vector: Tensor, step: int = 0, flags: Flags = Flags.NONE, adjust: Adjust | None = None
) -> Outcome:
    exchange.payload[: vector.numel()] = vector
    exchange.start(step, flags)
    exchange.advance(adjust)
    exchange.wait()
    return exchange.outcome()


@pytest.mark.parametrize(("world_size", "numel"), [(1, 63), (2, 777), (3, 63), (4, 777)])
def test_equals_the_algorithm_in_float64_over_100_steps(world_size, numel) -> None:
    threads.run(lambda comm: exchange_equals_the_algorithm(comm, numel), world_size)


@pytest.mark.parametrize(("codec", "world_size", "numel"), pairwise(NAMES, [1, 2, 3, 5], [0, 1, 5, 640, 1001]))
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


@pytest.mark.parametrize(("codec", "bad"), each_once(NAMES, [float("nan"), float("inf"), -float("inf")]))
@on_threads(3)
def test_one_rank_overflows_every_rank_knows_and_residuals_stay(comm, codec, bad) -> None:
    exchange = Exchange(comm, 500, make_codec(codec, BLOCK))
    exchange.average(vector_of(comm, 500, 0))
    before = exchange.worker_residual.clone(), exchange.owner_residual.clone()
    vector = vector_of(comm, 500, 1)
    if comm.rank == 1:
        vector[499] = bad
    output = exchange.average(vector, step=1)
    unchanged = torch.equal(before[0], exchange.worker_residual) and torch.equal(before[1], exchange.owner_residual)
    after = exchange.average(vector_of(comm, 500, 2), step=2)
    assert (bool(torch.isfinite(output).all()), unchanged, bool(torch.isfinite(after).all())) == (False, True, True)


@pytest.mark.parametrize(("numel", "parts"), [(4_194_305, 1), (8_388_608, 2)])
def test_bytes_on_the_wire_and_two_collectives_a_part(numel, parts) -> None:
    world_size = 4

    def rank(comm):
        Exchange(comm, numel, make_codec("sign1")).average(torch.zeros(numel))
        return comm.traffic.bytes_sent, dict(comm.traffic.calls_by_collective)

    for sent, calls in threads.run(rank, world_size):
        assert sent <= 1.03 * 2 * (world_size - 1) / world_size * numel / 8
        assert calls == {"all_to_all": parts, "all_gather": parts}


@pytest.mark.parametrize("attribute", ["step", "bucket", "block_size", "codec"])
@on_threads(3)
def test_a_packet_that_is_not_the_expected_one_is_an_error_on_every_rank(comm, attribute) -> None:
    odd = comm.rank == 1
    exchange = Exchange(comm, 3 * 128, make_codec("sign1", 64), bucket=9 if odd and attribute == "bucket" else 0)
    if odd and attribute in ("block_size", "codec"):  # the same bytes on the wire but for the header
        name = "identifier" if attribute == "codec" else attribute
        setattr(exchange.codec, name, 2 * getattr(exchange.codec, name))
    with pytest.raises(PacketError, match=f"of {attribute} .* was expected"):
        both_legs(exchange, torch.zeros(384), step=9 if odd and attribute == "step" else 4)


@on_threads(3)
def test_a_missing_gradient_is_told_to_every_rank_and_padding_stays_zero(comm) -> None:
    exchange = Exchange(comm, 300, make_codec("sign1", BLOCK), part=BLOCK)
    outcome = both_legs(exchange, torch.ones(300), flags=Flags.INCOMPLETE if comm.rank == 2 else Flags.NONE)
    output = torch.full_like(exchange.payload, 7.0)
    exchange.read(output)
    assert (outcome.incomplete, bool((output[:300] == 1).all()), bool(output[300:].any())) == (True, True, False)


@on_threads(2)
def test_what_a_captured_step_depends_on_takes_turns_in_two_places(comm) -> None:
    exchange, other = (Exchange(comm, 300, make_codec("sign1", BLOCK)) for _ in range(2))
    places = []
    for step in range(6):
        places.append(exchange.places())
        vector = vector_of(comm, 300, step)
        assert torch.equal(exchange.average(vector, step), other.average(vector, step))
    assert places == places[:2] * 3
    assert all(one != two for one, two in zip(*places[:2], strict=True))


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


# Less memory, and fewer passes over it


@pytest.mark.parametrize(
    ("codec", "dtype", "reversible", "ranks", "numel"),
    pairwise(["sign1", "int8", "none"], [torch.float32, torch.bfloat16], [True, False], [1, 3], [777, 0, 300]),
)
def test_less_memory_gives_the_packets_of_an_exchange_with_its_residuals_rounded(
    codec: CodecName, dtype: torch.dtype, reversible: bool, ranks: int, numel: int
) -> None:
    def adjust(average: Tensor, place: slice) -> None:
        average.mul_(torch.arange(place.start, place.stop) % 5)

    def rank(comm: Communicator) -> None:
        made = make_codec(codec, BLOCK)
        options: dict[str, Any] = {"residual_dtype": dtype, "reversible": reversible, "keeps_payload": False}
        low = Exchange(comm, numel, made, part=2 * BLOCK, **options)
        plain = Exchange(comm, numel, made, part=2 * BLOCK)
        assert low.worker_residual is not None
        assert low.takes_encoder == (made.has_kernels and reversible and dtype == torch.float32)
        for step in range(5):
            vector = vector_of(comm, numel, step)
            if step == 2 and comm.rank == comm.size - 1:
                vector[200:201] = float("inf")
            before, owned = low.worker_residual.clone(), low.owner_residual.clone()
            outcome, other = (both_legs(one, vector, step, adjust=adjust if step % 2 else None) for one in (low, plain))
            assert outcome == other
            assert outcome.finite == (step != 2 or not numel)
            owner = comm.size // 2
            arrived = [leg.received[owner : owner + 1] for leg in low.brought]
            packets = low.take_packets()
            assert torch.equal(made.join(arrived), packets[owner : owner + 1])
            found, wanted = torch.empty(low.padded_numel), torch.empty(low.padded_numel)
            made.decode(packets, found, numel)
            plain.read(wanted)
            if outcome.finite:
                assert torch.equal(found, wanted)
                low.commit()
                plain.commit()
                assert low.worker_residual.dtype == dtype
                assert torch.equal(low.worker_residual, plain.worker_residual.to(dtype))
                assert torch.equal(low.owner_residual, plain.owner_residual)
            else:
                low.revert()
                assert torch.equal(low.worker_residual, before if reversible else torch.zeros_like(before))
                assert torch.equal(low.owner_residual, owned)
            plain.worker_residual.copy_(low.worker_residual)

    threads.run(rank, ranks)


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("ranks", "numel"), [(1, 0), (1, 1001), (2, 5), (2, 2_200_001), (3, 640), (3, 0), (5, 1001), (5, 2)]
)
@on_threads("ranks")
def test_an_exact_average_has_the_bits_of_an_exchange(
    comm: Communicator, ranks: int, numel: int, codec: CodecName
) -> None:
    exact = make_exact_exchange(comm, numel, make_codec(codec, BLOCK), bucket=3)
    plain = Exchange(comm, numel, make_codec(codec, BLOCK), bucket=3, error_feedback=False)
    assert numel < 2_000_000 or len(exact.parts) > 1
    assert (exact.padded_numel, exact.parts) == (plain.padded_numel, plain.parts)
    for step in range(3):
        vector = vector_of(comm, numel, step)
        found, wanted = exact.average(vector, step), plain.average(vector, step)
        assert torch.equal(found, wanted)
        assert torch.equal(found.signbit(), wanted.signbit())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@on_threads("ranks")
def test_beside_an_exact_average_every_rank_hears_what_one_rank_says(
    comm: Communicator, ranks: int, bad: float
) -> None:
    exchange = make_exact_exchange(comm, 500, make_codec("none", BLOCK), bucket=0)
    last = comm.rank == comm.size - 1
    for step, flags in enumerate((Flags.NONE, Flags.INCOMPLETE, Flags.UNPLACED)):
        vector = vector_of(comm, 500, step)
        if last and step == 1:
            vector[499] = bad
        assert not exchange.has_arrived
        outcome = both_legs(exchange, vector, step, flags if last else Flags.NONE)
        assert outcome == Outcome(finite=step != 1, incomplete=step == 1, unplaced=step == 2)
        assert exchange.has_arrived
        exchange.read(exchange.payload)
        assert not exchange.has_arrived
        assert bool(torch.isfinite(exchange.payload).all()) == outcome.finite
    both_legs(exchange, vector, 3)
    exchange.start(4)
    assert not exchange.has_arrived


@pytest.mark.parametrize("ranks", [1, 3])
@on_threads("ranks")
def test_an_exact_average_can_be_adjusted_before_it_leaves(comm: Communicator, ranks: int) -> None:
    exchange = make_exact_exchange(comm, 100, make_codec("none", BLOCK), bucket=0)
    both_legs(exchange, torch.full((100,), comm.rank + 1.0), adjust=lambda average, place: average.mul_(2))
    output = torch.empty_like(exchange.payload)
    exchange.read(output)
    output = output[:100]
    assert torch.equal(output, torch.full((100,), 1.0 + ranks))
