"""Optimizers on models that torch's tensor parallelism cuts, beside the same on whole models."""

import pytest

from tests.launching import Jobs
from tests.zero.tensor_parallel_job import JOB


@pytest.mark.launch
@pytest.mark.parametrize(("replicas", "tasks"), [(1, "exact resume"), (2, "exact compressed sharded refusals")])
def test_two_ranks_hold_a_model(jobs: Jobs, replicas: int, tasks: str) -> None:
    done = jobs.torchrun(2 * replicas, *JOB, str(replicas), "2", *tasks.split())
    assert done.returncode == 0, done.stdout + done.stderr
