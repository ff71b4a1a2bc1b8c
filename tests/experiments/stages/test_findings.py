"""What is found in given losses of stages, shardings and resumed runs."""

from __future__ import annotations

import pytest

from experiments.stages.findings import find
from tests.experiments.stages.given import sharded, small


def test_equal_losses_are_the_same_bits() -> None:
    found = find(small(), sharded())
    assert found.sentences[1].endswith("the same bits")
    assert found.final_difference == {"ZeRO-1": 0, "ZeRO-2": 0}
    assert found.deviation["unsharded"] == pytest.approx(0.1 / 2**0.5)


def test_a_difference_anywhere_is_found() -> None:
    runs = small()
    runs[3]["adamw, stage 2"]["training"][0] *= 1 + 1e-3
    runs[8]["onebit-adam, resumed"]["training"][0] *= 0.98
    found = find(runs, sharded(zero_1=1.1))
    assert found.stages["3"]["2"] == pytest.approx(1e-3)
    assert found.stages["3"]["1"] == 0
    assert found.resumed["onebit-adam"]["8"] == pytest.approx(0.02)
    assert found.final_difference["ZeRO-1"] == pytest.approx(0.1 / 1.05)
    assert "2.00%" in found.sentences[2]
