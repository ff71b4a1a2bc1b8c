"""What a race to a loss becomes: arrivals, a sentence, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.ethernet.race import loss_report
from experiments.ethernet.race.contenders import BASELINE, FAIR_BASELINE

MACHINE = {"cpu": "some", "cores": 2}


def run(seconds_a_step: float, losses: list[float]) -> dict[str, Any]:
    steps = list(range(10, 10 * len(losses) + 1, 10))
    return {
        "steps": steps,
        "losses": losses,
        "seconds": [seconds_a_step * step for step in steps],
        "bytes_sent": [100 * step for step in steps],
        "seconds_a_step": {"exact": seconds_a_step},
    }


@pytest.fixture
def runs() -> dict[str, dict[str, Any]]:
    return {
        BASELINE: run(2.0, [6.0, 5.0, 4.0]),
        FAIR_BASELINE: run(1.0, [6.0, 5.0, 4.0]),
        "ddp-powersgd-1": run(0.1, [6.0, 5.9, 5.8]),
        "onebit-adam": run(0.25, [6.0, 5.0, 4.0]),
    }


def test_arrivals_lie_between_points(runs: dict[str, dict[str, Any]]) -> None:
    goal = loss_report.goal_of(runs)
    assert goal.loss == pytest.approx(4.04)
    assert goal.steps == 30
    reached = loss_report.arrivals(runs, goal)
    assert reached[FAIR_BASELINE] == pytest.approx(29.6)
    assert reached["ddp-powersgd-1"] is None
    assert "1-bit Adam reaches the same loss 4.0x as soon" in loss_report.sentence(runs, goal)


def test_power_sgd_is_compared_with_where_it_arrives(runs: dict[str, dict[str, Any]]) -> None:
    goal = loss_report.goal_of(runs)
    assert loss_report.sentence(runs, goal).endswith("; not in as many steps: PowerSGD")
    runs["diloco-30-int4"] = run(0.1, [6.0, 5.5, 5.0])
    assert loss_report.sentence(runs, goal).endswith("; not in as many steps: PowerSGD and DiLoCo")
    runs["ddp-powersgd-1"] = run(0.125, [6.0, 5.0, 4.0])
    assert loss_report.sentence(runs, goal).endswith("0.5x as DDP, PowerSGD rank 1; not in as many steps: DiLoCo")


def test_who_is_there_at_the_first_point_arrived_then() -> None:
    assert loss_report.seconds_to(5.0, [3.0, 6.0], [4.0, 3.0]) == 3.0


def test_a_race_that_ours_lose_says_so(runs: dict[str, dict[str, Any]]) -> None:
    runs["onebit-adam"] = run(0.25, [6.0, 5.5, 5.0])
    assert "None of ours" in loss_report.sentence(runs, loss_report.goal_of(runs))


def test_who_takes_more_steps_says_so(runs: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    runs["diloco-30-int4"] = run(0.1, [6.0, 5.5, 5.0, 4.5, 4.0])
    goal = loss_report.goal_of(runs)
    assert loss_report.sentence(runs, goal).startswith("DiLoCo, 30 steps, int4, 50 steps in all reaches")
    loss_report.print_table(runs, goal)
    assert "DiLoCo, 30 steps, int4, 50 steps in all " in capsys.readouterr().out


def test_the_picture_of_losses_is_drawn(tmp_path: Path, runs: dict[str, dict[str, Any]]) -> None:
    loss_report.print_table(runs, loss_report.goal_of(runs))
    content = {
        "machine": MACHINE,
        "subject": "BERT",
        "findings": ["one"],
        "megabits": 50,
        "runs": runs,
    }
    loss_report.draw(content, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[1:4] == b"PNG"
