"""The sentence on the picture follows from the numbers, whatever they are."""

from __future__ import annotations

import pytest

from experiments.training.findings import compare, headline
from tests.experiments.training.outcomes import outcome


def test_close_losses_are_called_the_same() -> None:
    finding = compare([outcome(2.0, 3200)], [outcome(2.01, 400, frozen_at=20)])
    assert finding.claim == "same loss (+0.5%), 8.0x fewer bytes, 8x fewer once frozen"
    assert finding.same_loss


def test_a_worse_loss_is_called_worse() -> None:
    finding = compare([outcome(2.0)], [outcome(2.2, 500, frozen_at=20)])
    assert finding.claim == "10% higher loss, 2.0x fewer bytes, 2x fewer once frozen"
    assert not finding.same_loss


def test_a_better_loss_passes() -> None:
    assert compare([outcome(2.0)], [outcome(1.5, frozen_at=9)]).same_loss


def test_a_run_that_never_froze_says_so() -> None:
    finding = compare([outcome(2.0)], [outcome(2.0)])
    assert finding.fewer_bytes_frozen is None
    assert "never froze" in finding.claim


def test_a_run_that_diverged_says_so() -> None:
    diverged = outcome(float("nan"), frozen_at=3)
    finding = compare([outcome(2.0)] * 2, [diverged, outcome(2.0, frozen_at=3)])
    assert finding.claim == "diverged"
    assert not finding.same_loss


@pytest.mark.parametrize(("onebit", "same"), [(2.15, True), (2.25, False)])
def test_several_seeds_allow_one_standard_deviation(onebit: float, same: bool) -> None:
    finding = compare([outcome(1.8), outcome(2.2), outcome(2.0)], [outcome(onebit, frozen_at=2)] * 3)
    assert finding.exact_deviation == pytest.approx(0.2)
    assert finding.same_loss is same


def test_a_headline_says_the_fewest_bytes_and_the_worst_loss() -> None:
    better = compare([outcome(2.0, 3200)], [outcome(1.9, 100, frozen_at=20)])
    worse = compare([outcome(2.0, 3200)], [outcome(2.06, 800, frozen_at=20)])
    assert (
        headline("1-bit Adam", "AdamW", [better]) == "1-bit Adam sends 32x fewer bytes and ends 5.0% below AdamW's loss"
    )
    both = headline("1-bit Adam", "AdamW", [better, worse])
    assert both == "1-bit Adam sends 4.0x to 32x fewer bytes and ends at most 3.0% above AdamW's loss"
    diverged = compare([outcome(2.0)], [outcome(float("nan"), frozen_at=3)])
    assert headline("1-bit Adam", "AdamW", [better, diverged]) == "1-bit Adam diverged"
