"""A slice of the kills in training."""

from __future__ import annotations

import pytest

from tests.chaos import kills


@pytest.mark.launch
def test_what_was_killed_goes_on_bit_for_bit() -> None:
    form = kills.Form("OneBitAdam", 1)
    outcome = kills.run(2, seed=1, forms=[form])
    assert outcome.tried == 2
    assert outcome.bad == 0, "\n".join(outcome.examples)
