"""Dropped layers under DistributedDataParallel, on two real Gloo processes."""

from __future__ import annotations

import pytest


@pytest.mark.launch
def test_ddp_waits_for_no_dropped_layer(jobs) -> None:
    done = jobs.torchrun(2, "-m", "tests.pld.ddp_program", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held" in done.stdout
