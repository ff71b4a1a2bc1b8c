"""FSDP2 through codecs, on plain torch, as people use it who call `fully_shard` themselves."""

import pytest

from tests.compress.fully_sharded_job import JOB
from tests.launching import Jobs


@pytest.mark.launch
def test_four_ranks_shard_a_model(jobs: Jobs) -> None:
    done = jobs.torchrun(4, *JOB)
    assert done.returncode == 0, done.stdout + done.stderr
