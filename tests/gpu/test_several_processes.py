"""Ranks as processes with tensors on GPUs: several on one GPU over Gloo or MPI, staged through the host; NCCL with a
GPU each, where there are two."""

from __future__ import annotations

import pytest
import torch

from tests.launching import Jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.launch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROGRAM = ("-m", "tests.gpu.training_program")


def check(done) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agree") >= 1, done.stdout[-3000:]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLion"])
def test_several_on_one_gpu_over_gloo(jobs: Jobs, name: str, size: int) -> None:
    check(jobs.torchrun(size, *PROGRAM, "gloo", name))


def test_several_on_one_gpu_over_mpi(jobs: Jobs) -> None:
    check(jobs.mpirun(2, *PROGRAM, "mpi", "OneBitAdam"))


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank: this machine has fewer than two"
)
@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLion"])
def test_a_gpu_each_over_nccl(jobs: Jobs, name: str) -> None:
    check(jobs.torchrun(2, *PROGRAM, "nccl", name))
