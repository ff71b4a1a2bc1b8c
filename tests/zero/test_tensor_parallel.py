"""Optimizers on models that torch's tensor parallelism cuts, beside the same on whole models."""

import pytest

from tests.launching import Jobs
from tests.zero.tensor_parallel_job import JOB


@pytest.mark.launch
@pytest.mark.parametrize(
    ("task", "replicas"), [("exact", 1), ("exact", 2), ("compressed", 2), ("resume", 1), ("refusals", 2)]
)
def test_two_ranks_hold_a_model(jobs: Jobs, task: str, replicas: int) -> None:
    done = jobs.torchrun(2 * replicas, *JOB, task, str(replicas), "2")
    assert done.returncode == 0, done.stdout + done.stderr
