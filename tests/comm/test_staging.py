"""Staged collectives begin in the order of their calls, whenever what they send arrives."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.comm.collectives import Staging


class Event:
    """Happens when it is told to, or waited for."""

    def __init__(self) -> None:
        self.happened = self.waited_for = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waited_for |= not self.happened
        self.happened = True


class Transfer:
    def done(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True


class Log:
    """Three collectives staged one after another, and which have begun."""

    def __init__(self, failing: int | None = None) -> None:
        self.begun: list[int] = []
        self.events: list[Any] = [Event() for _ in range(3)]
        self.staging = Staging()
        self.works = [self.staging.follow(event, self._beginning(n, failing)) for n, event in enumerate(self.events)]

    def _beginning(self, number: int, failing: int | None) -> Any:
        def begin() -> Transfer:
            self.begun.append(number)
            if number == failing:
                raise RuntimeError("the transport failed")
            return Transfer()

        return begin


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
    with pytest.raises(RuntimeError, match="the transport failed"):
        log.works[0].wait(1.0)
