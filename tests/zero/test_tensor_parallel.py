"""Optimizers on models that torch's tensor parallelism cuts, beside the same on whole models."""

import pytest

from tests.launching import Jobs
from tests.zero.tensor_parallel_job import JOB


@pytest.mark.launch
def test_two_ranks_hold_a_model(jobs: Jobs) -> None:
    """Of two replicas; one alone: tests/engine/parts_job."""
    done = jobs.torchrun(4, *JOB, "2", "2", "exact", "compressed", "resume", "sharded", "refusals")
    assert done.returncode == 0, done.stdout + done.stderr
