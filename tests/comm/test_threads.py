from __future__ import annotations

import secrets
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.collectives_body import CHECKS
from thinwire.comm import CommunicationError, CommunicationTimeout, Communicator, init, threads


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_body(check, size):
    seed = secrets.randbits(31)
    threads.run(lambda comm: check(comm, seed), size)


def test_results_come_in_rank_order():
    assert threads.run(lambda comm: (comm.rank, comm.size, comm.backend), 3) == [
        (rank, 3, "threads") for rank in range(3)
    ]


def test_init_returns_the_own_communicator():
    assert threads.run(lambda comm: init() is comm, 2) == [True, True]
    assert threads.current() is None


def test_init_refuses_another_backend():
    with pytest.raises(ValueError, match=r"inside threads\.run"):
        threads.run(lambda comm: init(backend="gloo"), 1)


@given(
    size=st.integers(1, 5),
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_sums_are_in_rank_order(size, values, seed):
    """Bit for bit the sum of rank 0, then 1, and so on, whoever arrives last."""
    base = torch.tensor(values, dtype=torch.float32)
    inputs = [base * torch.randn(base.shape, generator=_generator(seed + rank)) for rank in range(size)]
    expected = inputs[0].clone()
    for tensor in inputs[1:]:
        expected += tensor

    def reduce(comm: Communicator) -> torch.Tensor:
        tensor = inputs[comm.rank].clone()
        comm.all_reduce(tensor)
        return tensor

    for result in threads.run(reduce, size):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_non_finite_values_travel():
    def exchange(comm: Communicator) -> torch.Tensor:
        tensor = torch.tensor([float("nan"), float("inf"), 1.0 if comm.rank else float("-inf")])
        output = torch.empty(2, 3)
        comm.all_gather(output, tensor)
        comm.all_reduce(tensor, "max")
        return torch.cat([output.flatten(), tensor])

    expected = [float("nan"), float("inf"), float("-inf"), float("nan"), float("inf"), 1.0, float("nan")]
    for result in threads.run(exchange, 2):
        torch.testing.assert_close(result, torch.tensor([*expected, float("inf"), 1.0]), rtol=0, atol=0, equal_nan=True)


def test_a_raising_rank_is_named_and_its_exception_comes_out():
    caught: dict[int, CommunicationError] = {}

    def fail(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("a bug of the user")
        try:
            comm.barrier()
        except CommunicationError as error:
            caught[comm.rank] = error
            raise

    with pytest.raises(KeyError, match="a bug of the user") as raised:
        threads.run(fail, 3)
    assert raised.value.__notes__ == ["raised on rank 1 of 3"]
    assert caught.keys() == {0, 2}
    for error in caught.values():
        assert error.ranks == (1,)
        assert "rank 1 raised KeyError" in str(error)


def test_a_raising_rank_is_seen_in_other_groups():
    def fail(comm: Communicator) -> None:
        half = comm.split(int(comm.rank == 2))
        assert half is not None
        if comm.rank == 2:
            raise KeyError
        comm.barrier()

    with pytest.raises(KeyError):
        threads.run(fail, 3)


def test_a_rank_that_returns_early_is_named():
    def leave(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(CommunicationError, match="rank 1 returned without joining it") as raised:
        threads.run(leave, 3)
    assert raised.value.ranks == (1,)


def test_a_rank_that_does_not_come_in_time_is_named():
    release = threading.Event()

    def linger(comm: Communicator) -> None:
        if comm.rank == 1:
            release.wait()
        try:
            comm.all_reduce(torch.ones(3))
        finally:
            release.set()

    with pytest.raises(CommunicationTimeout, match=r"all_reduce\(sum\) of 3 float32 .* rank 1 did not answer"):
        threads.run(linger, 2, timeout=0.2)


def test_a_wait_may_have_a_timeout_of_its_own():
    release = threading.Event()

    def linger(comm: Communicator) -> None:
        if comm.rank == 1:
            release.wait()
            return
        work = comm.all_reduce(torch.ones(3), async_op=True)
        assert not work.is_completed()
        for _ in range(2):
            with pytest.raises(CommunicationTimeout, match=r"timed out after 0\.01 s"):
                work.wait(0.01)
        assert work.is_completed()
        release.set()

    threads.run(linger, 2)


def test_a_rank_stuck_outside_of_collectives_does_not_hold_up_the_run():
    never = threading.Event()

    def hang(comm: Communicator) -> None:
        if comm.rank == 1:
            never.wait()
        comm.barrier()

    with pytest.raises(CommunicationTimeout, match="rank 1"):
        threads.run(hang, 2, timeout=0.1)
    never.set()


@pytest.mark.parametrize(
    "differ",
    [
        lambda comm: comm.all_gather(torch.empty(12), torch.ones(4)),
        lambda comm: comm.all_reduce(torch.ones(4)),
        lambda comm: comm.all_reduce(torch.ones(3), "max"),
        lambda comm: comm.all_reduce(torch.ones(3).double()),
        lambda comm: comm.broadcast(torch.ones(3), 1),
    ],
    ids=["collective", "length", "op", "dtype", "root"],
)
def test_different_calls_fail_on_every_rank(differ):
    def mix(comm: Communicator) -> CommunicationError | None:
        try:
            if comm.rank == 1:
                differ(comm)
            else:
                comm.all_reduce(torch.ones(3))
        except CommunicationError as error:
            with pytest.raises(CommunicationError, match="can no longer be used"):
                comm.barrier()
            return error
        return None

    errors = threads.run(mix, 3)
    assert all("not at the same call" in str(error) for error in errors)


def test_bad_runs_are_refused():
    with pytest.raises(ValueError, match="size"):
        threads.run(lambda comm: None, 0)
    with pytest.raises(ValueError, match="timeout"):
        threads.run(lambda comm: None, 1, timeout=0)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
