"""The GPU benchmark of attention: its ratios, and what it says where there is no GPU."""

from __future__ import annotations

import sys

import pytest

from experiments.benchmarks.attention_gpu import run_case, summarise
from experiments.benchmarks.attention_gpu_case import Case, Result


def test_ratios() -> None:
    times = {"thinwire": 2.0, "FlexAttention, compiled": 3.0, "dense, flash": 20.0}
    results = [Result(name, "forward", 4096, 128, 64, 0.25, time) for name, time in times.items()]
    results.append(Result("thinwire", "training", 4096, 64, 64, 0.25, 4.0))
    whole, alone = summarise(results)
    assert (whole["times_faster_than_flex"], whole["times_faster_than_dense"]) == (1.5, 10.0)
    assert whole["of_one_over_density"] == 2.5
    assert (alone["mode"], alone["times_faster_than_flex"], alone["of_one_over_density"]) == ("training", None, None)


CASE = Case(4096, 64, 128, 1)
FOUND = {
    "results": [
        {
            "system": "thinwire",
            "mode": "forward",
            "length": 4096,
            "block": 64,
            "head_size": 128,
            "density": 0.1,
            "milliseconds": 1.5,
        }
    ],
    "left_out": {"other": "is not installed"},
}


@pytest.mark.parametrize(
    ("program", "seconds", "why"),
    [
        ("import os; os.abort()", 60, "exit code -6"),
        ("raise RuntimeError('illegal memory access')", 60, "RuntimeError: illegal memory access"),
        ("print('no figures')", 60, "JSONDecodeError"),
        ("pass", -1, "no time was left"),
    ],
)
def test_a_crash_loses_one_case_and_says_why(program: str, seconds: float, why: str) -> None:
    found, (missing,) = run_case([sys.executable, "-c", program], CASE, seconds)
    assert found == []
    assert why in missing["why"]
    assert (missing["length"], missing["block"], missing["head_size"]) == (4096, 64, 128)
