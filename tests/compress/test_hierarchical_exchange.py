"""The exchange over nodes of several ranks: the same average, the same bits on every rank, and fewer bytes between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire
from thinwire.comm import Communicator, threads
from thinwire.comm.agreement import NodeGroups, NodeLinks, agree_on_nodes
from thinwire.compress import make_codec
from thinwire.compress.exchange import Exchange
from thinwire.compress.hierarchical_exchange import HierarchicalExchange
from thinwire.compress.packet import Flags, PacketError

CLUSTERS = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1], [0, 1, 1], [0, 0, 0], [0, 1, 2], [1, 1, 0, 0, 2, 2, 2], [0]]


def vectors(size: int, numel: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(size)]


def run(node_of: list[int], body: Any) -> list[Any]:
    def on_rank(comm: Communicator) -> Any:
        return body(comm, NodeLinks(comm, NodeGroups.of(node_of)))

    return threads.run(on_rank, len(node_of))


@settings(deadline=None, max_examples=20)
@given(
    node_of=st.sampled_from(CLUSTERS),
    numel=st.integers(0, 3000),
    codec=st.sampled_from(["none", "bf16", "int8"]),
    seed=st.integers(0, 2**31),
)
def test_the_average_over_ranks(node_of: list[int], numel: int, codec: str, seed: int) -> None:
    mine = vectors(len(node_of), numel, seed)

    def body(comm: Communicator, links: NodeLinks) -> Tensor:
        return HierarchicalExchange(links, numel, make_codec(codec, 64)).average(mine[comm.rank])

    averages = run(node_of, body)
    wanted = torch.stack(mine).double().mean(dim=0)
    for average in averages:
        assert torch.equal(average, averages[0])
    loss = {"none": 1e-6, "bf16": 2e-2, "int8": 8e-2}[codec]
    torch.testing.assert_close(averages[0].double(), wanted, rtol=0, atol=loss * max(1.0, len(node_of)))


@pytest.mark.parametrize("node_of", CLUSTERS)
@pytest.mark.parametrize("codec", ["sign1", "int8"])
def test_error_feedback_makes_up_for_what_was_lost(node_of: list[int], codec: str) -> None:
    numel, steps = 700, 60
    size = len(node_of)
    mine = [vectors(size, numel, step) for step in range(steps)]

    def body(comm: Communicator, links: NodeLinks) -> Tensor:
        exchange = HierarchicalExchange(links, numel, make_codec(codec, 64))
        return sum(exchange.average(vectors[comm.rank], step) for step, vectors in enumerate(mine))

    totals = run(node_of, body)
    wanted = torch.stack([torch.stack(one).mean(dim=0) for one in mine]).sum(dim=0)
    for total in totals:
        assert torch.equal(total, totals[0])
    # What is missing is in the residuals, which do not grow with the steps.
    assert float((totals[0] - wanted).abs().mean()) < 0.15 * steps**0.5


@pytest.mark.parametrize("node_of", [[0, 1, 2], [0, 1]])
def test_nodes_of_one_rank_exchange_as_ranks_do(node_of: list[int]) -> None:
    numel = 500
    mine = [vectors(len(node_of), numel, step) for step in range(5)]

    def body(comm: Communicator, links: NodeLinks) -> tuple[Tensor, Tensor]:
        kinds = (
            HierarchicalExchange(links, numel, make_codec("sign1", 64)),
            Exchange(comm, numel, make_codec("sign1", 64)),
        )
        by_node, flat = ([one.average(v[comm.rank], step).clone() for step, v in enumerate(mine)] for one in kinds)
        return torch.stack(by_node), torch.stack(flat)

    for by_node, flat in run(node_of, body):
        assert torch.equal(by_node, flat)


def test_two_nodes_of_two_send_half_of_what_four_ranks_do() -> None:
    numel = 1 << 18

    def body(comm: Communicator, links: NodeLinks) -> tuple[float, float]:
        vector = torch.randn(numel)
        HierarchicalExchange(links, numel, make_codec("sign1")).average(vector)
        before = comm.traffic.bytes_sent
        Exchange(comm, numel, make_codec("sign1")).average(vector)
        flat = (comm.traffic.bytes_sent - before) * links.groups.part_between(comm.rank)
        return links.bytes_between, flat

    sent = run([0, 0, 1, 1], body)
    assert sum(by_node for by_node, _ in sent) / sum(flat for _, flat in sent) <= 0.51


@pytest.mark.parametrize("bad", [0, 1, 2, 3, 4])
def test_what_is_not_finite_on_one_rank_is_known_on_all(bad: int) -> None:
    def body(comm: Communicator, links: NodeLinks) -> tuple[bool, bool]:
        exchange = HierarchicalExchange(links, 300, make_codec("sign1", 64))
        before = exchange.worker_residual.clone()
        vector = torch.randn(300)
        if comm.rank == bad:
            vector[7] = float("nan")
        exchange.payload[:300].copy_(vector)
        exchange.start(0)
        exchange.advance()
        exchange.wait()
        outcome = exchange.outcome()
        return outcome.finite, torch.equal(exchange.worker_residual, before)

    assert run([0, 0, 0, 1, 1], body) == [(False, True)] * 5


@pytest.mark.parametrize("odd", [0, 1, 2, 3, 4])
def test_flags_and_lost_steps_are_known_on_every_rank(odd: int) -> None:
    def body(comm: Communicator, links: NodeLinks) -> tuple[bool, str]:
        exchange = HierarchicalExchange(links, 300, make_codec("sign1", 64))
        for step in (3, 9 if comm.rank == odd else 4):
            flags = Flags.INCOMPLETE if comm.rank == odd else Flags.NONE
            exchange.start(step, flags)
            exchange.advance()
            exchange.wait()
            if step == 3:
                incomplete = exchange.outcome().incomplete
        try:
            exchange.outcome()
        except PacketError as error:
            return incomplete, str(error)
        return incomplete, "no error"

    for incomplete, message in run([0, 0, 0, 1, 1], body):
        assert incomplete
        assert "lost step" in message


def train(
    node_of: list[int] | str, comm: Communicator, kind: str, steps: int = 30, **options: Any
) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(comm.rank)
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, numel).clone()) for numel in (300, 41, 170)]
    optimizer_class = getattr(thinwire, kind)
    optimizer = optimizer_class(
        weights, lr=0.02, freeze_step=10, comm=comm, bucket_bytes=1000, block_size=64, nodes=node_of, **options
    )
    step_all(optimizer, weights, generator, steps)
    return optimizer, torch.cat([w.detach() for w in weights])


def step_all(optimizer: Any, weights: list[Tensor], generator: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum((w - 0.5 + 0.1 * torch.randn(w.shape, generator=generator)).square().sum() for w in weights)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
@pytest.mark.parametrize("node_of", [[0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1]])
def test_optimizers_learn_the_same_over_nodes(kind: str, node_of: list[int]) -> None:
    def body(comm: Communicator) -> tuple[Tensor, int, Tensor, int]:
        by_node, weights = train(node_of, comm, kind)
        flat, flat_weights = train("flat", comm, kind)
        assert by_node.frozen
        return weights, by_node.bytes_sent_between_nodes, flat_weights, flat.bytes_sent

    (weights, _, flat_weights, _), *others = results = threads.run(body, len(node_of))
    for other, *_ in others:
        assert torch.equal(other, weights)
    start = torch.cat([torch.linspace(-1, 1, numel) for numel in (300, 41, 170)])
    assert float((weights - 0.5).norm()) < 0.8 * float((start - 0.5).norm())
    assert float((weights - flat_weights).norm()) < 0.2 * float((flat_weights - start).norm())
    assert sum(between for _, between, _, _ in results) < 0.7 * sum(everything for *_, everything in results)


def test_a_resume_over_the_same_nodes_keeps_residuals() -> None:
    def body(comm: Communicator) -> bool:
        node_of = [0, 0, 0, 1, 1]
        optimizer, _ = train(node_of, comm, "OneBitAdam", steps=20)
        state = optimizer.state_dict()
        weights = optimizer.param_groups[0]["params"]
        again = [torch.nn.Parameter(w.detach().clone()) for w in weights]
        resumed = thinwire.OneBitAdam(
            again, lr=0.02, freeze_step=10, comm=comm, bucket_bytes=1000, block_size=64, nodes=node_of
        )
        resumed.load_state_dict(state)
        step_all(optimizer, weights, torch.Generator().manual_seed(9 + comm.rank), 10)
        step_all(resumed, again, torch.Generator().manual_seed(9 + comm.rank), 10)
        return all(torch.equal(one, other) for one, other in zip(weights, again, strict=True))

    assert threads.run(body, 5) == [True] * 5


@pytest.mark.filterwarnings("ignore:this state was saved")
def test_a_resume_over_other_nodes_starts_residuals_anew() -> None:
    def body(comm: Communicator) -> bool:
        optimizer, _ = train([0, 0, 1, 1], comm, "OneBitAdam", steps=20)
        again = [torch.nn.Parameter(w.detach().clone()) for w in optimizer.param_groups[0]["params"]]
        flat = thinwire.OneBitAdam(
            again, lr=0.02, freeze_step=10, comm=comm, bucket_bytes=1000, block_size=64, nodes="flat"
        )
        flat.load_state_dict(optimizer.state_dict())
        step_all(flat, again, torch.Generator().manual_seed(comm.rank), 3)
        return all(bool(one.isfinite().all()) for one in again)

    assert threads.run(body, 4) == [True] * 4


def test_nodes_are_found_and_numbered() -> None:
    assert NodeGroups.of(["b", "a", "b", "c"]).node_of == (0, 1, 0, 2)
    assert threads.run(lambda comm: agree_on_nodes(comm).node_of, 3) == [(0, 0, 0)] * 3
    agents = ["0", "0", "1"]
    found = threads.run(
        lambda comm: agree_on_nodes(comm, None, {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": agents[comm.rank]}).node_of,
        3,
    )
    assert found == [(0, 0, 1)] * 3
    assert not NodeGroups.of([0, 0]).hierarchical
    assert not NodeGroups.of([0, 1]).hierarchical
    assert NodeGroups.of([0, 1, 1]).hierarchical


@pytest.mark.parametrize(
    ("node_of", "message"), [([0, 1, 1], "each of the 2 ranks, got 3"), (None, "group them alike")]
)
def test_bad_nodes_are_refused_on_every_rank(node_of: list[int] | None, message: str) -> None:
    def body(comm: Communicator) -> None:
        given = [0, comm.rank] if node_of is None else node_of
        with pytest.raises(ValueError, match=message):
            thinwire.OneBitAdam([torch.nn.Parameter(torch.ones(3))], comm=comm, nodes=given)

    threads.run(body, 2)
