"""Draws: uniform, independent, and a function of seed, step, micro-step and layer alone. Fixed seeds: cannot flake."""

from __future__ import annotations

import itertools
import math

import pytest

from thinwire.pld import ProgressiveLayerDrop, keep_probability
from thinwire.pld.schedule import DropPlan, uniform

STEPS = 10_000


@pytest.mark.parametrize("theta", [0.0, 0.5, 0.9])
def test_keep_rates_over_ten_thousand_steps(theta: float) -> None:
    schedule = ProgressiveLayerDrop(theta, 1000.0)
    plan = DropPlan(schedule, seed=11, num_layers=12)
    kept = [0] * 12
    for step in range(1, STEPS + 1):
        schedule.update_state(step)
        for layer in range(1, 13):
            kept[layer - 1] += plan.decide(layer, 0).kept
    for layer in range(1, 13):
        keep = keep_probability(layer, 12, theta)
        assert abs(kept[layer - 1] / STEPS - keep) <= 3 * math.sqrt(keep * (1 - keep) / STEPS)


@pytest.mark.parametrize("position", range(4))
def test_every_part_of_the_key_counts(position: int) -> None:
    key = [3, 5, 0, 2]
    changed = [[*key[:position], key[position] + offset, *key[position + 1 :]] for offset in range(1000)]
    values = [uniform(*one) for one in changed]
    assert len(set(values)) == 1000
    assert abs(sum(values) / 1000 - 0.5) < 3 * math.sqrt(1 / 12 / 1000)
    neighbours = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(values)) / 999
    assert abs(neighbours) < 3 / 12 / math.sqrt(999)


def test_a_draw_is_the_same_on_every_machine() -> None:
    assert uniform(0, 0, 0, 1) == uniform(0, 0, 0, 1)
    assert all(0 <= uniform(seed, 2**40, 3, 4) < 1 for seed in (-(2**63), -1, 2**63 - 1))


def test_certain_layers() -> None:
    at_first = DropPlan(ProgressiveLayerDrop(0.0, 0.1), 0, 3)
    assert all(at_first.decide(layer, micro).kept for layer in (1, 2, 3) for micro in range(100))
    schedule = ProgressiveLayerDrop(0.0, 1000.0)
    schedule.update_state(9)
    assert not any(DropPlan(schedule, 0, 3).decide(3, micro).kept for micro in range(100))
