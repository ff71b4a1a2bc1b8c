"""Trainer and Accelerate as they are installed, on two real processes: one launch for all, as imports take longest."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.launch
def test_trainer_and_accelerate(tmp_path) -> None:
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.hugging_face.program", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held with 2 ranks" in done.stdout
