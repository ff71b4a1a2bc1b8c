"""Every length takes about the same time to measure."""

from __future__ import annotations

from experiments.long_sequences.timing import FEWEST_ROUNDS, rounds_at


def test_quick_lengths_get_more_rounds() -> None:
    assert rounds_at(4096, 9) == 9
    assert rounds_at(2048, 9) == 18
    assert rounds_at(256, 9) == 40
    assert rounds_at(32768, 9) == FEWEST_ROUNDS
