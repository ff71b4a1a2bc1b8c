"""Runs and step times with and without layer drop: how they are made, what is found in them, and its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from experiments.common.results import read_json, write_json
from experiments.layer_drop.__main__ import main
from experiments.layer_drop.findings import Run, find, largest_error
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
from experiments.layer_drop.plots import draw
from experiments.layer_drop.records import read
from experiments.layer_drop.step_time import Saving, count_kept, measure_keep_rates
from experiments.tasks.sizes import BertSize
from experiments.tasks.tokens import Tokens
from tests.experiments.helpers import write_text, written
from thinwire.pld import ProgressiveLayerDrop, drop_layers


def run(system: str, learning_rate: float, seed: int, losses: list[float], seconds: float = 10.0) -> Run:
    points = list(range(len(losses)))
    curve = Curve(points, [seconds * point for point in points], losses)
    rates = KeepRates.of([0.8, 0.4], [0.6, 0.5]) if system == DROPPING else None
    return Run(system, learning_rate, seed, 1000, curve, rates)


RUNS = [
    run(PRE_LN, 1e-3, 0, [6.0, 5.0, 4.0]),
    run(PRE_LN, 1e-3, 1, [6.0, 5.0, 4.2]),
    run(DROPPING, 1e-3, 0, [6.0, 5.0, 4.1], seconds=8.0),
    run(DROPPING, 1e-3, 1, [6.0, 5.0, 4.264], seconds=8.0),
    run(POST_LN, 1e-3, 0, [6.0, 5.5, 5.0]),
    run(PRE_LN, 4e-3, 0, [6.0, 4.0, 3.0]),
    run(DROPPING, 4e-3, 0, [6.0, 4.0, 3.5], seconds=8.0),
    run(POST_LN, 4e-3, 0, [6.0, math.nan]),
]
SAVINGS = {
    name: Saving.of([(kept, 0.02 + 0.08 * kept, 1.0) for kept in (7, 8, 9, 9, 10, 11)], 12, 0.5)
    for name in ("the stack", "the whole step")
}
SETTLED = KeepRates.of([0.97, 0.5], [0.5] * 50)


def test_what_the_runs_say() -> None:
    found = find(RUNS, 1e-3, SAVINGS, SETTLED)
    assert found.final_loss == {PRE_LN: pytest.approx(4.1), DROPPING: pytest.approx(4.182)}
    assert found.loss_difference == pytest.approx(0.02)
    assert found.deviation[PRE_LN] == pytest.approx(0.2 / 2**0.5)
    assert found.time_ratio == pytest.approx(0.8)
    assert found.loss_by_rate[POST_LN] == {"0.001": 5.0, "0.004": None}
    # At 4e-3 layer drop has a loss of 4 after one turn of 8 seconds; the baseline after two of 10.
    assert found.sooner[f"{PRE_LN}, the same rate"] == pytest.approx(20 / 8)
    assert found.sooner[f"{PRE_LN}, its best rate"] is None
    assert found.sooner[f"{POST_LN}, its best rate"] == pytest.approx(20 / 4)
    assert found.quickest_rate == 4e-3
    first, second = found.sentences
    assert "+2.0%" in first
    assert "reached 2.5x sooner; that of its own best rate is never reached" in second


def test_the_picture_shows_broken_runs_too(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    recipe = replace(RECIPE, size=BertSize(2, 32, 2))
    workload = {"size": asdict(BertSize(12, 32, 2)), "sequences": 2, "length": 8, "theta": 0.5}
    content = {
        "machine": {"cpu": "some", "cores": 1},
        "finding": asdict(find(RUNS, 1e-3, SAVINGS, SETTLED)),
        "settings": {"model": "tiny", "corpus": "a text", "sequence_length": 8, **asdict(recipe)},
        "unigram_entropy": 5.2,
        "step_time": {"workload": workload, **{name: asdict(saving) for name, saving in SAVINGS.items()}},
        "keep_rates": {"steps": 50, **asdict(SETTLED)},
        "runs": [asdict(one) for one in RUNS],
    }
    write_json(tmp_path / "results.json", content)
    record = read(read_json(tmp_path / "results.json"))
    assert record.recipe == recipe
    assert record.savings == SAVINGS
    assert record.runs[0] == RUNS[0]
    assert math.isnan(record.runs[-1].curve.losses[-1])
    draw(content, path)
    for picture in (path, tmp_path / "picture_details.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


RECIPE = Recipe(
    size=BertSize(3, 32, 2), sequences_a_step=2, steps=7, warmup_steps=2, weight_decay=0.01, theta=0.5, evaluate_every=3
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


def test_gates_keep_as_often_as_the_formula_says() -> None:
    rates = measure_keep_rates(12, 0.5, 3000)
    assert rates.formula == pytest.approx([1 - layer / 24 for layer in range(1, 13)])
    assert largest_error(rates) < 3
    assert rates.measured != rates.formula


def pairs(kept: Sequence[int], line: tuple[float, float]) -> list[tuple[int, float, float]]:
    """Steps whose time over that of a step with all layers is line[0] + line[1] * kept."""
    random = np.random.default_rng(5)
    without = random.uniform(1, 2, len(kept)).tolist()
    return [(number, (line[0] + line[1] * number) * time, time) for number, time in zip(kept, without, strict=True)]


def test_times_are_read_at_the_expected_number_of_layers() -> None:
    saving = Saving.of(pairs([12, 12, 11, 9, 10, 12, 7], (0.05, 0.08)), 12, 0.5)
    assert saving.ratio == pytest.approx(0.05 + 0.08 * 8.75)
    assert saving.a_layer == pytest.approx(0.08)
    assert saving.expected == pytest.approx(8.75 / 12)
    measured = pairs([8, 9, 10] * 5, (0.1, 0.07))
    kept, seconds, without = measured[4]
    measured[4] = (kept, 40 * seconds, without)  # a disturbed step does not count
    assert Saving.of(measured, 12, 0.5).ratio == pytest.approx(0.1 + 0.07 * 8.75)


def test_kept_layers_of_a_step_are_those_that_ran() -> None:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, 0.0, norm_first=True) for _ in range(5))
    schedule = ProgressiveLayerDrop(0.2, 5.0)
    drop = drop_layers(layers, schedule, seed=8)
    seen = set()
    for step in range(40):
        schedule.update_state(step)
        hidden = torch.randn(2, 3, 8)
        before = [round(rate * step) if step else 0 for rate in drop.keep_rates]
        for layer in layers:
            hidden = layer(hidden)
        after = [round(rate * (step + 1)) for rate in drop.keep_rates]
        ran = [layer for layer, was, now in zip(layers, before, after, strict=True) if now > was]
        assert count_kept(drop) == len(ran)
        seen.add(len(ran))
    assert len(seen) > 2


def test_a_run_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 2000)
    data = ["--model", "tiny", "--vocab-size", "120", "--sequence-length", "16", "--validation-sequences", "8"]
    training = ["--steps", "6", "--batch-size", "4", "--seeds", "2", "--higher-lr", "0.01"]
    timing = ["--layers", "5", "--rounds", "3", "--timed-sequences", "1", "--timed-length", "16"]
    counting = ["--keep-rate-steps", "300", "--output", str(tmp_path)]
    assert main(["--corpus", str(corpus), *data, *training, *timing, *counting]) == 0
    found = written(tmp_path, "layer_drop")
    assert len(found["runs"]) == 2 * 2 + 1 + 3
    assert {run["curve"]["steps"][-1] for run in found["runs"]} == {6}
    assert found["step_time"]["the stack"]["layers"] == len(found["keep_rates"]["measured"]) == 5
    assert found["findings"][0] in capsys.readouterr().out
