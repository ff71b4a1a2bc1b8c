"""The schedule: the formula to the bit, the known methods, and errors for what cannot be a schedule. Draws: uniform,
independent, and a function of seed, step, micro-step and layer alone. Fixed seeds: cannot flake."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusing import refused
from thinwire.pld import ProgressiveLayerDrop, keep_probability
from thinwire.pld.schedule import DropPlan, uniform


@given(st.floats(0, 1), st.floats(0, 10), st.integers(0, 10**7))
def test_theta_is_the_formula(theta: float, gamma: float, step: int) -> None:
    schedule = ProgressiveLayerDrop(theta, gamma)
    assert schedule.get_theta() == 1.0
    schedule.update_state(step)
    assert schedule.get_theta() == (1 - theta) * np.exp(-gamma * step) + theta  # math.exp differs in the last bit
    assert schedule.get_state() == {"progressive_layer_drop": True, "pld_theta": schedule.get_theta()}


@given(st.integers(1, 60), st.floats(0, 1))
def test_lower_layers_drop_less(num_layers: int, theta: float) -> None:
    keeps = [keep_probability(layer, num_layers, theta) for layer in range(1, num_layers + 1)]
    assert keeps == sorted(keeps, reverse=True)
    assert keeps[-1] == pytest.approx(theta, abs=1e-15)
    assert keeps[0] == pytest.approx(1 - (1 - theta) / num_layers)


def test_defaults_auto_and_certain_layers() -> None:
    schedule = ProgressiveLayerDrop()
    assert (schedule.theta, schedule.gamma) == (0.5, 0.001)
    assert ProgressiveLayerDrop(gamma="auto", total_steps=20_000).gamma == 0.005
    schedule = ProgressiveLayerDrop(0.0, 1000.0)
    plan = DropPlan(schedule, 0, 3)
    assert all(plan.decide(layer, micro).kept for layer in (1, 2, 3) for micro in range(100))
    schedule.update_state(9)
    assert not any(plan.decide(3, micro).kept for micro in range(100))


def test_backwards_is_an_error_and_a_repeat_is_not() -> None:
    schedule = ProgressiveLayerDrop()
    schedule.update_state(5)
    schedule.update_state(5)
    refused(ValueError, "at step 5 and was given step 4", schedule.update_state, 4)
    assert schedule.step == 5
    schedule.load_state_dict({"step": 4})
    assert schedule.state_dict() == {"step": 4}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *((lambda one=theta: ProgressiveLayerDrop(one), ValueError, r"\[0, 1\]") for theta in (-0.1, 1.1, math.nan)),
        *((lambda one=rate: ProgressiveLayerDrop(0, one), ValueError, "not negative") for rate in (-1e-9, math.inf)),
        (lambda: ProgressiveLayerDrop(gamma="auto"), ValueError, "give total_steps"),
        (lambda: ProgressiveLayerDrop(gamma=0.1, total_steps=100), ValueError, "leave one of them out"),
        (lambda: ProgressiveLayerDrop(gamma="auto", total_steps=0), ValueError, "at least 1"),
        (lambda: ProgressiveLayerDrop("half"), TypeError, "theta"),  # type: ignore[arg-type]
        (lambda: ProgressiveLayerDrop().update_state(1.5), TypeError, "whole number"),  # type: ignore[arg-type]
        (lambda: ProgressiveLayerDrop().update_state(-1), ValueError, "counted from 0"),
    ],
)
def test_what_makes_no_schedule(make, error: type[Exception], message: str) -> None:
    refused(error, message, make)


STEPS = 10_000


@pytest.mark.parametrize("theta", [0.0, 0.7])
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
    assert all(0 <= uniform(seed, 2**40, 3, 4) < 1 for seed in (-(2**63), -1, 2**63 - 1))
    assert uniform(3, 5, 0, 2) == 0.5395379720396144  # on every machine
