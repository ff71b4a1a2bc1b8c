"""Runs and step times with and without layer drop: how they are made, what is found in them, and its picture."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments.layer_drop.__main__ import main
from experiments.layer_drop.findings import Run, find, largest_error
from experiments.layer_drop.learning import DROPPING, POST_LN, PRE_LN, Curve, KeepRates
from experiments.layer_drop.step_time import Saving
from tests.experiments.helpers import write_text, written


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


@pytest.mark.programs
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
