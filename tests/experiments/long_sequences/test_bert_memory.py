"""Memory grows with the length as a polynomial, which says how far to trust it."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.long_sequences.bert_memory import grow
from experiments.long_sequences.systems import BLOCK


@pytest.mark.parametrize(("coefficients", "degree"), [((1800.0, 6e5, 2e9), 2), ((7e5, 2e9), 1)])
def test_growth_finds_the_longest_sequence(coefficients: tuple[float, ...], degree: int) -> None:
    def needs(length: int) -> int:
        return round(np.polyval(coefficients, length))

    growth = grow({length: needs(length) for length in (512, 1024, 2048, 4096)[: degree + 2]}, degree)
    np.testing.assert_allclose(growth.coefficients, coefficients, rtol=1e-4)
    assert growth.held_out_error == pytest.approx(0, abs=1e-6)
    longest = growth.longest(24e9)
    assert longest % BLOCK == 0
    assert needs(longest) <= 24e9 < needs(longest + BLOCK)
    assert growth.longest(1e9) == 0


def test_growth_says_how_wrong_it_was() -> None:
    growth = grow({100: 100, 200: 200, 400: 800}, 1)
    assert growth.held_out_length == 400
    assert growth.held_out_error == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="needs 3 lengths, got 2"):
        grow({100: 100, 200: 200}, 1)
