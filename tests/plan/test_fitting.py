"""Lines through measurements, some of which were disturbed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.plan.probing import fit_line

AMOUNTS = [4.0**power for power in range(3, 11)]


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(1e-9, 1))
def test_an_exact_line_is_found(intercept: float, slope: float) -> None:
    found = fit_line(AMOUNTS, [intercept + slope * amount for amount in AMOUNTS])
    assert found[0] == pytest.approx(intercept, rel=1e-3, abs=1e-3 * slope * AMOUNTS[0])
    assert found[1] == pytest.approx(slope, rel=1e-3, abs=1e-9 * intercept)
    assert found[2] < 1e-6


@settings(deadline=None)
@given(
    st.floats(1e-4, 1e-2),
    st.floats(1e-8, 1e-5),
    st.lists(st.integers(0, 5), min_size=0, max_size=2, unique=True),
    st.floats(3, 100),
)
def test_two_of_eight_may_be_far_too_slow_without_moving_large_transfers(
    intercept: float, slope: float, disturbed: list[int], factor: float
) -> None:
    seconds = [intercept + slope * amount for amount in AMOUNTS]
    for index in disturbed:
        seconds[index] *= factor
    found = fit_line(AMOUNTS, seconds)
    for amount in AMOUNTS[6:]:
        assert found[0] + found[1] * amount == pytest.approx(intercept + slope * amount, rel=0.05)


def test_a_shaper_s_burst_does_not_hide_its_rate() -> None:
    """Half of the sizes pass at once."""
    seconds = [1e-4 + amount * (1e-10 if amount < 20_000 else 1e-7) for amount in AMOUNTS]
    intercept, slope, _ = fit_line(AMOUNTS, seconds)
    assert intercept >= 0
    assert slope == pytest.approx(1e-7, rel=0.1)


@pytest.mark.parametrize(
    ("amounts", "seconds"), [([], []), ([1.0], [1.0]), ([2.0, 2.0], [1.0, 1.0]), ([0.0, 1.0], [1.0, 2.0])]
)
def test_too_little(amounts, seconds) -> None:
    with pytest.raises(ValueError, match="two different amounts"):
        fit_line(amounts, seconds)
