"""The engine's benchmark: paired ratios, and a whole run with the smallest BERT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.benchmarks.engine import summarise
from experiments.benchmarks.engine_step_time import BASELINE, REDUNDANCY
from tests.launching import Jobs


def test_ratios_pair_rounds() -> None:
    summary = summarise({BASELINE: [100.0, 400.0, 200.0], "other": [150.0, 600.0, 300.0]})
    assert summary[BASELINE].milliseconds[1] == 200
    assert summary["other"].ratio_to_ddp == (1.5, 1.5, 1.5)
    low, middle, high = summary["other"].milliseconds
    assert low < middle == 300 < high


@pytest.mark.launch
def test_a_run_writes_numbers_and_picture(tmp_path: Path, jobs: Jobs) -> None:
    sizes = ["--model", "tiny", "--batch-size", "2", "--rounds", "1", "--memory-ranks", "2"]
    ended = jobs.alone("-m", "experiments.benchmarks.engine", *sizes, "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "bench_engine.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "bench_engine.json").read_text())
    times = found["step_time"]["milliseconds"]
    assert {BASELINE, REDUNDANCY, "stage 2, fused AdamW, overlap_comm", "stage 1, 1-bit Adam, frozen"} <= times.keys()
    assert all(len(rounds) == 1 and min(rounds) > 0 for rounds in times.values())
    systems = found["memory"]["systems"]
    assert list(systems) == [
        *(f"stage {stage}, AdamW" for stage in range(4)),
        *(f"stage {stage}, 1-bit Adam" for stage in (1, 2)),
    ]
    for one in systems.values():
        assert one["held"] == pytest.approx(one["formula"], rel=0.15)  # shards of whole blocks weigh in a tiny model
    assert "1-bit Adam, frozen" in ended.stdout
