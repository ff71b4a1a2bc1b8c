"""Closed forms beside simulations: the pipeline of buckets event by event, 0/1 Adam's intervals step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.plan import PlanError, Schedule
from thinwire.plan.cluster import NO_BUCKETS, Buckets, Cost, cut, seconds_beside
from thinwire.plan.methods import ZeroOneSteps

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


# 0/1 Adam's intervals


def walked(steps: int, freeze: int, update_scaler: int, local_scaler: int, clipper: int) -> ZeroOneSteps:
    """The paper's rules, one step after the other."""
    exact = gradients = updates = local = 0
    interval, until_doubling = 1, update_scaler
    for step in range(1, min(freeze, steps) + 1):
        if step % interval:
            gradients += 1
            continue
        exact += 1
        until_doubling -= 1
        if not until_doubling:
            interval, until_doubling = 2 * interval, update_scaler
    interval = 1
    for step in range(min(freeze, steps) + 1, steps + 1):
        if step % interval:
            local += 1
        else:
            updates += 1
        if (step - min(freeze, steps)) % local_scaler == 0:
            interval = min(2 * interval, clipper)
    return ZeroOneSteps(exact, gradients, updates, local)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 40), st.integers(1, 1000), st.integers(1, 20))
def test_counts_are_those_of_a_walk(steps, freeze, update_scaler, local_scaler, clipper) -> None:
    schedule = Schedule(
        steps,
        var_freeze_step=freeze,
        var_update_scaler=update_scaler,
        local_step_scaler=local_scaler,
        local_step_clipper=clipper,
    )
    counted = schedule.zero_one_steps()
    assert counted == walked(steps, freeze, update_scaler, local_scaler, clipper)


def test_a_long_run_is_counted_at_once() -> None:
    counted = Schedule(10**12, 0.1, local_step_scaler=10**6).zero_one_steps()
    assert counted.exact + counted.gradients == 10**11
    assert counted.updates / (9 * 10**11) == pytest.approx(1 / 16, rel=1e-3)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"warmup": 1.1},
        {"warmup": float("nan")},
        {"warmup_wire": "fp8"},
        {"var_freeze_step": -1},
        {"powersgd_start": 0.5},
        {"local_step_clipper": 0},
        {"bucket_bytes": 1.5},
    ],
)
def test_a_run_that_makes_no_sense(bad) -> None:
    with pytest.raises(PlanError, match=next(iter(bad))):
        Schedule(**bad)
