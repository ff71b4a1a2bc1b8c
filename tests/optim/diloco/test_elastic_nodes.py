"""Whole nodes as elastic workers: each a thread for every rank, at a store of their process."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.optim.diloco.bodies import relative_error
from tests.optim.diloco.elastic_workers import SETTINGS, make, meeting, step, together
from tests.optim.diloco.reference import algorithm_1, flat
from tests.optim.diloco.tower import Tower, loss_of
from thinwire.comm import CommunicationError, Communicator, Elastic, MembershipError, threads

__all__ = ["meeting"]

TWO = Elastic(workers=2, address="here:1", timeout=60.0, join_timeout=60.0, silence=20.0)


@pytest.mark.parametrize("stage", [0, 2])
def test_nodes_average_gradients_inside_and_count_once_between(stage: int) -> None:
    """Three workers, of two ranks, three and one."""
    sizes = (2, 3, 2) if stage else (2, 3, 1)
    options: dict[str, Any] = {"every": 4, "fragments": 2, "overlap": 0, "codec": "none", "outer_lr": 0.7}
    options |= {"mix": 0.0, "fragments": 1, "stage": stage}

    def live(node: int, comm: Communicator) -> tuple[Tensor, float, int]:
        model = Tower()
        optimizer, _ = make(model, comm=comm, **options)
        while optimizer.steps < 12:
            step(model, optimizer, 10 * node + comm.rank)
        assert (optimizer.workers, optimizer.comm.size) == (3, sizes[node])
        momentum = optimizer.model_state_bytes()["outer momentum"]
        optimizer.synchronize()
        return flat(model.parameters()), momentum, optimizer.bytes_sent_between_nodes

    def node(number: int) -> Any:
        return threads.run(lambda comm: live(number, comm), sizes[number])

    found = [one for of_node in together([lambda n=n: node(n) for n in range(3)]) for one in of_node]  # type: ignore[misc]
    assert all(torch.equal(found[0][0], weights) for weights, _, _ in found)
    rounds = [{node: range(10 * node, 10 * node + size) for node, size in enumerate(sizes)}] * 3
    wanted = algorithm_1(Tower(), rounds, loss_of, every=4, outer_lr=0.7, momentum=0.9)
    assert relative_error(found[0][0], wanted) < 1e-5
    # The first rank alone speaks with other nodes, and keeps the momentum.
    speaks = [momentum > 0 and between > 0 for _, momentum, between in found]
    assert speaks == [rank == 0 for size in sizes for rank in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_whose_rank_is_lost_is_dropped_whole_and_another_joins(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"every": 4, "fragments": 2, "elastic": TWO, "param_dtype": dtype}
    come, gone = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def stays(comm: Communicator) -> Tensor:
        model = Tower()
        optimizer, home = make(model, comm=comm, **options)
        while optimizer.steps < 24:
            if optimizer.steps == 9:
                gone.wait(60)
            if optimizer.steps == 13:
                come.set()
            while optimizer.steps == 15 and comm.rank == 0 and not home.membership.wanted:
                time.sleep(0.01)
            step(model, optimizer, comm.rank)
        assert optimizer.workers == 2
        optimizer.synchronize()
        return flat(model.parameters())

    def falls(comm: Communicator) -> None:
        model = Tower()
        optimizer, _ = make(model, comm=comm, **options)
        try:
            while optimizer.steps < 24:
                if (optimizer.steps, comm.rank) == (7, 1):
                    raise OSError("this rank is lost")
                step(model, optimizer, 2 + comm.rank)
        except CommunicationError as error:
            errors.append(error)
            optimizer.close()
            gone.set()
            raise

    def joins(comm: Communicator) -> Tensor:
        assert come.wait(60)
        model = Tower()
        with torch.no_grad():
            model.first.weight.zero_()  # its own weights do not count
        optimizer, _ = make(model, comm=comm, **options)
        assert optimizer.steps >= 13
        while optimizer.steps < 24:
            step(model, optimizer, 4 + comm.rank)
        optimizer.synchronize()
        return flat(model.parameters())

    def fall() -> None:
        with pytest.raises(OSError, match="this rank is lost"):
            threads.run(falls, 2)

    old, _, new = together([lambda: threads.run(stays, 2), fall, lambda: threads.run(joins, 3)])
    assert all(torch.equal(old[0], one) for one in [*old, *new])
    assert len(errors) == 1
    assert "rank 1 raised OSError: this rank is lost" in str(errors[0])
    assert isinstance(errors[0], (MembershipError, CommunicationError))


def test_an_error_of_the_first_rank_is_an_error_of_all() -> None:
    alone, _ = make(Tower(), elastic=Elastic(workers=1, address="here:1"))

    def body(comm: Communicator) -> str:
        with pytest.raises(ValueError, match="every is 5 here and 6 on the job's first worker") as caught:
            make(Tower(), comm=comm, elastic=Elastic(workers=1, address="here:1"), every=5)
        return str(caught.value)

    assert len(set(threads.run(body, 3))) == 1
    alone.close()


def test_ranks_of_a_node_claim_samples_of_their_own() -> None:
    def body(comm: Communicator) -> list[int]:
        optimizer, _ = make(Tower(), comm=comm, elastic=Elastic(workers=1, address="here:1"))
        samples = iter(thinwire.ElasticSampler(optimizer, 9, seed=3, ahead=3))
        found = [next(samples) for _ in range(3)]
        optimizer.synchronize()
        return found

    assert sorted(number for found in threads.run(body, 3) for number in found) == list(range(9))
    assert SETTINGS.workers == 3
