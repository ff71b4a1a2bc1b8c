"""Jobs end when their time is over, with all their children."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from experiments.ethernet.cluster.mpirun import clean_environment, run_limited


def test_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    finished = run_limited(["sh", "-c", "pwd; echo oops >&2; exit 3"], os.environ, 30.0, tmp_path)
    assert (finished.code, finished.output) == (3, f"{tmp_path}\noops\n")


def test_a_job_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    started = time.monotonic()
    finished = run_limited(["sh", "-c", "echo begun; sleep 600 & wait"], os.environ, 0.5, tmp_path)
    assert finished.code is None
    assert finished.output == "begun\n"
    assert time.monotonic() - started < 60


def test_a_launcher_around_this_process_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "MASTER_ADDR", "PMIX_RANK"):
        monkeypatch.setenv(name, "7")
    environment = clean_environment({"MASTER_ADDR": "10.77.0.1"})
    assert environment["MASTER_ADDR"] == "10.77.0.1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert not {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"} & environment.keys()
