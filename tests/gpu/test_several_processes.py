"""Ranks as processes with tensors on GPUs: several on one GPU over Gloo or MPI, staged through the host; NCCL with a
GPU each, where there are two."""

import pytest
import torch

from tests.launching import Jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.launch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
NAMES = pytest.mark.parametrize("name", ["OneBitAdam-0", "OneBitLion-0"])


def check(start, size: int, name: str, backend: str) -> None:
    done = start(size, "-m", "tests.fake_device.cases", "rank", name, "cuda", backend)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{size} ranks agree" in done.stdout, done.stdout[-3000:]


@NAMES
@pytest.mark.parametrize("size", [2, 3])
def test_several_on_one_gpu_over_gloo(jobs: Jobs, name: str, size: int) -> None:
    check(jobs.torchrun, size, name, "gloo")


def test_several_on_one_gpu_over_mpi(jobs: Jobs) -> None:
    check(jobs.mpirun, 2, "OneBitAdam-0", "mpi")


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank: this machine has fewer than two"
)
@NAMES
def test_a_gpu_each_over_nccl(jobs: Jobs, name: str) -> None:
    check(jobs.torchrun, 2, name, "nccl")
