"""The benchmark of a frozen step writes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.benchmarks.frozen_step import NOTHING, main


def test_a_run_writes_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "steps.json"
    assert main(["--layers", "1", "--ranks", "1", "--rounds", "1", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert written["elements"] == 263680
    names = {(result["name"], result["dtype"]) for result in written["results"]}
    assert {("1-bit Adam, frozen", "fp32"), ("1-bit Adam, stage 1, frozen", "bf16"), (NOTHING, "fp32")} <= names
    assert all(result["milliseconds"] > 0 for result in written["results"])
    assert "1-bit Adam, frozen" in capsys.readouterr().out
