"""Collectives are counted by kind and size, exactly, on every rank, in groups too, and change no result; and what each
sends."""

from collections import Counter
from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.launching import on_threads
from thinwire.comm import Communicator, LoggedCommunicator, OperationLog, Traffic, threads
from thinwire.comm.operation_log import OperationStatistics
from thinwire.comm.traffic import sent_bytes


def counted(log: OperationLog) -> Counter[tuple[str, int]]:
    return Counter({(one.name, one.nbytes): one.count for one in log.statistics()})


def some_collectives(comm: Communicator) -> list[torch.Tensor]:
    mine = torch.arange(6.0) + 10 * comm.rank
    gathered, exchanged = torch.empty(6 * comm.size), torch.empty(6)
    comm.all_gather(gathered, mine)
    works = [comm.all_to_all(exchanged, mine, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    total, first = mine.clone(), mine.clone().half()
    for _ in range(3):
        comm.all_reduce(total, "mean")
    comm.broadcast(first, root=1)
    comm.barrier()
    return [gathered, exchanged, total, first]


EXPECTED = {
    ("all_gather", 24): 1,
    ("all_to_all", 24): 2,
    ("all_reduce", 24): 3,
    ("broadcast", 12): 1,
    ("barrier", 1): 1,
}


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_counts_are_exact_and_results_the_same(comm: Communicator, size: int) -> None:
    expected = some_collectives(comm.duplicate())
    log = OperationLog()
    logged = LoggedCommunicator(comm, log)
    sent = logged.traffic.bytes_sent
    for ours, theirs in zip(some_collectives(logged), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert counted(log) == EXPECTED
    assert logged.traffic.bytes_sent > sent
    assert all(milliseconds > 0 for one in log.statistics() for milliseconds in one.milliseconds)
    log.reset()
    assert not log.statistics()


@on_threads(4)
def test_groups_write_to_the_same_log(comm: Communicator) -> None:
    log = OperationLog(["all_reduce"])
    logged = LoggedCommunicator(comm, log)
    copy, pair = logged.duplicate(), logged.split(comm.rank % 2)
    assert pair is not None
    for each in (logged, copy, pair):
        each.all_reduce(torch.ones(3))
    assert counted(log) == {("all_reduce", 12): 3}
    assert pair.size == 2


def test_only_what_is_named_is_counted_by_any_of_its_names_and_by_its_caller() -> None:
    def rank(comm: Communicator) -> None:
        log = OperationLog(["reduce_scatter", "barrier"])
        some_collectives(LoggedCommunicator(comm, log))
        assert counted(log) == {("all_to_all", 24): 2, ("barrier", 1): 1}
        lines: list[str] = []
        log = OperationLog(["broadcast", "barrier"], caller=True, report=lines.append)
        some_collectives(LoggedCommunicator(comm, log))
        in_it = "in some_collectives"
        assert counted(log) == {(f"broadcast {in_it}", 12): 1, (f"barrier {in_it}", 1): 1}
        assert [line.partition(":")[0] for line in lines] == [f"broadcast {in_it} of 12 B", f"barrier {in_it} of 1 B"]

    threads.run(rank, 2)
    with pytest.raises(ValueError, match="'all_redcue' is no collective, expected some of all_gather"):
        OperationLog(["all_gather", "all_redcue"])


def test_the_summary_has_what_was_counted_and_not_itself(capsys) -> None:
    def rank(comm: Communicator) -> None:
        logged = LoggedCommunicator(comm, OperationLog())
        some_collectives(logged)
        for _ in range(2):
            found = logged.log_summary(return_dict=True)
        assert found is not None
        counts = {(name, size): one["count"] for name, sizes in found["summary"].items() for size, one in sizes.items()}
        assert counts == EXPECTED
        assert found["metadata"] == {"world_size": 2, "rank": comm.rank}
        assert logged.log_summary() is None

    threads.run(rank, 2)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows if row[0] == "all_reduce"] == [["all_reduce", "24", "B", "3"]] * 3  # rank 0 only


def test_speeds() -> None:
    """By hand: 4 ranks, 1 MB in 8 ms is 1 Gb/s; the wire carries 3/4 of an all_to_all, 6/4 of an all_reduce."""
    for name, out, wire in (("all_to_all", 1.0, 0.75), ("all_reduce", 1.0, 1.5), ("all_gather", 4.0, 3.0)):
        one = OperationStatistics(name, 1_000_000, (4.0, 12.0), ranks=4)
        assert one.gigabits_per_second == pytest.approx(out)
        assert one.wire_gigabits_per_second == pytest.approx(wire)


@given(nbytes=st.integers(0, 2**40), size=st.integers(1, 1000))
def test_bytes_are_those_of_the_best_algorithm(nbytes, size):
    share = Fraction(size - 1, size)
    assert sent_bytes("all_to_all", nbytes, size) == sent_bytes("broadcast", nbytes, size) == ceil(share * nbytes)
    assert sent_bytes("all_reduce", nbytes, size) == ceil(2 * share * nbytes)
    assert sent_bytes("all_gather", nbytes, size) == (size - 1) * nbytes
    assert sent_bytes("barrier", nbytes, 1) == 0


def test_counts_add_up_are_taken_apart_and_reset():
    traffic = Traffic()
    traffic.add("all_gather", 3)
    before = traffic.copy()
    traffic.add("all_gather", 4)
    traffic.add("all_to_all", 0)
    once = traffic.since(before)
    traffic.include(once)
    assert (traffic.bytes_sent, traffic.calls) == (11, 5)
    assert (before.bytes_sent, once.bytes_sent, once.calls) == (3, 4, 2)
    assert traffic.bytes_by_collective == {"all_gather": 11, "all_to_all": 0}
    assert repr(traffic) == "Traffic(11 B sent; all_gather: 11 B, all_to_all: 0 B)"
    traffic.reset()
    assert (traffic.bytes_sent, traffic.calls) == (0, 0)
