"""What is said of the contenders follows from the numbers; the picture is drawn whatever they are."""

from __future__ import annotations

from dataclasses import asdict
from math import nan
from pathlib import Path

import pytest

from experiments.common.results import read_json, write_json
from experiments.frontier.findings import missing, seconds_at, sentences, standings, summary, title
from experiments.frontier.plots import draw
from experiments.frontier.store import Run
from tests.experiments.training.outcomes import outcome


def run(contender: str, rate: float, loss: float, sent: int, seed: int = 0, cpu: float = 0.01) -> Run:
    return Run(2, contender, rate, cpu, outcome(loss, sent, seed=seed))


RUNS = [
    run("adamw", 0.001, 2.2, 3200),
    run("adamw", 0.002, 2.0, 3200),
    run("adamw", 0.002, 2.1, 3200, seed=1),
    run("adamw", 0.004, nan, 3200),
    run("diloco-30-none", 0.002, 2.06, 100, cpu=0.02),
    run("diloco-30-none", 0.002, 2.06, 100, seed=1, cpu=0.02),
    run("diloco-30-int8", 0.002, 2.30, 25),
    run("onebit-lion", 0.001, nan, 50),
]


def test_contenders_stand_at_their_best_rates() -> None:
    found = standings(RUNS, 2, steps=10)
    adamw, plain, coarse = found["adamw"], found["diloco-30-none"], found["diloco-30-int8"]
    assert (adamw.rate, adamw.seeds, adamw.inside_the_sweep) == (0.002, 2, True)
    assert adamw.loss == pytest.approx(2.05)
    assert adamw.deviation == pytest.approx(0.1 / 2**0.5)
    assert adamw.fewer_bytes is None
    assert (plain.fewer_bytes, plain.inside_the_sweep) == (32, False)
    assert plain.percent_above == {"adamw": pytest.approx(100 * (2.06 / 2.05 - 1))}
    assert coarse.percent_above == {
        "adamw": pytest.approx(100 * (2.30 / 2.05 - 1)),
        "diloco-30-none": pytest.approx(100 * (2.30 / 2.06 - 1)),
    }
    assert plain.seconds["20 Mb/s"] == pytest.approx(10 * 0.02 + 8 * 100 / 20e6) == seconds_at(20e6, 0.2, 100)
    assert title(found, 2) == ("DiLoCo, 30 steps, fp32: 32x fewer bytes than AdamW, 0.5% above its loss (2 workers)")
    lines = sentences(found, 2)
    assert lines[0] == "2 workers: 1-bit Lion diverged at every rate"
    assert "12.20% beside AdamW, +11.65% beside DiLoCo, 30 steps, fp32; 128x fewer bytes" in lines[2]
    assert missing({2: found}, ["adamw", "diloco-30-int8", "lamb"], [2], 2) == [
        "DiLoCo, 30 steps, int8, 2 workers: 1 of 2 seeds",
        "LAMB, 2 workers: 0 of 2 seeds",
    ]


@pytest.mark.parametrize("runs", [RUNS, RUNS[4:]], ids=["all", "without the baseline"])
def test_the_picture_is_drawn(tmp_path: Path, runs: list[Run]) -> None:
    settings = {"description": "A model learns", "steps": 10, "unit": "loss", "corpus": "a text"}
    content = {
        "machine": {"cpu": "some", "cores": 1},
        "settings": settings,
        "runs": {one.name: asdict(one) for one in runs},
    }
    content |= summary(runs, 10, ["adamw"], [2], 2)
    write_json(tmp_path / "frontier_text.json", content)
    draw(read_json(tmp_path / "frontier_text.json"), tmp_path / "frontier_text.png")
    assert (tmp_path / "frontier_text.png").read_bytes().startswith(b"\x89PNG")
