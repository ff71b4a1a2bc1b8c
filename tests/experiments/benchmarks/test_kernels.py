"""The kernel benchmark writes what it says, and refuses what it cannot measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.benchmarks.kernels import main


def test_a_run_writes_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "rates.json"
    arguments = ["--elements", "64K", "--repetitions", "1", "--output", str(output)]
    assert main(arguments) == 0
    written = json.loads(output.read_text())
    assert written["elements"] == 65536
    names = [result["name"] for result in written["results"]]
    assert {"copy, torch", "sign1 encode", "stat2 encode", "int4 decode", "int8 decode and average 4"} <= set(names)
    assert all(result["milliseconds"] > 0 for result in written["results"])
    assert "sign1 encode" in capsys.readouterr().out
    assert output.with_suffix(".png").stat().st_size > 1000


def test_it_needs_little(tmp_path: Path) -> None:
    """A machine that has a GPU may have nothing beside torch and numpy."""
    names = ("pydantic", "numba", "cupy", "matplotlib", "rich", "transformers")
    program = (
        "import sys; sys.modules.update(dict.fromkeys({!r})); from experiments.benchmarks.kernels import main; main()"
    )
    command = [sys.executable, "-c", program.format(names), "--help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "--device" in shown


@pytest.mark.parametrize("elements", ["0", "2047", "many", "1.5M"])
def test_odd_numbers_of_elements_are_refused(elements: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--elements", elements]) == 2
    assert "not a multiple of 2048" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cuda_benchmark_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
