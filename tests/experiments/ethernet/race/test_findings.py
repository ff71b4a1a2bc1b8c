"""Steps are split so that the parts are the whole, and winners change where the curves cross."""

from __future__ import annotations

from math import inf, isnan, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.ethernet.race.findings import crossover, rate_of_waiting, speedup, split_step, winning_rate

SECONDS = st.floats(1e-4, 1e2)


def turn(seconds: float, waited: float = 0.0, interface_bytes: float = 0.0) -> dict[str, float]:
    return {"seconds": seconds, "waited": waited, "cpu": seconds, "interface_bytes": interface_bytes}


@given(
    seconds=st.lists(SECONDS, min_size=1, max_size=5),
    waited=st.floats(0, 1),
    alone=SECONDS,
    interface_bytes=st.integers(0, 10**9),
    megabits=st.none() | st.floats(1, 1e4),
)
def test_the_parts_are_the_step(
    seconds: list[float], waited: float, alone: float, interface_bytes: int, megabits: float | None
) -> None:
    turns = [turn(one, waited * one, interface_bytes) for one in seconds]
    parts = split_step(turns, [turn(alone)], megabits)
    assert parts.compute + parts.encode + parts.wire + parts.wait == pytest.approx(parts.seconds)
    assert min(parts.compute, parts.encode, parts.wire, parts.wait) >= 0
    assert parts.wire <= parts.link_busy
    assert parts.hidden is None or 0 <= parts.hidden <= 1


def test_a_step_by_hand() -> None:
    parts = split_step([turn(1.0, 0.7, 5e6)], [turn(0.2)], megabits=100)
    assert (parts.compute, parts.link_busy, parts.wire, parts.hidden) == (0.2, 0.4, 0.4, 0)
    assert parts.encode == pytest.approx(0.1)
    assert parts.wait == pytest.approx(0.3)


def test_what_nobody_waits_for_is_hidden() -> None:
    parts = split_step([turn(1.0, 0.1, 5e6)], [turn(0.2)], megabits=100)
    assert parts.hidden == pytest.approx(0.75)
    assert parts.wait == 0


def test_unlimited_links_are_never_busy() -> None:
    parts = split_step([turn(1.0, 0.1, 5e6)], [turn(0.2)], megabits=None)
    assert (parts.link_busy, parts.wire, parts.wait, parts.hidden) == (0, 0, 0.1, None)


def test_speedups_compare_within_a_round() -> None:
    # The machine is ten times slower in the second round, for both.
    assert speedup([turn(1.0), turn(10.0), turn(1.0)], [turn(3.0), turn(30.0), turn(3.0)]) == 3


@given(rate=st.floats(60, 9000))
def test_the_crossing_is_found_on_a_logarithmic_axis(rate: float) -> None:
    rates = (50.0, 200.0, 1000.0, 10000.0)
    assert crossover({one: log(rate) - log(one) for one in rates}) == pytest.approx(rate)


def test_no_crossing_is_not_a_number() -> None:
    assert isnan(crossover({50: -1.0, 100: -2.0}))
    assert isnan(crossover({50: 2.0, 100: 1.0}))


def test_who_is_always_ahead_wins_at_all_rates() -> None:
    assert winning_rate({50: 3.0, 100: 1.1}) == inf
    assert isnan(winning_rate({50: 0.9, 100: 0.8}))
    assert winning_rate({10: 10.0, 1000: 0.1}) == pytest.approx(100)


def test_the_rate_at_which_a_fraction_is_waiting() -> None:
    turns = {10.0: [turn(1.0, 0.98)], 1000.0: [turn(1.0, 0.90), turn(1.0, 0.90)]}
    assert rate_of_waiting(turns, 0.94) == pytest.approx(100)
    assert isnan(rate_of_waiting(turns, 0.5))
