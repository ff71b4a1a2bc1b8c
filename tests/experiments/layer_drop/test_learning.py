"""Runs with and without layer drop: they start alike, are validated in turns, and count the layers that they keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.layer_drop.findings import largest_error
from experiments.layer_drop.learning import (
    DROPPING,
    POST_LN,
    PRE_LN,
    Curve,
    DropLearner,
    KeepRates,
    Recipe,
    train_in_turns,
)
from experiments.tasks.sizes import BertSize
from experiments.tasks.tokens import Tokens

RECIPE = Recipe(
    size=BertSize(3, 32, 2),
    sequences_a_step=2,
    steps=7,
    warmup_steps=2,
    weight_decay=0.01,
    theta=0.5,
    evaluate_every=3,
)


@pytest.fixture
def tokens() -> Tokens:
    random = np.random.default_rng(7)
    training, validation = (random.integers(5, 50, (count, 16)).astype(np.int32) for count in (9, 3))
    return Tokens(50, training, validation, None)


def learner(system: str, tokens: Tokens, recipe: Recipe = RECIPE, learning_rate: float = 1e-2) -> DropLearner:
    return DropLearner(system, tokens, recipe, recipe.plan(learning_rate, seed=3))


def test_learners_start_alike_and_are_validated_after_every_turn(tokens: Tokens) -> None:
    learners = [learner(system, tokens) for system in (PRE_LN, DROPPING, POST_LN)]
    train_in_turns(learners)
    for one in learners:
        assert one.curve.steps == [0, 3, 6, 7]
        assert one.curve.seconds == sorted(one.curve.seconds)
        assert one.curve.losses[-1] < one.curve.losses[0]
    baseline, dropping, _ = (one.curve.losses for one in learners)
    assert dropping[0] == baseline[0]
    assert dropping[1:] != baseline[1:]


def test_a_schedule_that_keeps_everything_changes_nothing(tokens: Tokens) -> None:
    learners = [learner(PRE_LN, tokens), learner(DROPPING, tokens, replace(RECIPE, theta=1.0))]
    train_in_turns(learners)
    assert learners[0].curve.losses == learners[1].curve.losses
    assert learners[0].keep_rates() is None
    assert learners[1].keep_rates() == KeepRates([1.0] * 3, [1.0] * 3, [0.0] * 3)


def test_kept_layers_are_counted_over_the_whole_run(tokens: Tokens) -> None:
    one = learner(DROPPING, tokens, replace(RECIPE, theta=0.0, steps=200, warmup_steps=5, evaluate_every=100))
    train_in_turns([one])
    rates = one.keep_rates()
    assert rates is not None
    assert all(round(200 * rate) == pytest.approx(200 * rate) for rate in rates.measured)
    assert largest_error(rates) < 4
    # The last layer is kept with probability θ, which has fallen to 0 after a few of the 200 steps.
    assert rates.measured[-1] < 0.05 < rates.measured[0]


def test_a_run_that_breaks_down_ends_there(tokens: Tokens) -> None:
    # As large as this, the first step takes the weights, and the second the loss, out of fp32's range.
    one = learner(PRE_LN, tokens, replace(RECIPE, warmup_steps=1), learning_rate=1e38)
    train_in_turns([one])
    assert one.broke_down
    assert one.finished
    assert one.curve.steps == [0, 3]


def test_the_formula_is_averaged_over_the_steps() -> None:
    thetas = [1.0, 0.8, 0.35]
    rates = KeepRates.of([0.9, 0.4], thetas)
    for layer, (formula, error) in enumerate(zip(rates.formula, rates.standard_error, strict=True), start=1):
        chances = [1 - layer / 2 * (1 - theta) for theta in thetas]
        assert formula == pytest.approx(sum(chances) / 3)
        assert error == pytest.approx(math.sqrt(sum(chance * (1 - chance) for chance in chances)) / 3)
    assert largest_error(rates) == pytest.approx(
        max(abs(rates.measured[i] - rates.formula[i]) / rates.standard_error[i] for i in (0, 1))
    )


@pytest.mark.parametrize(("loss", "seconds"), [(6.0, 0.0), (4.0, 10.0), (3.5, 15.0), (2.0, 30.0), (1.9, None)])
def test_a_loss_is_reached_on_the_line_between_points(loss: float, seconds: float | None) -> None:
    assert Curve([0, 1, 2, 3], [0.0, 10.0, 20.0, 30.0], [5.0, 4.0, 3.0, 2.0]).seconds_to(loss) == seconds
