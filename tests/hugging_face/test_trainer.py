"""Trainer and Accelerate as they are installed, on two real processes: one launch for all, as imports take longest."""

from __future__ import annotations

import pytest


@pytest.mark.launch
def test_trainer_and_accelerate(jobs, tmp_path) -> None:
    pytest.importorskip("accelerate")
    done = jobs.torchrun(2, "-m", "tests.hugging_face.program", str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held with 2 ranks" in done.stdout
