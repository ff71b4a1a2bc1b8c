"""The closed form of the pipeline beside a simulation of it, event by event."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.plan.costs import NO_BUCKETS, Buckets, Cost, cut, seconds_beside

durations = st.floats(0, 1)
costs = st.builds(Cost, durations, durations, durations)


def simulated(computation: float, count: int, each: Cost) -> float:
    """Buckets one after the other through processor, link inside and link between, each machine serving in order."""
    processor = inside = between = 0.0
    for _ in range(count):
        processor += computation / count + each.codec
        inside = max(processor, inside) + each.inside
        between = max(inside, between) + each.between
    return max(processor, between)


@settings(deadline=None)
@given(durations, st.integers(1, 40), costs)
def test_equal_buckets_take_what_a_simulation_takes(computation: float, count: int, each: Cost) -> None:
    closed = seconds_beside(computation, Buckets(count, each, Cost()), 1.0)
    assert closed == pytest.approx(simulated(computation, count, each))


@settings(deadline=None)
@given(durations, st.integers(1, 40), costs, costs)
def test_without_overlap_everything_adds_up(computation: float, count: int, each: Cost, last: Cost) -> None:
    buckets = Buckets(count, each, last)
    assert seconds_beside(computation, buckets, 0.0) == pytest.approx(computation + buckets.total.total)


@settings(deadline=None)
@given(durations, st.integers(1, 40), costs, costs, st.floats(0, 1))
def test_the_last_bucket_leaves_after_everything(
    computation: float, count: int, each: Cost, last: Cost, overlap: float
) -> None:
    seconds = seconds_beside(computation, Buckets(count, each, last), overlap)
    assert seconds * (1 + 1e-9) >= computation + count * each.codec + last.total
    assert seconds <= (computation + count * each.total + last.total) * (1 + 1e-9)


@settings(deadline=None)
@given(durations, st.floats(0, 1))
def test_nothing_to_send(computation: float, overlap: float) -> None:
    assert seconds_beside(computation, NO_BUCKETS, overlap) == pytest.approx(computation)


@settings(deadline=None)
@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(1, 10**8))
def test_buckets_hold_every_element(elements: int, last: int, wanted: int) -> None:
    last = min(last, elements)
    buckets = cut(elements, last, wanted, lambda numel: Cost(bytes_sent=numel))
    assert elements <= buckets.total.bytes_sent < elements + buckets.count
    assert buckets.last.bytes_sent == last


def test_buckets_cut_differently_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="3 and 2 buckets"):
        Buckets(3, Cost(), Cost()) + Buckets(2, Cost(), Cost())
