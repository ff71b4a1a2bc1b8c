"""Threads that share the parts of a call: every part once, errors told, any number of callers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from thinwire.simd.workers import Cores, Workers


@pytest.mark.parametrize(("parts", "threads"), [(0, 2), (1, 4), (7, 1), (50, 3)])
def test_every_part_is_done_once(parts, threads) -> None:
    done: list[int] = []
    Workers().each(done.append, parts, threads)
    assert sorted(done) == list(range(parts))


def test_an_error_is_raised_by_the_call() -> None:
    def work(part: int) -> None:
        if part == 3:
            raise ValueError("part 3")

    with pytest.raises(ValueError, match="part 3"):
        Workers().each(work, 8, 2)


def test_callers_do_not_wait_for_each_other() -> None:
    workers = Workers()
    meeting = threading.Barrier(2, timeout=60)  # both calls must be running at once to pass it
    callers = [threading.Thread(target=workers.each, args=(lambda _: meeting.wait(), 1, 1)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not meeting.broken


class CoresOf(Cores):
    """As many cores as a test wants."""

    def __init__(self, number: int) -> None:
        self._number = number

    def usable(self) -> int:
        return self._number


@pytest.fixture
def _threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_of_torch")
@pytest.mark.parametrize(("of_torch", "cores", "threads"), [(1, 8, 1), (3, 8, 3), (8, 3, 3), (8, 1, 1)])
def test_no_more_threads_than_torch_uses_and_than_there_are_cores(of_torch, cores, threads) -> None:
    torch.set_num_threads(of_torch)
    found = []
    caller = threading.Thread(target=lambda: found.append(Workers(CoresOf(cores)).threads()))
    caller.start()
    caller.join()
    assert [Workers(CoresOf(cores)).threads(), *found] == [threads, threads]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_all_threads_run_where_the_caller_may() -> None:
    workers = Workers()
    masks: list[set[int]] = []

    def call() -> None:
        meeting = threading.Barrier(2, timeout=60)  # passed by two threads only

        def work(_: int) -> None:
            masks.append(os.sched_getaffinity(0))
            meeting.wait()

        workers.each(work, 2, 2)

    def call_bound() -> None:
        os.sched_setaffinity(0, bound)  # of this thread only
        call()

    everywhere = os.sched_getaffinity(0)
    bound = {max(everywhere)}
    call()
    caller = threading.Thread(target=call_bound)
    caller.start()
    caller.join()
    call()
    assert masks == [everywhere] * 2 + [bound] * 2 + [everywhere] * 2
