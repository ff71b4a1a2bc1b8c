"""Threads that share the parts of a call: every part once, errors told, any number of callers."""

from __future__ import annotations

import threading

import pytest

from thinwire.simd.workers import Workers


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
