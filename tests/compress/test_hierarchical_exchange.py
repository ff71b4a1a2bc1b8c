"""The exchange over nodes of several ranks: the same average, the same bits on every rank, and fewer bytes between."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire
from tests.compress.test_exchange import both_legs
from tests.launching import on_threads
from tests.optim.subject import BY_NODE, Subject
from tests.optim.training import make_model, through_a_file, train, weights
from tests.zero.saved import join, save
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
        return both_legs(exchange, vector).finite, torch.equal(exchange.worker_residual, before)

    assert run([0, 0, 0, 1, 1], body) == [(False, True)] * 5


@pytest.mark.parametrize("odd", [0, 1, 2, 3, 4])
def test_flags_and_lost_steps_are_known_on_every_rank(odd: int) -> None:
    def body(comm: Communicator, links: NodeLinks) -> None:
        exchange = HierarchicalExchange(links, 300, make_codec("sign1", 64))
        flags = Flags.INCOMPLETE if comm.rank == odd else Flags.NONE
        assert both_legs(exchange, torch.ones(300), 3, flags).incomplete
        with pytest.raises(PacketError, match="lost step"):
            both_legs(exchange, torch.ones(300), 9 if comm.rank == odd else 4, flags)

    run([0, 0, 0, 1, 1], body)


@pytest.mark.filterwarnings("ignore:this state was saved")
@pytest.mark.parametrize("moment", [4, 19])
@pytest.mark.parametrize("subject", [Subject("OneBitAdam", 0, nodes=(0, 0, 0, 1, 1)), *BY_NODE], ids=str)
def test_a_resume_over_the_same_nodes_keeps_residuals_and_over_others_starts_them_anew(
    subject: Subject, moment: int
) -> None:
    def first(comm: Communicator) -> tuple[Any, ...]:
        model, optimizer = subject.on_model(comm, moment)
        state, parts = through_a_file([model.state_dict(), optimizer.state_dict()]), save(comm, optimizer)
        train(model, optimizer, range(moment, moment + 10))
        optimizer.synchronize_weights()
        return state, parts, weights(model)

    found = threads.run(first, len(subject.nodes))
    checkpoint = join([parts for _, parts, _ in found])

    def second(comm: Communicator, nodes: Any, from_file: bool) -> Tensor:
        model = make_model(seed=3)
        optimizer = subject.build(model, comm, nodes=nodes)
        if from_file:
            optimizer.load(checkpoint)
        else:
            for one, state in zip((model, optimizer), found[comm.rank][0], strict=True):
                one.load_state_dict(state)
        assert optimizer.steps == moment
        if nodes is not subject.nodes:
            assert not any(one.any() for key, one in optimizer.rank_tensors().items() if "worker_residual" in key)
            mine, _, _ = save(comm, optimizer)
            for one in mine:
                if one.kind in ("weight", "master", "exp_avg", "exp_avg_sq", "preconditioner"):
                    assert torch.equal(one.tensor, checkpoint.read(one.kind, one.name, one.start, one.tensor.numel()))
        train(model, optimizer, range(moment, moment + 10))
        optimizer.synchronize_weights()
        return weights(model)

    for from_file in (True, False):
        again = threads.run(lambda comm, f=from_file: second(comm, subject.nodes, f), len(subject.nodes))
        assert all(torch.equal(mine, kept) for mine, (_, _, kept) in zip(again, found, strict=True))
    others = (("flat", len(subject.nodes)), ([0, 1, 1, 0, 2, 2], 6), ([0, 1], 2))
    for nodes, size in others:
        again = threads.run(lambda comm, nodes=nodes: second(comm, nodes, True), size)
        assert all(torch.equal(mine, again[0]) for mine in again)
        assert bool(again[0].isfinite().all())


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
    ("stage", "node_of", "message"),
    [
        *((stage, [0, 1, 1], "each of the 4 ranks, got 3") for stage in (0, 1)),
        *((stage, None, "group them alike|is 1 against 0") for stage in (0, 1)),
        *((stage, "none", "must be 'auto', 'flat' or") for stage in (0, 1)),
        (2, [0, 0, 0, 1], r"nodes have \[3, 1\] ranks, and every rank owns a shard"),
    ],
)
@on_threads(4)
def test_bad_nodes_are_refused_on_every_rank(comm: Communicator, stage: int, node_of: Any, message: str) -> None:
    given = [0, comm.rank, 2, 3] if node_of is None else node_of
    with pytest.raises(ValueError, match=message):
        thinwire.OneBitAdam([torch.nn.Parameter(torch.ones(3))], comm=comm, stage=stage, nodes=given)
