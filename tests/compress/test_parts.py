"""An exchange in parts is the exchange: the same results, residuals and flags, to the last bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.launching import on_threads
from tests.optim.subject import LOCAL, SUBJECTS, Subject
from tests.optim.training import weights
from thinwire.comm import Communicator, threads
from thinwire.comm.agreement import NodeGroups, NodeLinks
from thinwire.compress import Exchange, PacketError, make_codec
from thinwire.compress.codecs import cut_shard, held_coordinates, least_part
from thinwire.compress.exchange import hold_zero
from thinwire.compress.hierarchical_exchange import HierarchicalExchange, make_exchange
from thinwire.compress.light_exchanges import ExchangeFromOwners, ExchangeToOwners

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
        hold_zero(exchange, held_coordinates(torch.rand(exchange.padded_numel, generator=generator) < few))
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


@settings(deadline=None, max_examples=40)
@given(
    node_of=st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 1, 1], [0, 1, 0, 1]]),
    data=st.data(),
    part=st.integers(1, 700),
    codec=st.sampled_from([*CODECS, "fp8"]),
    kind=st.sampled_from([Exchange, ExchangeToOwners, ExchangeFromOwners]),
    seed=st.integers(0, 2**31),
)
def test_padding_that_stays_behind_changes_no_bit(
    node_of: list[int], data: st.DataObject, part: int, codec: str, kind: type[Exchange], seed: int
) -> None:
    """Of shards that are filled unlike, some not at all; and not a byte of it travels."""
    size = len(node_of)
    filled = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    shard = max(1, *filled, 0) * BLOCK
    held = torch.cat([torch.arange(shard) < one * BLOCK for one in filled])

    def body(comm: Communicator) -> tuple[bool, int]:
        links = NodeLinks(comm, NodeGroups.of(node_of)) if 1 < len(set(node_of)) < size else None
        over = comm if links is None else links.between
        rank = comm.rank if links is None or links.lane is None else links.lane * links.num_nodes + links.node
        seen, sent = [], []
        for trims in (False, True):
            options = {"part": part, "filled": [one * BLOCK for one in filled] if trims else None}
            exchange = make_exchange(kind, comm, links, held.numel(), make_codec(codec, BLOCK), **options)
            before = over.traffic.bytes_sent
            seen.append([])
            for step, vector in enumerate(draws(held.numel(), 3, seed, comm.rank)):
                vector = torch.where(held, vector, 0.0)
                own = vector[rank * shard :][:shard]
                seen[-1] += one_way(exchange, own if kind is ExchangeFromOwners else vector, step)
            sent.append(over.traffic.bytes_sent - before)
        assert sent[1] <= sent[0]
        return alike(*seen), sent[1]

    found = threads.run(body, size)
    assert all(same for same, _ in found)
    if len(set(node_of)) == size:
        cuts = cut_shard(shard, BLOCK, part)
        in_parts = [[min(max(one * BLOCK - cut.start, 0), cut.stop - cut.start) for cut in cuts] for one in filled]
        packets = sum(make_codec(codec, BLOCK).packet_bytes(one) for of_shard in in_parts for one in of_shard)
        assert sum(sent for _, sent in found) == 3 * (2 if kind is Exchange else 1) * (size - 1) * packets


def one_way(exchange: Exchange, vector: Tensor, step: int) -> list[Tensor | None]:
    """What a step brings, and the residuals after it, whichever legs the exchange has."""
    if isinstance(exchange, ExchangeToOwners):
        exchange.payload.copy_(vector)
        exchange.start(step)
        exchange.advance()
        brought = exchange.average_of_own
    elif isinstance(exchange, ExchangeFromOwners):
        exchange.start_from_owners(vector.clone(), step)
        exchange.wait()
        brought = torch.empty_like(exchange.payload)
        exchange.read(brought)
    else:
        brought = exchange.average(vector, step)
    exchange.outcome()
    exchange.commit()
    return [
        None if one is None else one.clone() for one in (brought, exchange.worker_residual, exchange.owner_residual)
    ]


@on_threads(3)
def test_every_part_has_left_before_the_first_is_waited_for(comm: Communicator) -> None:
    exchange = Exchange(comm, 10 * BLOCK * comm.size, make_codec("sign1", BLOCK), part=2 * BLOCK)
    exchange.start(0)
    assert dict(comm.traffic.calls_by_collective) == {"all_to_all": 5}
    exchange.advance()
    assert dict(comm.traffic.calls_by_collective) == {"all_to_all": 5, "all_gather": 5}
    exchange.wait()
    assert exchange.outcome().finite


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


@pytest.mark.parametrize(("codec", "kib"), [("sign1", 128), ("int8", 512), ("bf16", 1024), ("none", 2048)])
def test_the_smallest_part_is_a_message_of_some_size(codec: str, kib: int) -> None:
    one = make_codec(codec)
    least = least_part(one, "gloo")
    assert least % one.block_size == 0
    assert kib << 10 <= one.packet_bytes(least) < 1.03 * (kib << 10)
    assert len(cut_shard(1 << 30, one.block_size, least_part(one, "nccl"))) == 1


@pytest.mark.parametrize(
    ("subject", "options"),
    [*((one, {}) for one in SUBJECTS if one.stage < 2), (Subject("OneBitAdam", 1), {"max_norm": 0.5})],
    ids=str,
)
def test_training_in_parts_changes_no_bit(
    subject: Subject, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(comm: Communicator) -> tuple[Tensor, int]:
        model, optimizer = subject.on_model(comm, LOCAL + 6, bucket_bytes=1 << 20, **options)
        return weights(model), optimizer.bytes_sent

    whole, whole_bytes = threads.run(body, 3)[0]
    monkeypatch.setattr("thinwire.compress.exchange.least_part", lambda codec, backend: BLOCK)
    in_parts, bytes_in_parts = threads.run(body, 3)[0]
    assert torch.equal(whole, in_parts)
    assert bytes_in_parts > whole_bytes  # by the headers of the parts
