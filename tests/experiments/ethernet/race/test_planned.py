"""The plan beside the race: a step that only computes is predicted exactly, and slower links by what they carry."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.ethernet.race import planned
from experiments.ethernet.race.findings import ALONE
from thinwire.plan import Calibration

SHAPES = [[4096, 64], [64, 64], [64]]
PARTS = {"forward": 0.1, "backward": 0.2, "update": 0.1}
ELEMENTS = 4096 * 64 + 64 * 64 + 64


def probe_of(bytes_per_second: float) -> dict[str, Any]:
    one = {"intercept": 0.0, "bytes_per_second": bytes_per_second, "error": 0.0, "input_bytes": [1], "seconds": [1.0]}
    rates = dict.fromkeys(("memory", "encode", "decode", "average", "adam"), 1e15)
    return {
        "backend": "gloo",
        "nodes": 4,
        "ranks_per_node": 1,
        "between": {
            "ranks": 4,
            "message": 0.0,
            "collectives": {name: dict(one) for name in ("all_to_all", "all_gather", "all_reduce")},
        },
        "inside": None,
        "processor": {**rates, "overlap": 1.0},
    }


def turn(seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "waited": 0.0, "cpu": seconds, "interface_bytes": 0.0}


def test_a_slow_link_takes_what_its_bytes_do() -> None:
    rate = 1000.0
    wire = 2 * 3 / 4 * 4 * ELEMENTS / rate
    turns = {ALONE: [turn(0.8)], "ddp-fp32": [turn(wire)]}
    found = planned.compare(turns, probe_of(rate), SHAPES, PARTS)
    assert found["ddp-fp32"]["measured"] == wire
    assert found["ddp-fp32"]["error"] == pytest.approx(0, abs=0.01)


def test_a_fast_link_leaves_what_is_computed() -> None:
    turns = {ALONE: [turn(0.8)], "ddp-bf16": [turn(0.4)], "onebit-adam": [turn(0.8)]}
    found = planned.compare(turns, probe_of(1e15), SHAPES, PARTS)
    assert found["ddp-bf16"]["predicted"] == pytest.approx(0.8)
    assert found["ddp-bf16"]["error"] == pytest.approx(1)
    assert found["onebit-adam"]["predicted"] < 0.8
    assert planned.median_error([found, found]) == pytest.approx((1 + abs(found["onebit-adam"]["error"])) / 2)


def test_what_was_not_probed_is_foreseen() -> None:
    """Another rate scales the link; hosts that share a core compute as many times as long."""
    calibration = Calibration.model_validate(probe_of(1e6))
    measured = {"shapes": SHAPES, "computing_one_rank": PARTS}

    def predicted(megabits: float, hosts: int, cores_a_host: float) -> float:
        turns = {ALONE: [turn(0.4)], "ddp-fp32": [turn(1.0)]}
        return planned.foresee(turns, calibration, megabits, hosts, cores_a_host, measured)["ddp-fp32"]["predicted"]

    assert predicted(1e9, 2, 1.0) == pytest.approx(0.4)
    collectives = 2  # of the embedding's bucket, and of the rest's: in each, ranks wait for a core
    assert predicted(1e9, 4, 0.5) == pytest.approx(0.8 + collectives * 5e-3, abs=5e-3)
    assert predicted(0.08, 2, 1.0) == pytest.approx(4 * ELEMENTS / 1e4, rel=0.05)
    assert predicted(0.008, 4, 1.0) == pytest.approx(2 * 3 / 4 * 4 * ELEMENTS / 1e3, rel=0.05)
