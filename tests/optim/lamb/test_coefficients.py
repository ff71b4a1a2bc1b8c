"""What scales a layer's step: trust ratios, the frozen coefficient and its factor stay in their bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thinwire.optim.lamb import LambSettings, Layer, trust_ratio

POSITIVE = st.floats(1e-30, 1e30)
SETTINGS = LambSettings(1e-3, 0.9, 0.999, 1e-8, 0.0, True, False, 10.0, 0.01, 0.9, 4.0, 0.5, 0.1)


@given(st.lists(st.tuples(st.floats(0, 1e30), st.floats(0, 1)), max_size=60))
def test_the_factor_stays_in_its_bounds_and_moves_slowly(measures) -> None:
    layer = Layer()
    for growth, share in measures:
        before = layer.factor
        coefficient = layer.follow(growth, share, SETTINGS)
        assert coefficient == layer.factor  # no trust ratio was ever seen: c = 1
        assert 0.5 <= layer.factor <= 4.0
        assert 0.9 * before <= layer.factor <= 1.1 * before


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=60))
def test_the_frozen_coefficient_lies_among_the_ratios(norms) -> None:
    layer = Layer()
    ratios = [trust_ratio(weight, update, SETTINGS) for weight, update in norms]
    for ratio in ratios:
        assert 0.01 <= ratio <= 10
        layer.smooth(ratio, SETTINGS)
    assert min(ratios) * (1 - 1e-12) <= layer.frozen_coefficient <= max(ratios) * (1 + 1e-12)


def test_a_zero_norm_has_no_trust_ratio() -> None:
    assert trust_ratio(0.0, 1.0, SETTINGS) is None
    assert trust_ratio(1.0, 0.0, SETTINGS) is None
