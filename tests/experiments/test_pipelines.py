"""How long the stages of a schedule are idle, by its order of operations, beside the formulas that books have."""

import pytest

from experiments.ethernet.pipelines import idle_share
from experiments.ethernet.race.pipeline_times import MICRO_BATCHES
from thinwire.plan.meshes import bubble_share


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "stages"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2)])
def test_idle_shares_are_those_of_the_formula(schedule: str, stages: int, ranks: int) -> None:
    for backward in (0.5, 1.0, 3.0):
        share = idle_share(schedule, ranks, 1.0, backward)
        assert share == pytest.approx(bubble_share(ranks, stages * MICRO_BATCHES))


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_backward_in_halves_leaves_the_first_forward_on_the_way_idle(schedule: str) -> None:
    """Of 2 stages a rank, each of three equal operations a micro-batch."""
    for ranks in (2, 4):
        slots = 2 * 3 * MICRO_BATCHES
        assert idle_share(schedule, ranks, 1.0, 2.0) == pytest.approx((ranks - 1) / (slots + ranks - 1))
