"""Optimizers over a part of the job's ranks: what others do and hold is nothing to them."""

from typing import Any

import pytest
import torch

from tests.launching import Jobs
from tests.optim.mesh_job import BUILDS, JOB, TIMEOUT, alone, trained
from thinwire.comm import Communicator, threads


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_half_of_the_ranks_trains_as_a_job_of_its_own(build: Any) -> None:
    expected = [alone(build, 0), alone(build, 1)]

    def train_half(comm: Communicator) -> bool:
        half = comm.split(comm.rank % 2)
        return torch.equal(trained(build, comm.rank % 2, comm=half), expected[comm.rank % 2][comm.rank // 2])

    assert all(threads.run(train_half, 4))


@pytest.mark.launch
def test_on_a_mesh_of_torch(jobs: Jobs) -> None:
    done = jobs.torchrun(4, *JOB, "on_mesh")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.launch
def test_on_a_split_of_mpi(jobs: Jobs) -> None:
    done = jobs.mpirun(4, *JOB, "over_mpi")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.programs
@pytest.mark.parametrize(("when", "lazy"), [("before", "0"), ("before", "1"), ("later", "1")])
def test_a_rank_lost_in_one_group_ends_that_group_alone(jobs: Jobs, when: str, lazy: str) -> None:
    survivors = jobs.orphans(4, *JOB, "lose", when, victim=3, TORCH_GLOO_LAZY_INIT=lazy)
    for rank, survivor in enumerate(survivors):
        if rank == 1:
            error = next(line for line in survivor.stdout.splitlines() if "thinwire.comm.errors.Communication" in line)
            assert survivor.returncode != 0
            assert "on rank 1 of the group of ranks 1, 3: rank 3 did not answer" in error
            error = error.replace("timed out connecting: SO_ERROR: Connection refused", "")  # torch 2.15's, at once
            assert "timed out" not in error or f"after {TIMEOUT:g} s" in error
        else:
            assert survivor.returncode == 0, survivor.stdout
            assert f"rank {rank} trained on" in survivor.stdout
