"""What hides behind backward is what nobody sleeps for."""

from __future__ import annotations

import pytest

from experiments.ethernet.race import overlap_report
from experiments.ethernet.race.findings import ALONE


def turn(seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "waited": 0.0, "cpu": seconds, "interface_bytes": 0.0}


def test_what_hides_is_what_nobody_sleeps_for() -> None:
    sleeping = {"seconds": 1.1, "waited": 0.1, "cpu": 1.0, "interface_bytes": 1e6}
    balanced = {"ddp-bf16": {"megabits": 20.0, "turns": {ALONE: [turn(1.0)], "ddp-bf16": [sleeping]}}}
    (found,) = overlap_report.records(balanced).values()
    assert (found["link_busy"], found["alone"]) == (0.4, 1.0)
    assert found["hidden"] == pytest.approx(0.75)
    assert found["slowed"] == pytest.approx(0.25)
