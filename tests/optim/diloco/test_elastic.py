"""Elastic workers as threads that meet at a store of their process: what a disturbance may change, and what it may not.

Processes that are killed are in tests/chaos/elastic.py.
"""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.optim.diloco.tower import (
    SETTINGS,
    Tower,
    algorithm_1,
    flat,
    go_on,
    loss_of,
    make_elastic,
    meeting,
    relative_error,
    spoil,
    step,
    together,
)
from tests.refusing import refused
from thinwire.comm import CommunicationError, Communicator, Elastic, MembershipError, threads
from thinwire.optim import elastic_job
from thinwire.optim.diloco.elastic_home import ElasticHome

__all__ = ["meeting"]

SHARE = {"exp_avg": 1, "exp_avg_sq": 2}


def run_to_the_end(
    steps: int, before_step: Callable[[ElasticHome], object] = lambda home: None, **options: Any
) -> Tensor:
    """The weights with which three workers end."""

    def body() -> Tensor:
        model = Tower()
        optimizer, home = make_elastic(model, **options)
        while optimizer.steps < steps:
            before_step(home)
            step(model, optimizer, home.index)
        optimizer.synchronize()
        return flat(model.parameters())

    first, *others = together([body] * 3)
    assert all(torch.equal(first, one) for one in others)
    return first


@pytest.mark.parametrize("share", [{}, SHARE])
@pytest.mark.parametrize(("fragments", "overlap", "codec"), [(1, 0, "int8"), (2, 1, "sign1")])
def test_undisturbed_it_is_diloco_bit_for_bit(fragments: int, overlap: int, codec: str, share: dict[str, int]) -> None:
    options: dict[str, Any] = {"fragments": fragments, "overlap": overlap, "codec": codec, "share": share}

    def body(comm: Communicator) -> Tensor:
        model = Tower()
        optimizer = thinwire.DiLoCo(
            model.named_parameters(), torch.optim.AdamW, comm=comm, lr=0.01, every=6, block_size=64, **options
        )
        for _ in range(27):
            step(model, optimizer, comm.rank)
        optimizer.synchronize()
        return flat(model.parameters())

    plain = threads.run(body, 3)[0]
    assert torch.equal(run_to_the_end(27, **options), plain)


@pytest.mark.parametrize(
    ("by_some", "share", "fragment", "codec"),
    [
        (False, {}, 0, "int8"),
        (True, {}, 0, "sign1"),
        (False, SHARE, 0, "sign1"),
        (False, SHARE, 2, "int8"),
        (True, SHARE, 2, "int8"),
    ],
)
def test_an_outer_step_whose_end_is_lost_counts_for_all_or_for_none(
    by_some: bool, share: dict[str, int], fragment: int, codec: str
) -> None:
    """Taken by none it is taken again, with the same bits sent, residuals above all; taken by some it is handed to the
    one that lacks it. Either way all go on as if nothing had been."""
    homes: dict[int, ElasticHome] = {}

    def lose(home: ElasticHome) -> None:
        homes[home.index] = home
        if home.steps == (12 if by_some else 11) and (home.index == 2 or not by_some):  # leg 2 of the second one
            home.outer_steps[fragment].arrive = lost  # type: ignore[method-assign]
        while by_some and home.steps == 14 and home.index < 2 and not home.membership.why_meet(""):
            time.sleep(0.01)

    def lost() -> Any:
        while by_some and min(homes[0]._taken, homes[1]._taken) <= (4 if share else 1):
            time.sleep(0.01)
        raise CommunicationError("lost")

    options: dict[str, Any] = {"fragments": 1, "overlap": int(by_some), "codec": codec, "share": share}
    another_job = replace(SETTINGS, job="another")
    assert torch.equal(run_to_the_end(27, lose, **options), run_to_the_end(27, elastic=another_job, **options))


@pytest.mark.parametrize("share", [{}, {"exp_avg": 1, "exp_avg_sq": 3}])
def test_the_mean_is_over_those_present_and_momentum_outlives_its_owner(
    share: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """One leaves after two outer steps, another joins after four: Algorithm 1 in float64."""
    options: dict[str, Any] = {"every": 4, "fragments": 1, "overlap": 0, "codec": "none", "outer_lr": 0.7}
    options["share"] = share
    come = threading.Event()

    def stays(worker: int) -> Tensor:
        model = Tower()
        optimizer, home = make_elastic(model, **options)
        while optimizer.steps < 24:
            if optimizer.steps == 13:
                come.set()
            while optimizer.steps == 15 and not home.membership.wanted:
                time.sleep(0.01)
            step(model, optimizer, worker)
            if optimizer.steps in (4, 12, 16):
                assert optimizer.workers == (2 if optimizer.steps == 12 else 3)
        optimizer.synchronize()
        return flat(model.parameters())

    def leaves() -> None:
        model = Tower()
        optimizer, _ = make_elastic(model, **options)
        go_on(model, optimizer, 2, 8)
        optimizer.close()

    def joins() -> Tensor:
        assert come.wait(60)
        model = Tower()
        with torch.no_grad():
            model.first.weight.zero_()  # its own weights do not count
        optimizer, _ = make_elastic(model, **options)
        assert (optimizer.steps, optimizer.workers) == (16, 3)
        go_on(model, optimizer, 3, 24)
        optimizer.synchronize()
        return flat(model.parameters())

    first, second, _, late = together([lambda: stays(0), lambda: stays(1), leaves, joins])
    who = rf"{re.escape(socket.gethostname())}:{os.getpid()}-\w+"
    gone = re.findall(rf"2 workers from step \d+ on, 0 of them new; {who} (left|did not come)", capsys.readouterr().err)
    assert len(gone) == 1
    assert torch.equal(first, second)
    assert torch.equal(first, late)
    # All three begin at once, in whatever order: their data are their own.
    rounds = [{worker: [worker] for worker in present} for present in ((0, 1, 2), (0, 1), (0, 1, 3)) for _ in range(2)]
    wanted = algorithm_1(Tower(), rounds, loss_of, every=4, outer_lr=0.7, momentum=0.9, share=share)
    assert relative_error(first, wanted) < 1e-5  # fp32; a momentum begun anew leads to 0.1


@pytest.mark.filterwarnings("ignore:the outer step")
def test_an_outer_step_that_the_others_have_ended_before_is_refused_and_they_end() -> None:
    options: dict[str, Any] = {"every": 4, "fragments": 1, "overlap": 0}

    def end() -> Tensor | None:
        model = Tower()
        optimizer, home = make_elastic(model, **options)
        go_on(model, optimizer, home.index, 8)
        if home.index == 2:
            refused(MembershipError, "have ended it after 2 common steps", go_on, model, optimizer, 2, 12)
            return optimizer.close()
        optimizer.synchronize()
        return flat(model.parameters())

    first, second = [one for one in together([end] * 3) if one is not None]
    assert torch.equal(first, second)


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_is_left_out_is_the_same_on_all_and_who_joins_knows_what_is_usual(ranks: int) -> None:
    options: dict[str, Any] = {"every": 4, "fragments": 1, "overlap": 0, "guard": 3.0, "codec": "int8"}
    options["elastic"] = replace(SETTINGS, workers=2)
    come = threading.Event()

    def body(worker: int, comm: Communicator) -> tuple[Tensor, Tensor, int]:
        assert worker < 2 or come.wait(60)
        model = Tower()
        optimizer, home = make_elastic(model, comm=comm if ranks > 1 else None, **options)
        spoil(optimizer, worker, {(0, 12): -1e3, (2, 24): 1e3, (0, 28): float("nan")})
        while optimizer.steps < 32:
            if optimizer.steps == 13:
                come.set()
            while optimizer.steps == 15 and comm.rank == 0 and worker < 2 and not home.membership.wanted:
                time.sleep(0.01)
            step(model, optimizer, worker)
        known, left_out = home.outer_steps[0].guard.known.clone(), optimizer.left_out
        optimizer.synchronize()
        return flat(model.parameters()), known, left_out

    def of(worker: int) -> Any:
        return threads.run(lambda comm: body(worker, comm), ranks)

    first, *others = [rank for node in together([lambda n=n: of(n) for n in range(3)]) for rank in node]  # type: ignore[misc]
    for weights, known, _ in others:
        assert torch.equal(weights, first[0])
        assert torch.equal(known, first[1])
    assert [first[2], others[-1][2]] == [3, 2]


def test_momentum_that_is_kept_for_others_follows_the_settings_with_which_a_fragment_left() -> None:
    def body(data: int) -> Tensor:
        model, elastic = Tower(), Elastic(workers=2, address="here:1")
        optimizer, home = make_elastic(model, elastic=elastic, every=4, overlap=1, fragments=1, codec="none")
        go_on(model, optimizer, data, 4)
        optimizer.outer_lr, optimizer.outer_momentum = 0.3, 0.5
        go_on(model, optimizer, data, 6)
        return home._momentum.of(0).clone()

    # Each owns half of it, and finds the other half in what came back.
    one, other = together([lambda: body(0), lambda: body(1)])
    assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize(("workers", "ranks"), [(2, 1), (1, 3)])
def test_no_sample_is_read_twice_by_workers_or_ranks_of_one(workers: int, ranks: int) -> None:
    each = 10 // (workers * ranks)

    def body(comm: Communicator) -> list[int]:
        settings = Elastic(workers=workers, address="here:1")
        optimizer, _ = make_elastic(Tower(), comm=comm if ranks > 1 else None, elastic=settings)
        samples = thinwire.ElasticSampler(optimizer, workers * ranks * each, seed=3, ahead=each)
        found = [next(iter(samples)) for _ in range(each)]  # as a Trainer that begins its epochs anew
        optimizer.synchronize()
        return found

    found = together([lambda: threads.run(body, ranks)] * workers)
    assert sorted(number for worker in found for rank in worker for number in rank) == list(
        range(workers * ranks * each)
    )


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stage": 1}, "stage=1"),
        ({"nodes": [0]}, r"nodes=\[0\]"),
        ({"comm_backend_name": "mpi"}, "ends an MPI job"),
    ],
)
def test_what_elastic_workers_cannot_have(options: dict[str, Any], error: str) -> None:
    refused(ValueError, error, make_elastic, Tower(), **options)


def test_what_one_worker_cannot_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tower()
    optimizer, _ = make_elastic(model, elastic=Elastic(workers=1, address="here:1"))
    step(model, optimizer, 0)
    numel = sum(one.numel() for one in model.parameters())
    assert optimizer.model_state_bytes()["outer momentum"] == 8 * numel
    refused(RuntimeError, "not one worker's to forget", optimizer.reset_state)
    with pytest.raises(ValueError, match="every is 5 here and 6 on the job's first worker"):
        make_elastic(Tower(), elastic=Elastic(workers=1, address="here:1"), every=5)
    with monkeypatch.context() as other:
        other.setattr(elastic_job, "__version__", "0")
        settings = Elastic(workers=1, address="here:1")
        refused(ValueError, "version of thinwire is '0' here and", make_elastic, Tower(), elastic=settings)
    optimizer.synchronize()
    refused(RuntimeError, "has ended this worker's part", step, model, optimizer, 0)
    with pytest.raises(CommunicationError, match="is over: there is nothing to join"):
        make_elastic(Tower(), elastic=Elastic(workers=1, address="here:1"))
    with pytest.raises(ValueError, match=r"needs an optimizer with elastic"):
        thinwire.ElasticSampler(thinwire.DiLoCo([torch.nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=1.0), 10)
    other, _ = make_elastic(Tower(), elastic=Elastic(workers=1, address="here:1", job="other"))
    thinwire.ElasticSampler(other, 10)
    with pytest.raises(ValueError, match="size of ElasticSampler is 11 here and 10 on the job's first worker"):
        thinwire.ElasticSampler(other, 11)


def test_trainers_do_not_count_the_steps_of_who_may_join_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def train(self) -> None:
            step(model, optimizer, 0)

    module = ModuleType("transformers.trainer")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    model = Tower()
    optimizer, _ = make_elastic(model, elastic=Elastic(workers=1, address="here:1"))
    refused(ValueError, "Trainer counts steps and saves by itself", Trainer().train)
    optimizer.close()


# Whole nodes as workers: each a thread for every rank

TWO = Elastic(workers=2, address="here:1", timeout=60.0, join_timeout=60.0, silence=20.0)


@pytest.mark.parametrize("stage", [0, 2])
def test_nodes_average_gradients_inside_and_count_once_between(stage: int) -> None:
    """Three workers, of two ranks, three and one."""
    sizes = (2, 3, 2) if stage else (2, 3, 1)
    options: dict[str, Any] = {"every": 4, "fragments": 2, "overlap": 0, "codec": "none", "outer_lr": 0.7}
    options |= {"mix": 0.0, "fragments": 1, "stage": stage}

    def live(node: int, comm: Communicator) -> tuple[Tensor, float, int]:
        model = Tower()
        optimizer, _ = make_elastic(model, comm=comm, **options)
        go_on(model, optimizer, 10 * node + comm.rank, 12)
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


@pytest.mark.parametrize(
    ("dtype", "stage", "share"),
    [
        (torch.float32, 0, {}),
        (torch.bfloat16, 0, SHARE),
        (torch.float32, 2, {"exp_avg_sq": 1}),
    ],
)
def test_a_node_whose_rank_is_lost_is_dropped_whole_and_another_joins(
    dtype: torch.dtype, stage: int, share: dict[str, int]
) -> None:
    options: dict[str, Any] = {"every": 4, "fragments": 2, "elastic": TWO, "param_dtype": dtype}
    options |= {"stage": stage, "share": share}
    come, gone = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def stays(comm: Communicator) -> Tensor:
        model = Tower()
        optimizer, home = make_elastic(model, comm=comm, **options)
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
        optimizer, _ = make_elastic(model, comm=comm, **options)
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
        optimizer, _ = make_elastic(model, comm=comm, **options)
        assert optimizer.steps >= 13
        go_on(model, optimizer, 4 + comm.rank, 24)
        optimizer.synchronize()
        return flat(model.parameters())

    def fall() -> None:
        refused(OSError, "this rank is lost", threads.run, falls, 2)

    old, _, new = together([lambda: threads.run(stays, 2), fall, lambda: threads.run(joins, 3)])
    assert all(torch.equal(old[0], one) for one in [*old, *new])
    assert len(errors) == 1
    assert "rank 1 raised OSError: this rank is lost" in str(errors[0])
    assert isinstance(errors[0], (MembershipError, CommunicationError))


def test_an_error_of_the_first_rank_is_an_error_of_all() -> None:
    alone, _ = make_elastic(Tower(), elastic=Elastic(workers=1, address="here:1"))

    def body(comm: Communicator) -> str:
        with pytest.raises(ValueError, match="every is 5 here and 6 on the job's first worker") as caught:
            make_elastic(Tower(), comm=comm, elastic=Elastic(workers=1, address="here:1"), every=5)
        return str(caught.value)

    assert len(set(threads.run(body, 3))) == 1
    alone.close()
