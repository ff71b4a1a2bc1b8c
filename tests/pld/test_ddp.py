"""Dropped layers under DistributedDataParallel, on two real Gloo processes."""

from __future__ import annotations

import sys

import pytest

from tests.comm.launching import run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.launch
def test_ddp_waits_for_no_dropped_layer() -> None:
    done = run([*TORCHRUN, "-m", "tests.pld.ddp_program", "100"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held" in done.stdout
