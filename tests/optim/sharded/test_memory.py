"""The formula of packed state, against what the pages promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.zero.bucket_layout import frozen_state_formula


@given(parameters=st.integers(0, 10**12), ranks=st.integers(1, 10**4))
def test_formulas(parameters: int, ranks: int) -> None:
    for expected, formula in [
        (5.125 + 8 / ranks, frozen_state_formula(parameters, ranks)),
        (9.125 + 4 / ranks, frozen_state_formula(parameters, ranks, element_bytes=4)),
        (9.125 + 8 / ranks, frozen_state_formula(parameters, ranks, element_bytes=4, fresh_variance=True)),
    ]:
        assert sum(formula.values()) == pytest.approx(parameters * expected)
