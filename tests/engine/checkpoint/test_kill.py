"""kill -9 of a random rank at a random moment, again and again: see `tests.engine.checkpoint.kill`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launching import environment


@pytest.mark.launch
def test_a_job_that_is_killed_leaves_a_whole_checkpoint() -> None:
    """Rank 0 alone at each of its calls, and ranks among others at random, anew in every run of this."""
    command = [sys.executable, "-m", "tests.engine.checkpoint.kill", "sweep", "20"]
    # A kill takes nothing from the kernel, on disk or not: only fsync takes its time on one.
    memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    quiet = environment(TORCH_CPP_LOG_LEVEL="ERROR", **memory)
    ended = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "\n20: 20 kills" in ended.stdout
