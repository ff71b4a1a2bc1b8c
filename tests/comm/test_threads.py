"""Ranks that are threads; the errors that name ranks; and collectives whose tensors travel through host memory."""

import math
import secrets
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.collectives_body import CHECKS
from tests.refusing import refused
from thinwire.comm import CommunicationError, CommunicationTimeout, Communicator, init, threads
from thinwire.comm.agreement import first_difference
from thinwire.comm.collectives import Staging
from thinwire.comm.errors import Call, RollCall, describe_failure


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_body(check, size):
    seed = secrets.randbits(31)
    threads.run(lambda comm: check(comm, seed), size)


def test_results_come_in_rank_order_and_init_returns_the_own_communicator():
    found = threads.run(lambda comm: (comm.rank, comm.size, comm.backend, init() is comm), 3)
    assert found == [(rank, 3, "threads", True) for rank in range(3)]
    assert threads.current() is None


@given(
    size=st.integers(1, 5),
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_sums_are_in_rank_order(size, values, seed):
    """Bit for bit the sum of rank 0, then 1, and so on, whoever arrives last."""
    base = torch.tensor(values, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    inputs = [base * torch.randn(base.shape, generator=generator) for _ in range(size)]
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

    nan, inf = float("nan"), float("inf")
    expected = torch.tensor([nan, inf, -inf, nan, inf, 1.0, nan, inf, 1.0])
    for result in threads.run(exchange, 2):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


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
            refused(CommunicationTimeout, r"timed out after 0\.01 s", work.wait, 0.01)
        assert work.is_completed()
        release.set()

    threads.run(linger, 2)


def test_a_rank_stuck_outside_of_collectives_does_not_hold_up_the_run():
    never = threading.Event()

    def hang(comm: Communicator) -> None:
        if comm.rank == 1:
            never.wait()
        comm.barrier()

    refused(CommunicationTimeout, "rank 1", threads.run, hang, 2, timeout=0.1)
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
            refused(CommunicationError, "can no longer be used", comm.barrier)
            return error
        return None

    errors = threads.run(mix, 3)
    assert all("not at the same call" in str(error) for error in errors)


@pytest.mark.parametrize(("size", "options", "message"), [(0, {}, "size"), (1, {"timeout": 0}, "timeout")])
def test_bad_runs_are_refused(size, options, message):
    refused(ValueError, message, threads.run, lambda comm: None, size, **options)


# Who is to blame

CALL = Call(4, "all_reduce(sum) of 3 float32")


@pytest.mark.parametrize(
    ("roll_call", "timeout", "cause", "kind", "ranks", "said"),
    [
        (
            RollCall({0: CALL, 3: CALL}, (1, 2)),
            None,
            "Connection reset",
            CommunicationError,
            (1, 2),
            ["ranks 1, 2 did"],
        ),
        (RollCall({0: CALL, 1: Call(5, "barrier")}, ()), 2.0, None, CommunicationTimeout, (1,), ["barrier (call 5)"]),
        (RollCall({0: CALL, 1: CALL}, (), "the store is silent"), 2.0, None, CommunicationTimeout, (), ["is silent"]),
    ],
    ids=["silent ranks", "a rank at another call", "nobody"],
)
def test_who_is_to_blame(roll_call, timeout, cause, kind, ranks, said):
    error = describe_failure(CALL, 0, range(4), roll_call, timeout, cause)
    assert (type(error), error.ranks, error.collective) == (kind, ranks, CALL.signature)
    for one in [*said, cause or "timed out after 2 s", "on rank 0 of 4:"]:
        assert one in str(error)
    assert Call.decode(CALL.encode()) == CALL


def test_a_rank_of_a_group_is_called_by_its_number_in_the_job():
    error = describe_failure(CALL, 0, [1, 3, 5, 7], RollCall({0: CALL, 3: CALL}, (1, 2)), 2.0, None)
    assert error.ranks == (3, 5)
    assert "on rank 1 of the group of ranks 1, 3, 5, 7: ranks 3, 5 did not answer" in str(error)

    def differ(comm: Communicator) -> None:
        half = comm.split(comm.rank % 2)
        assert half is not None
        assert list(half.global_ranks) == [comm.rank % 2, comm.rank % 2 + 2]
        if comm.rank == 3:
            raise KeyError("a bug of the user")
        if comm.rank == 1:
            refused(CommunicationError, "rank 3 raised KeyError", half.barrier)

    refused(KeyError, "a bug of the user", threads.run, differ, 4)


# Staged collectives begin in the order of their calls, whenever what they send arrives


class Event:
    """Happens when it is told to, or waited for."""

    happened = waited_for = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waited_for |= not self.happened
        self.happened = True


class Log:
    """Three collectives staged one after another, and which have begun."""

    def __init__(self, failing: int | None = None) -> None:
        self.begun: list[int] = []
        self.events: list[Any] = [Event() for _ in range(3)]
        self.staging = Staging()
        self.works = [
            self.staging.follow(event, lambda n=n: self.begin(n, failing)) for n, event in enumerate(self.events)
        ]

    def begin(self, number: int, failing: int | None) -> SimpleNamespace:
        self.begun.append(number)
        if number == failing:
            raise RuntimeError("the transport failed")
        return SimpleNamespace(done=lambda: True, wait=lambda seconds: True)


def test_what_has_arrived_waits_for_those_before_it() -> None:
    log = Log()
    log.events[1].happened = True
    assert not log.works[1].done()
    assert log.begun == []
    log.events[0].happened = True
    assert log.works[1].done()
    assert log.begun == [0, 1]
    assert not any(event.waited_for for event in log.events)


def test_who_waits_for_one_begins_those_before_it_and_no_other() -> None:
    log = Log()
    assert log.works[1].wait(1.0)
    assert log.begun == [0, 1]
    assert not log.events[2].happened
    log.staging.begin_all()
    assert log.begun == [0, 1, 2]
    assert log.works[0].wait(1.0)
    assert log.begun == [0, 1, 2]


def test_an_error_is_for_who_waits_for_that_one() -> None:
    log = Log(failing=0)
    assert log.works[1].wait(1.0)
    assert log.works[0].done()
    refused(RuntimeError, "the transport failed", log.works[0].wait, 1.0)


def test_the_first_difference_is_named_and_nan_is_none() -> None:
    found = threads.run(lambda comm: first_difference(comm, {"a": math.nan, "b": comm.rank // 2}, "compare"), 3)
    assert found == [(2, "b", 1, 0)] * 3
