"""What is said of Lion and 1-bit Lion follows from the numbers; the picture is drawn whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import nan
from pathlib import Path

import pytest

from experiments.common.results import read_json, write_json
from experiments.lion.findings import find, sentences, titles
from experiments.lion.plots import draw
from experiments.training.trainer import Outcome
from tests.experiments.training.outcomes import outcome

SWEPT = {
    "adamw": {0.001: 2.2, 0.01: 2.0, 0.1: 2.4},
    "lion": {0.001: 2.1, 0.01: 2.3},
    "onebit-adam": {0.001: 2.3, 0.01: 2.1, 0.1: nan},
}


def outcomes(compressed: Sequence[float] = (2.08, 2.12)) -> dict[str, list[Outcome]]:
    return {
        "adamw": [outcome(2.0, 3200), outcome(2.0, 3200, seed=1)],
        "lion": [outcome(2.1, 3200), outcome(2.1, 3200, seed=1)],
        "onebit-adam": [outcome(loss, 100, frozen_at=20, seed=seed) for seed, loss in enumerate(compressed)],
    }


def test_methods_are_compared_at_their_best_rates() -> None:
    found = find(SWEPT, outcomes())
    assert {name: one.learning_rate for name, one in found.items()} == {
        "adamw": 0.01,
        "lion": 0.001,
        "onebit-adam": 0.01,
    }
    assert found["onebit-adam"].final_loss == pytest.approx(2.1)
    assert found["onebit-adam"].deviation == pytest.approx(0.04 / 2**0.5)
    assert found["onebit-adam"].difference_percent == {"adamw": pytest.approx(5.0)}
    assert found["onebit-adam"].fewer_bytes == 32
    assert found["adamw"].difference_percent == {}
    assert [one.inside_the_sweep for one in found.values()] == [True, False, True]
    assert sentences(found) == ["1-bit Adam, each at its best rate: loss +5.0% beside AdamW; 32.0x fewer bytes"]
    assert titles(found) == ["1-bit Adam sends 32x fewer bytes and ends 5.0% above AdamW's loss"]


def test_without_compression_the_others_are_told() -> None:
    runs = {name: runs for name, runs in outcomes().items() if name != "onebit-adam"}
    assert sentences(find(SWEPT, runs)) == ["Lion, each at its best rate: loss +5.0% beside AdamW"]


def test_a_method_that_diverged_is_called_so() -> None:
    found = find(SWEPT, outcomes(compressed=(nan, nan)))
    assert sentences(found) == ["1-bit Adam diverged at every rate"]


@pytest.mark.parametrize("compressed", [(2.08, 2.12), (nan, 2.1)])
def test_the_picture_is_drawn(tmp_path: Path, compressed: Sequence[float]) -> None:
    runs = outcomes(compressed)
    methods = {
        name: {"final_loss_by_learning_rate": SWEPT[name], "runs": [asdict(run) for run in seeds]}
        for name, seeds in runs.items()
    }
    settings = {"corpus": "a text", "windows_a_rank": 2, "model": {"length": 8}}
    content = {"ranks": 2, "machine": {"cpu": "some", "cores": 1}, "settings": settings, "methods": methods}
    # As a file has it: rates as strings, and null for what is not finite.
    write_json(tmp_path / "lion.json", content)
    draw(read_json(tmp_path / "lion.json"), tmp_path / "lion.png")
    assert (tmp_path / "lion.png").read_bytes().startswith(b"\x89PNG")
