"""The exchange over nodes of several ranks: the same average, the same bits on every rank, and fewer bytes between."""

import math
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
from tests.optim.training import make_model, train, weights
from tests.pairwise import each_once
from tests.zero.saved import join, save
from thinwire.comm import Communicator, threads
from thinwire.comm.agreement import NodeGroups, NodeLinks, agree_on_nodes, link_nodes
from thinwire.compress import make_codec
from thinwire.compress.exchange import Exchange
from thinwire.compress.hierarchical_exchange import HierarchicalExchange, make_exchange
from thinwire.compress.light_exchanges import ExchangeToOwners, LeadingDirections
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


@pytest.mark.parametrize(("node_of", "codec"), each_once(CLUSTERS, ["sign1", "int8"]))
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
@pytest.mark.parametrize("moment", [4, 13])
@pytest.mark.parametrize("subject", [Subject("OneBitAdam", 0, nodes=(0, 0, 0, 1, 1)), *BY_NODE], ids=str)
def test_a_resume_over_the_same_nodes_keeps_residuals_and_over_others_starts_them_anew(
    subject: Subject, moment: int
) -> None:
    """From a checkpoint; over one kind of other nodes by turns."""

    def first(comm: Communicator) -> tuple[Any, ...]:
        model, optimizer = subject.on_model(comm, moment)
        parts = save(comm, optimizer)
        train(model, optimizer, range(moment, moment + 5))
        optimizer.synchronize_weights()
        return parts, weights(model)

    found = threads.run(first, len(subject.nodes))
    checkpoint = join([parts for parts, _ in found])

    def second(comm: Communicator, nodes: Any) -> Tensor:
        model = make_model(seed=3)
        optimizer = subject.build(model, comm, nodes=nodes)
        optimizer.load(checkpoint)
        assert optimizer.steps == moment
        if nodes is not subject.nodes:
            assert not any(one.any() for key, one in optimizer.rank_tensors().items() if "worker_residual" in key)
            mine, _, _ = save(comm, optimizer)
            for one in mine:
                if one.kind in ("weight", "master", "exp_avg", "exp_avg_sq", "preconditioner"):
                    assert torch.equal(one.tensor, checkpoint.read(one.kind, one.name, one.start, one.tensor.numel()))
        train(model, optimizer, range(moment, moment + 5))
        optimizer.synchronize_weights()
        return weights(model)

    again = threads.run(lambda comm: second(comm, subject.nodes), len(subject.nodes))
    assert all(torch.equal(mine, kept) for mine, (_, kept) in zip(again, found, strict=True))
    others = (("flat", len(subject.nodes)), ([0, 1, 1, 0, 2, 2], 6), ([0, 1], 2))
    nodes, size = others[(subject.stage + moment // 10) % 3]
    again = threads.run(lambda comm: second(comm, nodes), size)
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
        *((stage, given, "nodes must be") for stage in (0, 1) for given in (3, [0, 0.5, 1, 1], ["a"] * 4)),
        (2, [0, 0, 0, 1], r"nodes have \[3, 1\] ranks, and every rank owns a shard"),
    ],
)
@on_threads(4)
def test_bad_nodes_are_refused_on_every_rank(comm: Communicator, stage: int, node_of: Any, message: str) -> None:
    given = [0, comm.rank, 2, 3] if node_of is None else node_of
    with pytest.raises(ValueError, match=message):
        thinwire.OneBitAdam([torch.nn.Parameter(torch.ones(3))], comm=comm, stage=stage, nodes=given)


SHAPES = [(192, 160), (100, 300), (96, 12, 10), (128, 128), (12, 12), (100,), (0, 7)]
"""Two matrices of rank 2 and some noise, kernels of a convolution, zeros, one that is too small, no matrices."""


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for one in found[:2]:
        left, right = (torch.randn(size, 2, generator=generator) for size in one.shape)
        one.div_(16).add_(left @ right.T)
    found[3].zero_()
    return found


def tail(matrix: Tensor, rank: int) -> float:
    return float(torch.linalg.svdvals(matrix.double().flatten(1))[rank:].square().sum())


@pytest.mark.parametrize("node_of", [[0], [0, 1], [0, 1, 2], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize("codec", ["sign1", "stat2"])
def test_leading_directions_go_beside_the_codec_and_nothing_is_lost(node_of: list[int], codec: str) -> None:
    """What arrives and what is kept for the next step add up, in float64, to what was there; directions that hold the
    most are taken as an SVD takes them, and are the same bits if they are taken again."""
    ranks, shard, numels = len(node_of), 2**17, [math.prod(shape) for shape in SHAPES]
    offsets = [number % ranks * shard + sum(numels[:number]) for number in range(len(SHAPES))]
    places = [slice(one, one + numel) for one, numel in zip(offsets, numels, strict=True)]
    matrices = list(zip(offsets, map(torch.Size, SHAPES), strict=True))

    def flat(rank: int, step: int) -> Tensor:
        whole = torch.zeros(ranks * shard)
        for place, one in zip(places, gradients(rank, step), strict=True):
            whole[place] = one.reshape(-1)
        return whole

    def body(comm: Communicator) -> tuple[Tensor, Tensor, slice, slice]:
        _, links = link_nodes(comm, node_of, alike=True)
        over = comm if links is None else links.number_by_lane(comm)
        exchange = make_exchange(ExchangeToOwners, over, links, ranks * shard, make_codec(codec, 64))
        exchange.send_apart(matrices, 2)
        arrived, firsts = torch.zeros(shard, dtype=torch.float64), []
        for step in (1, 1, 2, 3):
            exchange.payload.copy_(flat(comm.rank, step))
            exchange.start(step)
            exchange.advance()
            exchange.wait()
            assert exchange.outcome().finite
            firsts.append(exchange.average_of_own.clone())
            if len(firsts) > 1:  # the first was a step that is skipped
                exchange.commit()
                arrived += exchange.average_of_own.double()
        assert torch.equal(*firsts[:2])
        residual = exchange.worker_residual
        assert residual is not None
        return arrived, residual.double(), exchange.owner_place, exchange.worker_place

    found = threads.run(body, ranks)
    nodes = len(set(node_of))
    whole = sum(flat(rank, step).double() for rank in range(ranks) for step in (1, 2, 3)) / ranks
    seen = torch.zeros_like(whole)
    for arrived, residual, own, of_worker in found:
        seen[own] += arrived
        seen[of_worker] += residual / nodes
    torch.testing.assert_close(seen, whole, rtol=0, atol=1e-5)


def test_leading_directions_hold_what_a_singular_value_decomposition_says() -> None:
    matrices = gradients(0, 0)
    numels = [one.numel() for one in matrices]
    offsets = [sum(numels[:number]) for number in range(len(numels))]
    places = list(zip(offsets, map(torch.Size, SHAPES), strict=True))

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        carried = LeadingDirections(comm, sum(numels), places, 2, torch.device("cpu"))
        values = torch.cat([one.reshape(-1) for one in matrices])
        carried.take_and_send(values.view(1, -1))
        average = torch.zeros_like(values)
        carried.add_mean(average)
        return values, average

    (left, brought), *_ = threads.run(body, 1)
    torch.testing.assert_close(left + brought, torch.cat([one.reshape(-1) for one in matrices]), rtol=0, atol=1e-5)
    for number, (one, rest) in enumerate(zip(matrices, left.split(numels), strict=True)):
        if number in (0, 1):  # rank 2 and noise: the rest is the noise
            assert tail(one, 2) <= float(rest.double().square().sum()) < 1.01 * tail(one, 2) + 1e-4 * tail(one, 0)
        elif number == 2:  # noise alone, and one direction: one of the largest
            assert float(rest.square().sum()) < tail(one, 0) - 0.7 * (tail(one, 0) - tail(one, 1))
        else:
            assert torch.equal(rest, one.reshape(-1))


def test_a_matrix_of_fewer_directions_and_one_that_is_not_finite() -> None:
    column = torch.linspace(-1, 1, 96)
    same = torch.outer(column, column)
    wrong = same.clone()
    wrong[3, 5] = math.inf

    def body(comm: Communicator) -> list[Tensor]:
        found = []
        for matrix in (same, same * 1e-15, wrong):
            carried = LeadingDirections(comm, 96 * 96, [(0, matrix.shape)], 4, torch.device("cpu"))
            values = matrix.clone()
            carried.take_and_send(values.view(1, -1))
            found.append(values)
        return found

    (exact, small, broken), *_ = threads.run(body, 1)
    assert exact.norm() < 2**-7 * same.norm()
    assert small.norm() < 2**-7 * (same * 1e-15).norm()
    assert not broken.isfinite().all()
