"""What is found in given runs and step times of layer drop, and its picture."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments.common.results import read_json, write_json
from experiments.layer_drop.findings import Run, find
from experiments.layer_drop.learning import DROPPING, POST_LN, PRE_LN, Curve, KeepRates, Recipe
from experiments.layer_drop.plots import draw
from experiments.layer_drop.records import read
from experiments.layer_drop.step_time import Saving
from experiments.tasks.sizes import BertSize


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


def test_a_lead_lost_is_called_later() -> None:
    slow = [*RUNS[:6], run(DROPPING, 4e-3, 0, [6.0, 4.0, 3.0], seconds=25.0), RUNS[7]]
    found = find(slow, 1e-3, SAVINGS, SETTLED)
    assert found.sooner[f"{PRE_LN}, its best rate"] == pytest.approx(20 / 50)
    assert "its own best rate is reached 2.5x later" in found.sentences[1]


def test_the_picture_shows_broken_runs_too(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    recipe = Recipe(
        size=BertSize(2, 32, 2),
        sequences_a_step=2,
        steps=7,
        warmup_steps=2,
        weight_decay=0.01,
        theta=0.5,
        evaluate_every=3,
    )
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
