"""An exchange in parts is the exchange: the same results, residuals and flags, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire
from tests.compress.bodies import exchange_equals_the_algorithm
from tests.optim.training import make_model, train, weights
from tests.optim.zero_one.training import SCHEDULE
from tests.pairwise import each_once
from thinwire.comm import Communicator, threads
from thinwire.comm.agreement import NodeGroups, NodeLinks
from thinwire.compress import Exchange, Flags, PacketError, make_codec
from thinwire.compress.codecs import cut_shard, least_part
from thinwire.compress.exchange import held_coordinates
from thinwire.compress.hierarchical_exchange import HierarchicalExchange
from thinwire.compress.light_exchanges import LowMemoryExchange

BLOCK = 64
WHOLE = 1 << 40
CODECS = ["sign1", "stat2", "int4", "int8", "bf16", "none"]


def draws(numel: int, steps: int, seed: int, rank: int) -> list[Tensor]:
    """A rank's vectors; in the second step one of rank 0's elements is not finite."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank)
    vectors = [torch.randn(numel, generator=generator) for _ in range(steps)]
    if rank == 0 and numel:
        vectors[1][seed % numel] = float("inf")
    return vectors


def exchanged(exchange: Exchange, vectors: list[Tensor]) -> list[Tensor | None]:
    """What every step brings, and the residuals after it."""
    seen: list[Tensor | None] = []
    generator = torch.Generator().manual_seed(7)
    for step, vector in enumerate(vectors):
        seen += [exchange.average(vector, step), exchange.worker_residual, exchange.owner_residual]
        few = 0.1 if step % 2 else 0.01
        exchange.hold_zero(held_coordinates(torch.rand(exchange.padded_numel, generator=generator) < few))
    return [None if one is None else one.clone() for one in seen]


def alike(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in zip(one, other, strict=True)
    )


@settings(deadline=None, max_examples=25)
@given(
    numel=st.integers(0, 4000),
    size=st.integers(1, 5),
    part=st.integers(1, 700),
    codec=st.sampled_from(CODECS),
    error_feedback=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_parts_change_no_bit(numel: int, size: int, part: int, codec: str, error_feedback: bool, seed: int) -> None:
    def body(comm: Communicator) -> tuple[int, bool]:
        kinds = [
            Exchange(comm, numel, make_codec(codec, BLOCK), error_feedback=error_feedback, part=least)
            for least in (part, WHOLE)
        ]
        in_parts, whole = (exchanged(one, draws(numel, 4, seed, comm.rank)) for one in kinds)
        return len(kinds[0].parts), alike(in_parts, whole)

    shard = max(1, -(-numel // (size * BLOCK))) * BLOCK
    assert threads.run(body, size) == [(min(max(1, shard // part), shard // BLOCK), True)] * size


@pytest.mark.parametrize(("world_size", "part"), [(1, 64), (2, 128), (3, 64), (4, 128)])
def test_sign1_in_parts_equals_the_algorithm_in_float64(world_size: int, part: int) -> None:
    threads.run(lambda comm: exchange_equals_the_algorithm(comm, 1111, steps=60, part=part), world_size)


@settings(deadline=None, max_examples=15)
@given(
    node_of=st.sampled_from([[0, 0, 1, 1], [0, 1, 0], [0, 0, 0, 1, 1], [0, 1, 2], [0, 0]]),
    numel=st.integers(0, 4000),
    part=st.integers(1, 400),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 2**31),
)
def test_parts_change_no_bit_over_nodes(node_of: list[int], numel: int, part: int, codec: str, seed: int) -> None:
    def body(comm: Communicator) -> bool:
        links = NodeLinks(comm, NodeGroups.of(node_of))
        in_parts, whole = (
            exchanged(
                HierarchicalExchange(links, numel, make_codec(codec, BLOCK), part=least),
                draws(numel, 4, seed, comm.rank),
            )
            for least in (part, WHOLE)
        )
        return alike(in_parts, whole)

    assert threads.run(body, len(node_of)) == [True] * len(node_of)


@settings(deadline=None, max_examples=20)
@given(
    numel=st.integers(0, 4000),
    size=st.integers(1, 4),
    part=st.integers(1, 700),
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    reversible=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_packets_of_parts_are_joined_to_those_of_the_whole(
    numel: int, size: int, part: int, codec: str, dtype: torch.dtype, reversible: bool, seed: int
) -> None:
    def steps(exchange: LowMemoryExchange, vectors: list[Tensor]) -> list[Tensor | None]:
        seen: list[Tensor | None] = []
        for step, vector in enumerate(vectors):
            exchange.payload[:numel].copy_(vector)
            exchange.start(step)
            exchange.advance(lambda average, place: average.mul_(torch.arange(place.start, place.stop) % 5))
            exchange.wait()
            if not exchange.outcome().finite:
                exchange.take_packets()
                exchange.revert()
            else:
                seen.append(exchange.take_packets())
                exchange.commit()
            seen += [exchange.worker_residual.clone(), exchange.owner_residual]
        return seen

    def body(comm: Communicator) -> bool:
        in_parts, whole = (
            steps(
                LowMemoryExchange(
                    comm,
                    numel,
                    make_codec(codec, BLOCK),
                    bucket=3,
                    device=torch.device("cpu"),
                    residual_dtype=dtype,
                    reversible=reversible,
                    part=least,
                ),
                draws(numel, 4, seed, comm.rank),
            )
            for least in (part, WHOLE)
        )
        return alike(in_parts, whole)

    assert threads.run(body, size) == [True] * size


def test_every_part_has_left_before_the_first_is_waited_for() -> None:
    def body(comm: Communicator) -> None:
        exchange = Exchange(comm, 10 * BLOCK * comm.size, make_codec("sign1", BLOCK), part=2 * BLOCK)
        exchange.start(0)
        assert dict(comm.traffic.calls_by_collective) == {"all_to_all": 5}
        exchange.advance()
        assert dict(comm.traffic.calls_by_collective) == {"all_to_all": 5, "all_gather": 5}
        exchange.wait()
        assert exchange.outcome().finite

    threads.run(body, 3)


@pytest.mark.parametrize("bad", [0, 333, 999])
def test_what_is_not_finite_in_one_part_is_known_on_every_rank(bad: int) -> None:
    def body(comm: Communicator) -> tuple[bool, bool, bool]:
        exchange = Exchange(comm, 1000, make_codec("sign1", BLOCK), part=BLOCK)
        exchange.payload[:1000].normal_(generator=torch.Generator().manual_seed(comm.rank))
        if comm.rank == 1:
            exchange.payload[bad] = float("nan")
        exchange.start(0, Flags.INCOMPLETE if comm.rank == 2 else Flags.NONE)
        exchange.advance()
        exchange.wait()
        outcome = exchange.outcome()
        return outcome.finite, outcome.incomplete, bool(exchange.worker_residual.any())

    assert threads.run(body, 3) == [(False, True, False)] * 3


def test_ranks_that_cut_otherwise_are_told_on_every_rank() -> None:
    """Rank 1 sends both halves as first parts: the same bytes but for the headers, so only these can tell."""
    numel = 4 * BLOCK

    def body(comm: Communicator) -> str:
        numels = [numel, numel] if comm.rank == 1 else [2 * numel]
        part = WHOLE if comm.rank == 1 else numel // comm.size
        exchanges = [Exchange(comm, one, make_codec("sign1", BLOCK), part=part) for one in numels]
        for exchange in exchanges:
            exchange.start(4)
        for exchange in exchanges:
            exchange.advance()
        for exchange in exchanges:
            exchange.wait()
        with pytest.raises(PacketError) as caught:
            [exchange.outcome() for exchange in exchanges]
        return str(caught.value)

    messages = threads.run(body, 4)
    for rank, message in enumerate(messages):
        expected = "rank 0 sent a packet of part 1 where part 0" if rank == 1 else "rank 1 sent a packet of part 0"
        assert message.startswith(expected)


@given(blocks=st.integers(1, 500), block_size=st.sampled_from([64, 2048]), least=st.integers(1, 100_000))
def test_a_shard_is_cut_into_equal_parts_no_smaller_than_asked(blocks: int, block_size: int, least: int) -> None:
    shard = blocks * block_size
    parts = cut_shard(shard, block_size, least)
    assert [parts[0].start, *(part.stop for part in parts)] == [*(part.start for part in parts), shard]
    numels = [part.stop - part.start for part in parts]
    assert all(numel > 0 and numel % block_size == 0 for numel in numels)
    assert max(numels) - min(numels) <= block_size
    if len(parts) > 1:
        assert shard / len(parts) >= min(least, block_size)
    assert shard / (len(parts) + 1) < max(least, block_size)


@pytest.mark.parametrize(("codec", "kib"), [("sign1", 64), ("int8", 128), ("bf16", 256), ("none", 512)])
def test_the_smallest_part_is_a_message_of_some_size(codec: str, kib: int) -> None:
    one = make_codec(codec)
    least = least_part(one, "gloo")
    assert least % one.block_size == 0
    assert kib << 10 <= one.packet_bytes(least) < 1.03 * (kib << 10)
    assert len(cut_shard(1 << 30, one.block_size, least_part(one, "nccl"))) == 1


OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 10},
    "OneBitLamb": {"freeze_step": 10},
    "ZeroOneAdam": SCHEDULE,
    "OneBitLion": {},
}


def make(kind: str, model: torch.nn.Module, comm: Communicator, **options: Any) -> Any:
    options = {"lr": 3e-3, "block_size": BLOCK} | OWN_OPTIONS[kind] | options
    return getattr(thinwire, kind)(model.named_parameters(), comm=comm, **options)


def cut_finely(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr("thinwire.compress.exchange.least_part", lambda codec, backend: least)


def trained(kind: str, size: int, **options: Any) -> tuple[Tensor, int]:
    def body(comm: Communicator) -> tuple[Tensor, int]:
        model = make_model()
        optimizer = make(kind, model, comm, **options)
        train(model, optimizer, range(40))
        return weights(model), optimizer.bytes_sent

    results = threads.run(body, size)
    return results[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"stage": stage}) for kind in OWN_OPTIONS for stage in (0, 1)),
        ("OneBitAdam", {"stage": 1, "max_norm": 0.5}),
    ],
)
def test_training_in_parts_changes_no_bit(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, whole_bytes = trained(kind, 3, **options)
    cut_finely(monkeypatch, BLOCK)
    in_parts, bytes_in_parts = trained(kind, 3, **options)
    assert torch.equal(whole, in_parts)
    assert bytes_in_parts > whole_bytes  # by the headers of the parts


@pytest.mark.parametrize(("kind", "nodes"), each_once(list(OWN_OPTIONS), ["flat", [0, 0, 1]]))
def test_a_checkpoint_goes_on_with_parts_of_another_size(
    kind: str, nodes: str | list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(comm: Communicator) -> bool:
        model = make_model()
        optimizer = make(kind, model, comm, nodes=nodes)
        train(model, optimizer, range(33))
        at_save, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
        comm.barrier()
        if comm.rank == 0:
            cut_finely(monkeypatch, BLOCK)
        comm.barrier()
        again = make_model(seed=5)
        again.load_state_dict(at_save)
        resumed = make(kind, again, comm, nodes=nodes)
        resumed.load_state_dict(state)
        train(again, resumed, range(33, 50))
        train(model, optimizer, range(33, 50))
        return torch.equal(weights(model), weights(again))

    assert threads.run(body, 3) == [True] * 3
