"""The study of Lion in small: a whole run on ranks in threads, and what its command line refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import nan
from pathlib import Path

import pytest

from experiments.lion.__main__ import parse, study
from experiments.lion.findings import find, sentences, titles
from experiments.training.trainer import Outcome
from tests.experiments.helpers import write_text
from tests.experiments.training.outcomes import outcome
from thinwire.comm import threads


def test_a_run_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_text(tmp_path / "shopping.txt", 500)
    methods = ["--methods", "adamw", "lion", "onebit-adam"]
    short = ["--steps", "3", "--seeds", "2", "--validation-windows", "8"]
    options = parse(["--corpus", str(corpus), *methods, *short, "--output", str(tmp_path)])
    threads.run(lambda comm: study(comm, options), 2)
    assert (tmp_path / "lion.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "lion.json").read_text())
    assert str(tmp_path) not in json.dumps(found)
    assert list(found["methods"]) == ["adamw", "lion", "onebit-adam"]
    for one in found["methods"].values():
        assert [run["seed"] for run in one["runs"]] == [0, 1]
        losses = one["final_loss_by_learning_rate"]
        assert min(losses.values()) == losses[f"{one['learning_rate']:g}"] == one["runs"][0]["final_loss"]
        assert one["final_loss"] == pytest.approx(sum(run["final_loss"] for run in one["runs"]) / 2)
        assert one["plan"]["learning_rate"] == one["learning_rate"]
    sent = {name: one["bytes_sent"] for name, one in found["methods"].items()}
    assert sent["lion"] == sent["adamw"] > 2 * sent["onebit-adam"]
    assert found["findings"][0] in capsys.readouterr().out


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
