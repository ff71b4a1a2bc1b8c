"""When 0/1 Adam sends what: the two intervals as counters would count them, for any scalers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thinwire.optim.algorithm import Send
from thinwire.optim.zero_one import ZeroOneSchedule

scalers = st.integers(1, 12)


@given(scalers, scalers, st.integers(1, 20), st.integers(1, 150))
def test_kinds_are_those_of_counters(var_update_scaler, local_step_scaler, local_step_clipper, freeze_step) -> None:
    schedule = ZeroOneSchedule(var_update_scaler, local_step_scaler, local_step_clipper)
    interval, counter, updates = 1, 0, 0
    local_interval, local_counter = 1, 0
    for step in range(1, 300):
        frozen_at = freeze_step if step > freeze_step else None
        kind = schedule.send(step, updates, frozen_at)
        if frozen_at is None:
            assert kind is (Send.COMPRESSED if step % interval else Send.EXACT)
            if kind is Send.EXACT:
                updates += 1
                counter += 1
            if counter == var_update_scaler:
                interval, counter = 2 * interval, 0
        else:
            assert kind is (Send.LOCAL if step % local_interval else Send.SYNC)
            local_counter += 1
            if local_counter == local_step_scaler:
                local_interval, local_counter = min(2 * local_interval, local_step_clipper), 0


def test_deepspeeds_defaults_far_into_a_run() -> None:
    schedule = ZeroOneSchedule(16, 32_678, 16)
    assert [schedule.variance_interval(updates) for updates in (0, 15, 16, 31, 32, 160)] == [1, 1, 2, 2, 4, 1024]
    assert [schedule.local_interval(steps) for steps in (0, 32_677, 32_678, 4 * 32_678, 10**9)] == [1, 1, 2, 16, 16]
