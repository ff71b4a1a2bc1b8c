"""kill -9 of a random rank at a random moment, again and again: see `tests.engine.checkpoint.kill`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.comm.launching import environment


@pytest.mark.launch
@pytest.mark.parametrize("arguments", [("40",), ("sweep",)])
def test_a_job_that_is_killed_leaves_a_whole_checkpoint(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.engine.checkpoint.kill", *arguments]
    quiet = environment(TORCH_CPP_LOG_LEVEL="ERROR")
    ended = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "kills" in ended.stdout
