"""0/1 Adam's intervals, counted step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.plan import PlanError, Schedule
from thinwire.plan.methods import ZeroOneSteps


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
